"""Interrupting a prediction at its pauses, for requests that may not wait for its end."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from joynexus.errors import JoyNexusError, ServiceError
from joynexus.models.pauses import Visit
from joynexus.types import ActionChunk, PredictRequest

log = logging.getLogger(__name__)

PAUSES_AHEAD = 2
"""How many pauses the host may be ahead of an accelerator while it can be interrupted."""

Answer = ActionChunk | JoyNexusError
RunAside = Callable[[Sequence[PredictRequest]], list[Answer]]


@runtime_checkable
class Urgent(Protocol):
    """Requests that come while a prediction runs, and for which it is interrupted. Called from the engine's thread."""

    def take(self) -> Sequence[PredictRequest]:
        """Return the requests that have come, best of one schema signature; none where nobody has."""
        ...

    def give(self, answers: Sequence[Answer]) -> None:
        """Answer what :meth:`take` has just returned, in order."""
        ...


class Pace:
    """Keeps the host near an accelerator, which puts nothing aside that was launched on it. Without effect on a CPU."""

    def __init__(self, device: torch.device, mark: Callable[[], torch.Event] | None = None) -> None:
        """Start with nothing launched.

        Args:
            device: Where the prediction runs.
            mark: Records an event on the device's present stream; None takes torch's own.
        """
        self._is_ahead = device.type != "cpu"
        self._mark = mark or (lambda: torch.Event(device))
        self._marks: deque[torch.Event] = deque()

    def keep(self) -> None:
        """Wait until no more than :data:`PAUSES_AHEAD` of the marks made here are ahead of the device."""
        if not self._is_ahead:
            return
        mark = self._mark()
        mark.record()
        self._marks.append(mark)
        if len(self._marks) > PAUSES_AHEAD:
            self._marks.popleft().synchronize()


def visitor(urgent: Urgent, run: RunAside, pace: Pace) -> Visit:
    """Return what is called at the pauses of a prediction that may be interrupted.

    Args:
        urgent: Who has come.
        run: Answers requests in the middle of the prediction.
        pace: Of the device.
    """

    def visit() -> None:
        pace.keep()
        requests = urgent.take()
        if not requests:
            return
        try:
            answers = run(requests)
        except Exception as error:
            log.exception("%d requests failed in the middle of another prediction", len(requests))
            answers = [_failed(request, error) for request in requests]
        urgent.give(answers)

    return visit


def _failed(request: PredictRequest, error: Exception) -> Answer:
    return ServiceError(
        f"tenant {request.tenant!r}: the engine failed on its request: {type(error).__name__}: {error}. Try again."
    )
