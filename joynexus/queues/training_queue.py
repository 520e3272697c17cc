"""Producers → trainer: lanes of the tenants, and fair, grouped, leased hand-out.

Who blocks whom:

- ``put`` blocks nobody and waits for nobody: a lane that is full answers ``full``, and the producer tries again.
- ``gather`` waits for work, and holds nothing while it waits: items leave their lanes in the same instant in which
  the lease is made and the call returns, so that a caller that is killed or cancelled swallows nothing.
- A lease belongs to a consumer. It lives while the consumer renews, gathers or acknowledges; a consumer that falls
  silent for ``lease_s``, or for which somebody calls ``release``, gives all its items back to the heads of their
  lanes, in order. An item is gone only when it is acknowledged.

All methods run on one event loop and none awaits between reading and changing the lanes, so there are no locks.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from joynexus.errors import QueueClosedError
from joynexus.queues.lane import LaneStats, PutAnswer
from joynexus.queues.leases import TICK_S, LeaseBook
from joynexus.scheduling.fairness import Priority
from joynexus.specs.service import QueueSpec
from joynexus.types import LaneItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """What one ``gather`` hands out; false if it is empty."""

    lease_id: int
    """Different for every ``gather``."""
    signature: str
    """Schema signature of all items; empty if there are none."""
    items: tuple[LaneItem, ...]
    """In the order in which they were chosen; a tenant's own are in order of arrival."""
    waited_s: float = 0.0
    """For how long something was there and further tenants were awaited."""

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(eq=False, slots=True)
class _Waiter:
    """A ``gather`` that has not returned."""

    consumer: str
    wanted: Mapping[str, int]
    is_released: bool = False
    alarm: asyncio.Future[None] | None = None
    began_at: float | None = None
    """Since when it has waited for further tenants."""

    def wake(self) -> None:
        if self.alarm is not None and not self.alarm.done():
            self.alarm.set_result(None)


