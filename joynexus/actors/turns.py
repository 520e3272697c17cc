"""Training calls take effect in the order of their numbers, in whatever order they arrive.

Ray delivers the calls of one caller to an async actor in any order: a large batch is fetched while the small call made
behind it is already here. A call that came early waits for those before it. Behind a call that was refused, and so
took no number, nothing may take effect either: what was made behind it is refused at once, until its maker, who has
seen the refusal, uses the number again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from joynexus.errors import JoyNexusError, SequenceConflictError
from joynexus.types import TrainingCall, TrainingResult

PATIENCE_S = 10.0
"""How long an early call waits for the one before it, which may never come: its maker may have died."""

Accepted = Future[TrainingResult]
Attempt = Callable[[], Awaitable[Accepted | None]]


class Turns:
    """Lets the calls of all tenants in. Lives on one event loop."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._refused: dict[str, tuple[int, str]] = {}
        """Number and reason of each tenant's refused call, until the number is used."""
        self._moves = 0
        self._moved = asyncio.Condition()

    async def take(self, call: TrainingCall, attempt: Attempt, submit: Attempt) -> Accepted:
        """Submit a call when it is its turn.

        Args:
            call: The call.
            attempt: Submits it if its number is due or was used before, and returns None if others have to come first.
            submit: Submits it whatever its number.

        Returns:
            Its future.

        Raises:
            SequenceConflictError: If a call before it was refused or did not come.
            JoyNexusError: What the call itself is refused for.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            self._check(call)
            seen = self._moves
            accepted = await self._noted(call, attempt)
            if accepted is not None:
                return accepted
            if not await self._wait_for_move(seen, deadline):
                late = await submit()
                assert late is not None, "an early call is refused, and never left open"
                return late

    def forget(self, tenant: str) -> None:
        """Forget a tenant that is closed."""
        self._refused.pop(tenant, None)

    def _check(self, call: TrainingCall) -> None:
        number, reason = self._refused.get(call.tenant, (call.sequence, ""))
        if call.sequence > number:
            raise SequenceConflictError(
                f"tenant {call.tenant!r}: call {call.sequence} was made behind call {number}, which was refused: "
                f"{reason} Make it again."
            )

    async def _noted(self, call: TrainingCall, attempt: Attempt) -> Accepted | None:
        """Make the attempt, remember how it ended, and wake those that wait behind it."""
        try:
            accepted = await attempt()
        except JoyNexusError as error:
            if not isinstance(error, SequenceConflictError):
                self._refused[call.tenant] = (call.sequence, str(error))
            await self._wake()
            raise
        if accepted is not None:
            self._refused.pop(call.tenant, None)
            await self._wake()
        return accepted

    async def _wake(self) -> None:
        async with self._moved:
            self._moves += 1
            self._moved.notify_all()

    async def _wait_for_move(self, seen: int, deadline: float) -> bool:
        """Wait until a call was accepted or refused; False at the deadline."""
        try:
            async with self._moved, asyncio.timeout_at(deadline):
                await self._moved.wait_for(lambda: self._moves != seen)
        except TimeoutError:
            return False
        return True
