"""Futures over Ray's object references and Serve's responses."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.serve.handle import DeploymentResponse

from joynexus.actors import ray_calls
from joynexus.actors.roles import GONE, unwrap
from joynexus.errors import ServiceError

Answer = TypeVar("Answer")


class Future(Generic[Answer]):
    """The answer to a call, once it is there; wait with ``result()`` or ``await``."""

    def __init__(
        self,
        pending: Any,  # noqa: ANN401  # one Ray reference, several, or a Serve response
        *,
        finish: Callable[[Any], Answer] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a call that was made.

        Args:
            pending: What to wait for.
            finish: Turns what came into the answer, once, in the first ``result()``; None takes it as it is.
            failed: Called when an error is seen.
        """
        self._pending = pending
        self._finish = finish
        self._failed = failed
        self._answers: list[Answer] = []

    def done(self) -> bool:
        """Whether the answer, or the error, is there."""
        if not isinstance(self._pending, DeploymentResponse):
            pending = cast("list[Any]", self._pending if isinstance(self._pending, list) else [self._pending])
            return not ray_calls.pending(pending, 0.0)
        try:
            cast("Any", self._pending).result(timeout_s=0)
        except TimeoutError:
            return False
        except Exception:  # noqa: BLE001  # an error is an answer too
            return True
        return True

    def result(self, timeout_s: float | None = None) -> Answer:
        """Wait for the answer.

        Raises:
            TimeoutError: After ``timeout_s``; the call goes on.
            JoyNexusError: What the call was refused for or failed with, as its own class.
            ServiceError: If whoever was to answer died. Whether the call took effect is then not known.
        """
        if not self._answers:
            found = self._wait(timeout_s)
            self._answers.append(found if self._finish is None else self._finish(found))
        return self._answers[0]

    def _wait(self, timeout_s: float | None) -> Any:  # noqa: ANN401
        try:
            if isinstance(self._pending, DeploymentResponse):
                return cast("Any", self._pending).result(timeout_s=timeout_s)
            return cast("Any", ray).get(self._pending, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(f"no answer within {timeout_s} s") from error
        except RayTaskError as error:
            self._note_failure()
            raise unwrap(error) from error
        except GONE as error:
            self._note_failure()
            raise ServiceError(f"the actor that was called died: {error}. It is made anew; call again.") from error

    def _note_failure(self) -> None:
        if self._failed is not None:
            self._failed()

    def __await__(self) -> Generator[Any, None, Answer]:
        """Wait without blocking the event loop."""
        return asyncio.to_thread(self.result).__await__()
