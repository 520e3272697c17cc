"""Requests that wait for a forward: by tenant, in order, bounded, and gone at once when their callers give up."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass

from joynexus.errors import BackPressureError, InvalidBatchError
from joynexus.scheduling.cost import CostModel, Measured, Settlement
from joynexus.scheduling.fairness import FairShare, Priority
from joynexus.types import ActionChunk, PredictRequest


@dataclass(eq=False, slots=True)
class Pending:
    """A request, and the caller who waits for it."""

    request: PredictRequest
    tenant: str
    """Whose it is."""
    signature: str
    rows: int
    queued_at: float
    answer: asyncio.Future[ActionChunk]
    is_taken: bool = False
    """Whether it was given to the engine."""


@dataclass(frozen=True, slots=True)
class Surplus:
    """How far tenants with many requests may lengthen a batch that others are in, or wait behind."""

    quota: int
    """Who has more rows than this is one of them."""
    max_rows: int
    """Rows of a batch up to which theirs may join."""


class WaitingRoom:
    """Who waits, and whose turn it is. Pure but for the futures that it carries; time is an argument."""

    def __init__(self, max_rows: int, spent: Callable[[str], Measured] | None = None) -> None:
        """Start empty.

        Args:
            max_rows: Rows that wait at most; those of one tenant at most half of it, so that no flood keeps the
                others out.
            spent: What the engine has measured of a tenant so far: shares are of seconds then, else of rows.
        """
        self._max_rows = max_rows
        self._fair = FairShare()
        self._costs = CostModel()
        self._settlement = None if spent is None else Settlement(self._fair, self._costs, spent)
        # Ordered dicts: a request that is cancelled leaves from the middle at once, and the head is found at once.
        self._lanes: dict[str, OrderedDict[Pending, None]] = {}
        self._rows: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._held: dict[str, int] = {}
        """Rows by tenant."""
        self._served_at: dict[str, float] = {}
        self.num_rows = 0
        self.num_requests = 0

    def __iter__(self) -> Iterator[Pending]:
        return (pending for lane in self._lanes.values() for pending in lane)

    def __len__(self) -> int:
        return self.num_requests

    def set_share(self, tenant: str, weight: float, priority: Priority) -> None:
        """Give a tenant a weight and a class."""
        self._fair.add(tenant, weight, priority)
        self._costs.add(tenant)

    def forget(self, tenant: str) -> list[Pending]:
        """Drop a tenant's share, and return its requests, which are dropped too."""
        left = list(self._lanes.get(tenant, ()))
        for pending in left:
            self.discard(pending)
        self._fair.remove(tenant)
        self._costs.remove(tenant)
        self._served_at.pop(tenant, None)
        if self._settlement is not None:
            self._settlement.forget(tenant)
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
        held = self._held.get(pending.tenant)
        if held and held + pending.rows > self._max_rows // 2:
            raise BackPressureError(
                f"tenant {pending.tenant!r}: {held} rows of it wait at this replica, {self._max_rows // 2} at most, so "
                "that others have room too. Await some of them, then try again."
            )
        if pending.tenant not in self._fair:
            self.set_share(pending.tenant, 1.0, "normal")
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

    @property
    def rows_by_tenant(self) -> Mapping[str, int]:
        """Rows of each tenant that waits."""
        return self._held

    def rows_of(self, signature: str) -> int:
        """Rows of a signature that wait."""
        return self._rows.get(signature, 0)

    def requests_of(self, signature: str) -> int:
        """Requests of a signature that wait."""
        return self._requests.get(signature, 0)

    def next_signature(self, now: float) -> str | None:
        """Return the signature of the tenant that is owed most; None if nobody waits."""
        if len(self._rows) == 1:
            return next(iter(self._rows))
        ready = self._ready(now)
        return self._head(self._fair.choose(ready)).signature if ready else None

    def oldest(self, signature: str) -> float:
        """Return when the first of the heads of a signature was queued; infinity if there are none."""
        heads = (self._head(tenant) for tenant in self._lanes)
        return min((head.queued_at for head in heads if head.signature == signature), default=float("inf"))

    def owed_more(self, now: float, served: Collection[str]) -> list[str]:
        """Return who waits and is owed more than each tenant that is being served, who is owed most first."""
        return self._fair.before(served, self._ready(now))

    def signature_of(self, tenant: str) -> str:
        """Return the signature of the request that is next of a tenant that waits."""
        return self._head(tenant).signature

    def take(
        self,
        signature: str,
        max_rows: int,
        now: float,
        *,
        surplus: Surplus | None = None,
        among: Container[str] | None = None,
        served: Container[str] = (),
        joins: bool = False,
    ) -> list[Pending]:
        """Take a batch of one signature out, to each tenant its fair share.

        Args:
            signature: Of the batch.
            max_rows: Of the batch; a request that is larger by itself goes alone.
            now: Seconds.
            surplus: Bound of what a tenant gets beyond what the others use; None sets none.
            among: Whose requests may be taken; None takes anybody's.
            served: Tenants of the batch that runs.
            joins: Whether the batch has begun, so that a larger request has to wait.

        Returns:
            The requests; none if nobody of the signature waits.
        """
        batch: list[Pending] = []
        num_rows = 0
        lanes = self._lanes
        heads = {tenant: next(iter(lane)) for tenant, lane in lanes.items()}
        same = {
            tenant
            for tenant, head in heads.items()
            if head.signature == signature and (among is None or tenant in among)
        }
        ready = self._ready(now)
        rates = self._rates(same)
        charged: dict[str, float] = {}
        floods = set[str]() if surplus is None else {each for each in same if self._held[each] > surplus.quota}
        flood_rows = max_rows if surplus is None else surplus.max_rows
        turns = self._fair.begin_round(ready, same, served)
        while num_rows < max_rows and (tenant := turns.next()) is not None:
            pending = next(iter(lanes[tenant]))
            total = num_rows + pending.rows
            if (batch or joins) and (total > max_rows or (tenant in floods and total > flood_rows)):
                continue  # others may have smaller requests, or fewer
            self.discard(pending)
            cost = 0.0
            if not pending.answer.done():  # else its caller was cancelled in this very turn of the loop
                cost = pending.rows * rates[tenant]
                pending.is_taken = True
                batch.append(pending)
                num_rows = total
                charged[tenant] = charged.get(tenant, 0.0) + cost
                self._served_at[tenant] = now
            has_more = tenant in lanes and next(iter(lanes[tenant])).signature == signature
            turns.charge(tenant, cost, has_more=has_more)
        if self._settlement is not None:
            for tenant, cost in charged.items():
                self._settlement.charged(tenant, cost)
        return batch

    def settle(self, tenants: Container[str] | None = None) -> None:
        """Correct what some tenants were charged, or all, once their batches have run."""
        if self._settlement is not None:
            self._settlement.settle(tenants)

    def _rates(self, tenants: Collection[str]) -> dict[str, float]:
        """Cost of a row of each tenant."""
        if self._settlement is None:
            return dict.fromkeys(tenants, 1.0)
        return {tenant: self._costs.estimate(tenant, 1) for tenant in tenants}

    def _ready(self, now: float) -> dict[str, float]:
        """Seconds since each one's head came or it was last served: who is served all the time does not grow old."""
        return {
            tenant: max(0.0, now - max(self._head(tenant).queued_at, self._served_at.get(tenant, 0.0)))
            for tenant in self._lanes
        }

    def _head(self, tenant: str) -> Pending:
        return next(iter(self._lanes[tenant]))

    def _count(self, pending: Pending, sign: int) -> None:
        tenant, signature, rows = pending.tenant, pending.signature, sign * pending.rows
        self.num_rows += rows
        self.num_requests += sign
        _add(self._rows, signature, rows)
        _add(self._requests, signature, sign)
        _add(self._held, tenant, rows)


def _add(counts: dict[str, int], key: str, amount: int) -> None:
    count = counts.get(key, 0) + amount
    if count:
        counts[key] = count
    else:
        del counts[key]
