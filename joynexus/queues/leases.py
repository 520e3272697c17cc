"""Which item is where: waiting in its lane, or leased by a consumer. Pure: no asyncio, and time is an argument."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from joynexus.errors import InvalidBatchError
from joynexus.queues.lane import Entry, Lane, LaneStats, PutAnswer
from joynexus.scheduling.fairness import FairShare, Priority
from joynexus.specs.service import QueueSpec
from joynexus.types import LaneItem

TICK_S = 1e-6
"""Deadlines this close count as passed: a timer may fire early by the resolution of its clock."""


@dataclass(slots=True)
class _Holding:
    """What a consumer has leased."""

    deadline: float
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])


class LeaseBook:
    """All lanes of one training queue, and who holds what of them."""

    def __init__(self, spec: QueueSpec, *, on_ready: Callable[[str], None]) -> None:
        """Start without lanes.

        Args:
            spec: Bounds of the lanes and length of a lease.
            on_ready: Called with a tenant whose lane has something to lease that it may not have had before.
        """
        self._spec = spec
        self._on_ready = on_ready
        self._fair = FairShare(spec.ageing_s)
        self._lanes: dict[str, Lane] = {}
        self._entries: dict[str, Entry] = {}
        self._holdings: dict[str, _Holding] = {}

    def open(
        self,
        tenant: str,
        *,
        signature: str,
        workload: int,
        weight: float,
        priority: Priority,
        next_ordinal: int,
        max_in_flight: int = 0,
    ) -> None:
        """Open a lane, or bring an open one up to date; see :meth:`TrainingQueue.open_lane`."""
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = Lane(tenant, self._spec, signature=signature, workload=workload, next_episode=next_ordinal)
            self._lanes[tenant] = lane
        elif workload < lane.workload:
            return
        elif workload > lane.workload:
            self._forget(lane.start_workload(workload, next_ordinal))
        lane.next_episode = max(lane.next_episode, next_ordinal)
        lane.signature = signature
        lane.max_in_flight = max(self._spec.max_in_flight, max_in_flight)
        self._fair.add(tenant, weight, priority)

    def close(self, tenant: str) -> None:
        """Drop a lane with all its items, waiting and leased; unknown ones are ignored."""
        lane = self._lanes.pop(tenant, None)
        self._fair.remove(tenant)
        if lane is not None:
            self._forget(lane.entries())

    def lane(self, tenant: str) -> Lane | None:
        """Return a tenant's lane."""
        return self._lanes.get(tenant)

    def put(self, item: LaneItem, now: float) -> PutAnswer:
        """Take an item into its lane, or say why not; see :meth:`TrainingQueue.put`."""
        lane = self._lanes.get(item.tenant)
        if lane is None:
            return "closed"
        known = self._entries.get(item.item_id)
        if known is not None and known.lane is not lane:
            raise InvalidBatchError(
                f"tenant {item.tenant!r}: item id {item.item_id!r} is in use in another lane. Put the tenant's name in."
            )
        refusal = lane.refusal(item)
        if refusal is not None:
            return refusal
        self._entries[item.item_id] = lane.append(item, now)
        self._tell(lane)
        return "ok"

    def next_signature(self, wanted: Mapping[str, int], now: float) -> str | None:
        """Return the signature of the tenant that is owed most; None if none of the wanted is ready."""
        ready = self._ready(wanted, now)
        return self._lanes[self._fair.choose(ready)].signature if ready else None

    def wait_until(
        self, wanted: Mapping[str, int], signature: str, max_samples: int, *, now: float, until: float
    ) -> float:
        """Return until when a group of one signature waits for further tenants, at most ``until``.

        Returns:
            ``now`` or earlier if it is full, or if nobody else is likely to be ready in time.
        """
        lanes = [lane for tenant in wanted if (lane := self._lanes.get(tenant)) and lane.signature == signature]
        latest = max((lane.awaited_until(now, until) for lane in lanes), default=now)
        if latest <= now or sum(lane.leasable_samples(wanted[lane.tenant]) for lane in lanes) >= max_samples:
            return now
        return min(latest, until)

    def lease(
        self, consumer: str, wanted: Mapping[str, int], *, signature: str, max_samples: int, now: float
    ) -> tuple[LaneItem, ...]:
        """Hand out a group of one signature, to each ready tenant its fair share, in samples.

        What is scarce here is the way to the trainer, and a sample takes the same of it whosever it is. The seconds
        that it costs there are shared out there (:mod:`joynexus.scheduling.grouping`): a tenant that has had its part
        does not ask for more.

        Args:
            consumer: Who leases.
            wanted: Items to take of each tenant at most.
            signature: Of the group.
            max_samples: Size of the group; an item that is larger by itself is handed out alone.
            now: Seconds.

        Returns:
            The items; none if no wanted tenant of the signature is ready.
        """
        ready = self._ready(wanted, now)
        room = {tenant: wanted[tenant] for tenant in ready if self._lanes[tenant].signature == signature}
        picked: list[Entry] = []
        samples = 0
        turns = self._fair.begin_round(ready, among=room)
        while samples < max_samples and (tenant := turns.next()) is not None:
            lane = self._lanes[tenant]
            if picked and samples + lane.head_cost > max_samples:
                continue  # others may have smaller items
            entry = lane.lease(consumer, now)
            picked.append(entry)
            samples += entry.cost
            room[tenant] -= 1
            turns.charge(tenant, entry.cost, has_more=room[tenant] > 0 and lane.num_leasable > 0)
        if picked:
            holding = self._holdings.setdefault(consumer, _Holding(deadline=now))
            holding.entries.update((entry.item.item_id, entry) for entry in picked)
            self.renew(consumer, now)
        return tuple(entry.item for entry in picked)

    def acknowledge(self, item_ids: Sequence[str]) -> int:
        """Forget items for good, wherever they are; returns how many were known."""
        finished = 0
        for item_id in item_ids:
            entry = self._entries.pop(item_id, None)
            if entry is None:
                continue
            if entry.holder is not None:
                del self._holdings[entry.holder].entries[item_id]
            entry.lane.finish(entry)
            finished += 1
            self._tell(entry.lane)
        return finished

    def raise_min_version(self, tenant: str, version: int) -> int:
        """Drop what waits and is older; returns how many items that were."""
        lane = self._lanes.get(tenant)
        dropped = [] if lane is None else lane.raise_min_version(version)
        self._forget(dropped)
        return len(dropped)

    def renew(self, consumer: str, now: float) -> None:
        """Prolong what a consumer holds; nothing if it holds nothing."""
        holding = self._holdings.get(consumer)
        if holding is not None:
            holding.deadline = now + self._spec.lease_s

    def take_back(self, consumer: str) -> int:
        """Return all that a consumer holds to the heads of the lanes; returns how many items that were."""
        holding = self._holdings.pop(consumer, None)
        if holding is None:
            return 0
        by_lane: defaultdict[Lane, list[Entry]] = defaultdict(list)
        for entry in holding.entries.values():
            by_lane[entry.lane].append(entry)
        for lane, entries in by_lane.items():
            self._forget(lane.give_back(entries))
            self._tell(lane)
        return len(holding.entries)

    def expire(self, now: float) -> None:
        """Take back what is held past its deadline."""
        for consumer in [name for name, each in self._holdings.items() if each.deadline - now <= TICK_S]:
            self.take_back(consumer)

    def next_expiry(self) -> float:
        """Return when the next lease runs out; infinity if nothing is leased."""
        return min((each.deadline for each in self._holdings.values() if each.entries), default=float("inf"))

    def stats(self, now: float) -> dict[str, LaneStats]:
        """Describe every lane, by tenant."""
        return {tenant: lane.stats(now) for tenant, lane in self._lanes.items()}

    def _ready(self, wanted: Mapping[str, int], now: float) -> dict[str, float]:
        """Seconds that each wanted tenant with something to lease has waited."""
        lanes = [lane for tenant in wanted if (lane := self._lanes.get(tenant)) and lane.num_leasable]
        return {lane.tenant: lane.wait_s(now) for lane in lanes}

    def _tell(self, lane: Lane) -> None:
        if lane.num_leasable:
            self._on_ready(lane.tenant)

    def _forget(self, entries: Sequence[Entry]) -> None:
        """Strike dropped items from the index and from whoever holds them."""
        for entry in entries:
            self._entries.pop(entry.item.item_id, None)
            if entry.holder is not None:
                self._holdings[entry.holder].entries.pop(entry.item.item_id, None)