class TrainingQueue:
    """The queue beside one training actor. A plain class: ``ray.remote`` is applied where it is started."""

    def __init__(self, spec: QueueSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without lanes.

        Args:
            spec: Bounds of the lanes and length of a lease.
            clock: Seconds, never going back; the event loop's own time has to run at the same rate.
        """
        self._clock = clock
        self._book = LeaseBook(spec, on_ready=self._wake)
        self._waiters: dict[_Waiter, None] = {}
        self._num_gathers = 0

    async def ping(self) -> dict[str, int]:
        """Tell that the queue lives, and how many items wait for each tenant."""
        return {tenant: lane.waiting for tenant, lane in self._book.stats(self._clock()).items()}

    async def open_lane(
        self,
        tenant: str,
        *,
        signature: str,
        workload: int,
        weight: float = 1.0,
        priority: Priority = "normal",
        next_episode: int = 0,
        max_in_flight: int = 0,
    ) -> None:
        """Open a tenant's lane, or bring an open one up to date. Repeating a call changes nothing.

        Args:
            tenant: Whose lane.
            signature: Schema signature of its policy.
            workload: Index of its workload. A newer one than the lane's drops the old one's items, waiting and
                leased; an older one is a late repetition and is ignored.
            weight: Fair share.
            priority: Class.
            next_episode: First ordinal that is still to come: of a micro-batch or of an episode. Dataset items
                below it are duplicates. To go back to an earlier one, close the lane first.
            max_in_flight: Leased items that the workload needs at once: as many as it uses between two checkpoints,
                since it acknowledges none before. Counts where it is more than the spec's own limit.
        """
        self._book.open(
            tenant,
            signature=signature,
            workload=workload,
            weight=weight,
            priority=priority,
            next_ordinal=next_episode,
            max_in_flight=max_in_flight,
        )

    async def close_lane(self, tenant: str) -> None:
        """Drop a lane with all its items, waiting and leased; unknown ones are ignored."""
        self._book.close(tenant)

    async def put(self, item: LaneItem) -> PutAnswer:
        """Offer an item; never waits. Repeating it, as after a lost answer, adds nothing.

        Args:
            item: By value. Its id must be unique over all tenants (put the tenant's name into it), because an
                acknowledgement names nothing else. Items that no policy sampled are known by their ordinal too.

        Returns:
            What became of it.

        Raises:
            InvalidBatchError: If the item is larger than a whole lane, or another tenant's item has its id.
        """
        return self._book.put(item, self._clock())

    async def take_episodes(self, tenant: str, count: int) -> int:
        """Hand out fresh episode indices: no two calls, and no two workers, get the same.

        Returns:
            The first of ``count`` consecutive indices.

        Raises:
            QueueClosedError: If the tenant has no lane.
        """
        lane = self._book.lane(tenant)
        if lane is None:
            raise QueueClosedError(f"tenant {tenant!r}: has no lane, so no episodes. Stop, or wait until it is opened.")
        first = lane.next_episode
        lane.next_episode += count
        return first

    async def gather(
        self,
        consumer: str,
        wanted: Mapping[str, int],
        *,
        max_samples: int,
        max_wait_s: float,
        timeout_s: float = 1.0,
    ) -> Lease:
        """Lease items of one schema signature, from as many tenants as are ready, each its fair share.

        The tenant that is owed most decides the signature. Then the group waits for further tenants of it, until
        it is full, no further one is likely to be ready in time (judging by when its producers put lately), or
        ``max_wait_s`` is over.

        Args:
            consumer: Who leases; see :meth:`renew`.
            wanted: Items that the consumer can take of each tenant.
            max_samples: Size of the group. An item that is larger by itself is handed out alone.
            max_wait_s: From the first ready tenant on.
            timeout_s: Until the first tenant is ready.

        Returns:
            The lease; empty if nothing came in time, or if the consumer was released meanwhile.
        """
        waiter = _Waiter(consumer=consumer, wanted={tenant: count for tenant, count in wanted.items() if count > 0})
        self._waiters[waiter] = None
        self._num_gathers += 1
        lease_id = self._num_gathers
        try:
            signature, items = await self._gather(waiter, max_samples, max_wait_s, self._clock() + timeout_s)
        finally:
            del self._waiters[waiter]
        waited_s = 0.0 if waiter.began_at is None else self._clock() - waiter.began_at
        return Lease(lease_id=lease_id, signature=signature, items=items, waited_s=waited_s)

    async def acknowledge(self, consumer: str, item_ids: Sequence[str]) -> int:
        """Forget items whose effect is durable. Repeating it, or naming unknown items, changes nothing.

        It holds even where the lease has run out and the item waits again, or somebody else has leased it: what
        is durable must not be learnt from twice.

        Returns:
            How many were still known.
        """
        self._book.renew(consumer, self._clock())
        return self._book.acknowledge(item_ids)

    async def renew(self, consumer: str) -> None:
        """Prolong all leases of a consumer to ``lease_s`` from now."""
        self._book.renew(consumer, self._clock())

    async def release(self, consumer: str) -> int:
        """Take everything back from a consumer that has died or starts anew; its blocked gathers return empty.

        Returns:
            How many items went back to the heads of their lanes, those that are stale by now not subtracted.
        """
        for waiter in self._waiters:
            if waiter.consumer == consumer:
                waiter.is_released = True
                waiter.wake()
        return self._book.take_back(consumer)

    async def set_min_version(self, tenant: str, version: int) -> int:
        """Drop a tenant's waiting items that an older version sampled, and answer ``stale`` to them from now on.

        Returns:
            How many were dropped. What is leased stays leased: its consumer decides.
        """
        return self._book.raise_min_version(tenant, version)

    async def stats(self) -> dict[str, LaneStats]:
        """Describe every lane, by tenant."""
        self._book.expire(self._clock())
        return self._book.stats(self._clock())

    async def _gather(
        self, waiter: _Waiter, max_samples: int, max_wait_s: float, deadline: float
    ) -> tuple[str, tuple[LaneItem, ...]]:
        self._book.expire(self._clock())
        while not waiter.is_released:
            signature = self._book.next_signature(waiter.wanted, self._clock())
            if signature is None:
                if not await self._sleep(waiter, deadline):
                    break
                continue
            waiter.began_at = self._clock()
            until = waiter.began_at + max_wait_s
            while not waiter.is_released:
                now = self._clock()
                later = self._book.wait_until(waiter.wanted, signature, max_samples, now=now, until=until)
                if later - now <= TICK_S:
                    break
                await self._sleep(waiter, later)
            if waiter.is_released:
                break
            # From here to the return of `gather` nothing awaits: a lease is made only if it is also returned.
            items = self._book.lease(
                waiter.consumer, waiter.wanted, signature=signature, max_samples=max_samples, now=self._clock()
            )
            if items:
                return signature, items
        return "", ()

    async def _sleep(self, waiter: _Waiter, until: float) -> bool:
        """Wait until something may have changed for a waiter; False if it was released or the time is over."""
        delay = min(until, self._book.next_expiry()) - self._clock()
        if delay > TICK_S:
            loop = asyncio.get_running_loop()
            waiter.alarm = loop.create_future()
            timer = loop.call_later(delay, waiter.wake)
            try:
                await waiter.alarm
            finally:
                timer.cancel()
                waiter.alarm = None
        self._book.expire(self._clock())
        return not waiter.is_released and until - self._clock() > TICK_S

    def _wake(self, tenant: str) -> None:
        for waiter in self._waiters:
            if tenant in waiter.wanted:
                waiter.wake()
