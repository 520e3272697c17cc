"""A tenant's calls to its training slot, in the order in which its driver made them, awaited or not.

    forward_backward 7 ─ optim_step 8 ─ sync_weights ─ forward_backward 9 ─ ...
      numbered: the actor lets them in by number    after 8     after sync_weights

Training calls bear numbers and are all under way at once. Any other call on the slot is given, as an argument that
nobody reads, the reference of the call before it, and the training calls behind it are given its own: Ray delivers a
call only when its arguments are there. So a publication holds every step made before it and none made after.
"""

import threading
from typing import Any

from joynexus.actors import names, ray_calls
from joynexus.actors.roles import find_role
from joynexus.api.future import Future
from joynexus.types import TrainingCall, TrainingResult

DRAIN_S = 600.0
"""How long the calls under way may take to end after one of them failed."""
KEPT = 64
"""Calls under way that are remembered before those that have ended are looked for."""


class SlotCalls:
    """Makes one tenant's calls to its TrainingActor. One per driver: it numbers them."""

    def __init__(self, tenant: str, backbone: str, namespace: str) -> None:
        self._tenant = tenant
        self._role = names.trainer(backbone)
        self._namespace = namespace
        self._lock = threading.Lock()
        self._trainer: Any = None
        self._number: int | None = None
        """Of the next training call; None where the actor has to be asked."""
        self._last: Any = None
        """Reference of the newest call."""
        self._barrier: Any = None
        """Reference of the newest call that was no training call."""
        self._under_way: list[Any] = []

    def train(self, **parts: Any) -> Future[TrainingResult]:  # noqa: ANN401
        """Make a training call."""
        with self._lock:
            number = self._next_number()
            call = TrainingCall(tenant=self._tenant, sequence=number, **parts)
            self._last = self._found().submit.remote(call, self._barrier)
            self._number = number + 1
            self._remember(self._last)
            return Future(self._last, failed=self.forget)

    def call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Make another call on the slot: after every call before it, and before every call behind it.

        Returns:
            Its reference.
        """
        with self._lock:
            self._settle()
            reference = getattr(self._found(), method).remote(self._tenant, *arguments, after=self._last)
            self._last = self._barrier = reference
            self._remember(reference)
            return reference

    def forget(self) -> None:
        """Ask the actor anew, before the next call, who it is and which number is due.

        To be called when a call failed (one that is refused takes no number) and when somebody else made calls.
        """
        with self._lock:
            self._number = self._last = self._barrier = self._trainer = None

    def _next_number(self) -> int:
        self._settle()
        if self._number is None:
            return Future[int](self._found().next_sequence.remote(self._tenant)).result()
        return self._number

    def _settle(self) -> None:
        """After :meth:`forget`: let the calls that are still under way end, so that nothing overtakes them."""
        if self._last is None:
            self._under_way = ray_calls.pending(self._under_way, DRAIN_S)

    def _found(self) -> Any:  # noqa: ANN401
        if self._trainer is None:
            self._trainer = find_role(self._role, self._namespace)
        return self._trainer

    def _remember(self, reference: Any) -> None:  # noqa: ANN401
        self._under_way.append(reference)
        if len(self._under_way) > KEPT:
            self._under_way = ray_calls.pending(self._under_way, 0.0)
