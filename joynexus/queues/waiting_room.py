"""Requests that wait for a forward: by tenant, in order, bounded, and gone at once when their callers give up."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from joynexus.errors import BackPressureError, InvalidBatchError
from joynexus.scheduling.fairness import FairShare, Priority
from joynexus.types import ActionChunk, PredictRequest

_WINDOW_S = 1.0
"""Callers that were seen in this time, or in the same time before it, are expected to come back."""


@dataclass(eq=False, slots=True)
class Pending:
    """A request, and the caller who waits for it."""

    request: PredictRequest
    signature: str
    rows: int
    queued_at: float
    answer: asyncio.Future[ActionChunk]
    is_taken: bool = False
    """Whether it was given to the engine."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.request.tenant


class RecentPeak:
    """The largest number of callers at once in the last one to two windows."""

    def __init__(self) -> None:
        self.current = 0
        """Callers now."""
        self._peak = 0
        self._peak_before = 0
        self._since = 0.0

    def enter(self, now: float) -> None:
        """Count a caller in."""
        self._roll(now)
        self.current += 1
        self._peak = max(self._peak, self.current)

    def leave(self, now: float) -> None:
        """Count a caller out."""
        self._roll(now)
        self.current -= 1

    def value(self, now: float) -> int:
        """Return the peak."""
        self._roll(now)
        return max(self._peak, self._peak_before)

    def _roll(self, now: float) -> None:
        age = now - self._since
        if age >= _WINDOW_S:
            self._peak_before = self._peak if age < 2 * _WINDOW_S else self.current
            self._peak = self.current
            self._since = now


class WaitingRoom:
    """Who waits, and whose turn it is. Pure but for the futures that it carries; time is an argument."""

    def __init__(self, max_rows: int) -> None:
        """Start empty.

        Args:
            max_rows: Rows that wait at most.
        """
        self._max_rows = max_rows
        self._fair = FairShare()
        # Ordered dicts: a request that is cancelled leaves from the middle at once, and the head is found at once.
        self._lanes: dict[str, OrderedDict[Pending, None]] = {}
        self._rows: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self.num_rows = 0

    def __iter__(self) -> Iterator[Pending]:
        return (pending for lane in self._lanes.values() for pending in lane)

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def set_share(self, tenant: str, weight: float, priority: Priority) -> None:
        """Give a tenant a weight and a class."""
        self._fair.add(tenant, weight, priority)

    def forget(self, tenant: str) -> list[Pending]:
        """Drop a tenant's share, and return its requests, which are dropped too."""
        left = list(self._lanes.get(tenant, ()))
        for pending in left:
            self.discard(pending)
        self._fair.remove(tenant)
        return left

    def add(self, pending: Pending) -> None:
        """Let a request in.

        Raises:
            InvalidBatchError: If it could never enter.
            BackPressureError: If there is no room now.
        """
        if not 1 <= pending.rows <= self._max_rows:
            raise InvalidBatchError(
                f"tenant {pending.tenant!r}: a request of {pending.rows} rows, a replica queues {self._max_rows} at "
                "most. Send at least one row, and split what is larger."
            )
        if self.num_rows + pending.rows > self._max_rows:
            raise BackPressureError(
                f"tenant {pending.tenant!r}: {self.num_rows} rows wait at this replica, {self._max_rows} at most. "
                "Try again in a moment, or add replicas to the service spec."
            )
        if pending.tenant not in self._fair:
            self._fair.add(pending.tenant)
        self._lanes.setdefault(pending.tenant, OrderedDict())[pending] = None
        self._count(pending, +1)

    def discard(self, pending: Pending) -> bool:
        """Take a request out; False if it was not waiting."""
        lane = self._lanes.get(pending.tenant)
        if lane is None or pending not in lane:
            return False
        del lane[pending]
        if not lane:
            del self._lanes[pending.tenant]
        self._count(pending, -1)
        return True

    def rows_of(self, signature: str) -> int:
        """Rows of a signature that wait."""
        return self._rows[signature]

    def requests_of(self, signature: str) -> int:
        """Requests of a signature that wait."""
        return self._requests[signature]

    def next_signature(self, now: float) -> str | None:
        """Return the signature of the tenant that is owed most; None if nobody waits."""
        ready = self._ready(now)
        return self._head(self._fair.choose(ready)).signature if ready else None

    def oldest(self, signature: str) -> float:
        """Return when the first of the heads of a signature was queued; infinity if there are none."""
        heads = (self._head(tenant) for tenant in self._lanes)
        return min((head.queued_at for head in heads if head.signature == signature), default=float("inf"))

    def take(self, signature: str, max_rows: int, now: float) -> list[Pending]:
        """Take a batch of one signature out, to each tenant its fair share.

        Args:
            signature: Of the batch.
            max_rows: Of the batch; a request that is larger by itself goes alone.
            now: Seconds.

        Returns:
            The requests; none if nobody of the signature waits.
        """
        batch: list[Pending] = []
        room = max_rows
        same = {tenant for tenant in self._lanes if self._head(tenant).signature == signature}
        turns = self._fair.begin_round(self._ready(now), among=same)
        while room > 0 and (tenant := turns.next()) is not None:
            pending = self._head(tenant)
            if batch and pending.rows > room:
                continue  # others may have smaller requests
            self.discard(pending)
            cost = 0
            if not pending.answer.done():  # else its caller was cancelled in this very turn of the loop
                cost = pending.rows
                pending.is_taken = True
                batch.append(pending)
                room -= cost
            has_more = tenant in self._lanes and self._head(tenant).signature == signature
            turns.charge(tenant, cost, has_more=has_more)
        return batch

    def _ready(self, now: float) -> dict[str, float]:
        return {tenant: max(0.0, now - self._head(tenant).queued_at) for tenant in self._lanes}

    def _head(self, tenant: str) -> Pending:
        return next(iter(self._lanes[tenant]))

    def _count(self, pending: Pending, sign: int) -> None:
        self.num_rows += sign * pending.rows
        for counter, amount in ((self._rows, pending.rows), (self._requests, 1)):
            counter[pending.signature] += sign * amount
            if not counter[pending.signature]:
                del counter[pending.signature]
