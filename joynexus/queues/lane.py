"""One tenant's part of the training queue: bounded, in order, and without duplicates. No asyncio and no clock."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from joynexus.errors import InvalidBatchError
from joynexus.specs.service import QueueSpec
from joynexus.types import NEVER_STALE, LaneItem

PutAnswer = Literal["ok", "full", "stale", "duplicate", "closed"]
"""``full``: try again later. ``stale``: of an ended workload or too old a version, make a newer one. ``duplicate``: it
is here or was acknowledged, count it as ``ok``. ``closed``: there is no such lane, or not yet for this workload."""

_REMEMBERED = 4096
"""Acknowledged items that a lane remembers one by one; older ones are known by ordinal, or forgotten."""


_SILENT_S = 5.0
"""A lane without a put for so long is waited for by nobody, until one comes."""
_NEWEST = 0.3
"""Weight of the newest pause in their moving mean."""


class PutTimes:
    """When the producers of a lane put, and so when they will."""

    def __init__(self) -> None:
        self._latest: float | None = None
        self._pause_s: float | None = None
        self._spread_s = 0.0
        self._first_until: float | None = None

    def add(self, now: float) -> None:
        """Note a put."""
        if self._latest is not None:
            pause_s = min(now - self._latest, _SILENT_S)
            if self._pause_s is None:
                self._pause_s, self._spread_s = pause_s, pause_s / 2
            else:
                self._spread_s += _NEWEST * (abs(pause_s - self._pause_s) - self._spread_s)
                self._pause_s += _NEWEST * (pause_s - self._pause_s)
        self._latest = now

    def awaited_until(self, now: float, until: float) -> float:
        """Return until when to wait for a put that is likely to come by ``until``; a time that is over if none is."""
        if self._first_until is None:
            self._first_until = max(now + _SILENT_S, until)
        if self._latest is None or self._pause_s is None:  # the first ones are on their way
            return self._first_until if self._latest is None else self._latest + _SILENT_S
        due = self._latest + self._pause_s
        return due + max(3.0 * self._spread_s, 0.1 * self._pause_s) if due <= until else now


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStats:
    """A lane at one moment; counts are since it was opened."""

    tenant: str
    signature: str
    workload: int
    waiting: int
    """Items that nobody has leased."""
    waiting_samples: int
    waiting_bytes: int
    in_flight: int
    """Items that are leased and not acknowledged."""
    oldest_wait_s: float
    """Age of the item at the head; 0 if nothing waits."""
    accepted: int
    """Puts answered ``ok``."""
    refused_full: int
    """Puts answered ``full``."""
    duplicates: int
    """Puts answered ``duplicate``."""
    dropped_stale: int
    """Puts answered ``stale``, and items dropped while they waited."""
    leased: int
    """Items handed out, each time counted."""
    returned: int
    """Items that came back from a lease."""
    acknowledged: int
    min_version: int
    next_episode: int


@dataclass(eq=False, slots=True)
class Entry:
    """An item in a lane, with what the queue knows of it."""

    item: LaneItem
    lane: "Lane"
    position: int
    """Order of arrival in its lane: where it goes back to."""
    put_at: float
    nbytes: int
    cost: int
    holder: str | None = None
    """The consumer that has leased it; None while it waits."""


class DoneItems:
    """Which items were acknowledged, in bounded memory.

    Items of a dataset come with consecutive ordinals, so the first one that is not done says it for all before.
    Trajectories come in any order, with gaps, and an episode may be tried again under another id: the newest ids.
    """

    def __init__(self, next_ordinal: int) -> None:
        self._next_ordinal = next_ordinal
        self._ordinals: set[int] = set()
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, item: LaneItem) -> bool:
        if item.policy_version == NEVER_STALE:
            return item.ordinal < self._next_ordinal or item.ordinal in self._ordinals
        return item.item_id in self._ids

    def add(self, item: LaneItem) -> None:
        """Remember an item."""
        if item.policy_version != NEVER_STALE:
            self._ids[item.item_id] = None
            if len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)
        elif item.ordinal >= self._next_ordinal:
            self._ordinals.add(item.ordinal)
            if len(self._ordinals) > _REMEMBERED:  # a gap that nobody fills, as where a lane opened past its start
                self._next_ordinal = min(self._ordinals)
            while self._next_ordinal in self._ordinals:
                self._ordinals.remove(self._next_ordinal)
                self._next_ordinal += 1


class Lane:
    """A tenant's waiting items, its leased ones, and its counts."""

    def __init__(self, tenant: str, spec: QueueSpec, *, signature: str, workload: int, next_episode: int) -> None:
        self.tenant = tenant
        self.signature = signature
        self.workload = workload
        self.next_episode = next_episode
        self.max_in_flight = spec.max_in_flight
        self.in_flight: dict[str, Entry] = {}
        self._spec = spec
        self._waiting: deque[Entry] = deque()
        self._waiting_bytes = 0
        self._waiting_samples = 0
        self._ids: set[str] = set()
        self._done = DoneItems(next_episode)
        self._min_version = 0
        self._next_position = 0
        self._last_leased_at = float("-inf")
        self._put_times = PutTimes()
        self._counts = dict.fromkeys(("accepted", "full", "duplicate", "stale", "leased", "returned", "done"), 0)

    def refusal(self, item: LaneItem) -> PutAnswer | None:
        """Say why an item can't enter, and count it; None if it can.

        Raises:
            InvalidBatchError: If the item is larger than the whole lane.
        """
        if item.workload > self.workload:
            return "closed"
        if item.workload < self.workload or item.policy_version < self._min_version:
            self._counts["stale"] += 1
            return "stale"
        if item.item_id in self._ids or item in self._done:
            self._counts["duplicate"] += 1
            return "duplicate"
        if item.nbytes > self._spec.lane_bytes:
            raise InvalidBatchError(
                f"tenant {self.tenant!r}: item {item.item_id!r} has {item.nbytes} bytes, a lane holds "
                f"{self._spec.lane_bytes}. Make smaller batches, or raise queue.lane_bytes in the service spec."
            )
        is_full = len(self._waiting) >= self._spec.lane_items
        if is_full or self._waiting_bytes + item.nbytes > self._spec.lane_bytes:
            self._counts["full"] += 1
            return "full"
        return None

    def append(self, item: LaneItem, now: float) -> Entry:
        """Put an item that was not refused at the tail."""
        entry = Entry(
            item=item, lane=self, position=self._next_position, put_at=now, nbytes=item.nbytes, cost=item.cost
        )
        self._next_position += 1
        self._ids.add(item.item_id)
        self._counts["accepted"] += 1
        self._put_times.add(now)
        self._waiting.append(entry)
        self._book(entry, +1)
        return entry

    @property
    def num_leasable(self) -> int:
        """Items that can be leased now: those that wait, up to the limit in flight."""
        return min(len(self._waiting), max(0, self.max_in_flight - len(self.in_flight)))

    def awaited_until(self, now: float, until: float) -> float:
        """Return until when to wait for the lane; ``now`` or earlier if it has something, or nothing is likely to come.

        One that has as much in flight as it may have is not waited for either: only acknowledgements help it.
        """
        return now if self._waiting else self._put_times.awaited_until(now, until)

    def leasable_samples(self, num_items: int) -> int:
        """Samples of the first ``num_items`` items that can be leased now."""
        count = min(num_items, self.num_leasable)
        if count == len(self._waiting):
            return self._waiting_samples
        return sum(entry.cost for entry in islice(self._waiting, count))

    @property
    def head_cost(self) -> int:
        """Samples of the next item."""
        return self._waiting[0].cost

    def wait_s(self, now: float) -> float:
        """Seconds since the head came, or since the lane was last served, whichever is later.

        So ageing lifts a lane that is passed over, and not every item of one whose backlog is long.
        """
        return max(0.0, now - max(self._waiting[0].put_at, self._last_leased_at)) if self._waiting else 0.0

    def lease(self, consumer: str, now: float) -> Entry:
        """Hand the head to a consumer."""
        entry = self._waiting.popleft()
        self._book(entry, -1)
        entry.holder = consumer
        self.in_flight[entry.item.item_id] = entry
        self._last_leased_at = now
        self._counts["leased"] += 1
        return entry

    def give_back(self, entries: Sequence[Entry]) -> list[Entry]:
        """Put leased items back where they came from, in order of arrival.

        Returns:
            Those that have become stale meanwhile: they are dropped.
        """
        for entry in entries:
            del self.in_flight[entry.item.item_id]
            entry.holder = None
            self._book(entry, +1)
        back = list(entries)
        last = max((each.position for each in entries), default=-1)
        while self._waiting and self._waiting[0].position < last:
            back.append(self._waiting.popleft())  # came back earlier, from another lease
        self._waiting.extendleft(sorted(back, key=lambda each: -each.position))
        self._counts["returned"] += len(entries)
        return self._drop_stale()

    def finish(self, entry: Entry) -> None:
        """Forget an item for good: its effect is durable."""
        if entry.holder is None:  # its lease ran out before the acknowledgement came
            self._waiting.remove(entry)
            self._book(entry, -1)
        else:
            del self.in_flight[entry.item.item_id]
        self._ids.remove(entry.item.item_id)
        self._done.add(entry.item)
        self._counts["done"] += 1

    def raise_min_version(self, version: int) -> list[Entry]:
        """Drop what waits and is older than ``version``, and refuse it from now on; never goes down."""
        self._min_version = max(self._min_version, version)
        return self._drop_stale()

    def start_workload(self, workload: int, next_episode: int) -> list[Entry]:
        """Go on to a new workload.

        Returns:
            The old one's items, waiting and leased: all are dropped, those that waited are counted as stale.
        """
        dropped = [*self._waiting, *self.in_flight.values()]
        self._counts["stale"] += len(self._waiting)
        self._waiting.clear()
        self.in_flight.clear()
        self._ids.clear()
        self._waiting_bytes = self._waiting_samples = 0
        self._done = DoneItems(next_episode)
        self._put_times = PutTimes()
        self.workload, self.next_episode = workload, next_episode
        return dropped

    def entries(self) -> list[Entry]:
        """All items, waiting and leased."""
        return [*self._waiting, *self.in_flight.values()]

    def stats(self, now: float) -> LaneStats:
        """Describe the lane."""
        counts = self._counts
        return LaneStats(
            tenant=self.tenant,
            signature=self.signature,
            workload=self.workload,
            waiting=len(self._waiting),
            waiting_samples=self._waiting_samples,
            waiting_bytes=self._waiting_bytes,
            in_flight=len(self.in_flight),
            oldest_wait_s=max(0.0, now - self._waiting[0].put_at) if self._waiting else 0.0,
            accepted=counts["accepted"],
            refused_full=counts["full"],
            duplicates=counts["duplicate"],
            dropped_stale=counts["stale"],
            leased=counts["leased"],
            returned=counts["returned"],
            acknowledged=counts["done"],
            min_version=self._min_version,
            next_episode=self.next_episode,
        )

    def _book(self, entry: Entry, sign: int) -> None:
        self._waiting_bytes += sign * entry.nbytes
        self._waiting_samples += sign * entry.cost

    def _drop_stale(self) -> list[Entry]:
        dropped = [entry for entry in self._waiting if entry.item.policy_version < self._min_version]
        if dropped:
            self._waiting = deque(each for each in self._waiting if each.item.policy_version >= self._min_version)
            for entry in dropped:
                self._book(entry, -1)
                self._ids.remove(entry.item.item_id)
            self._counts["stale"] += len(dropped)
        return dropped
