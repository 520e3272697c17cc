"""A trainer on a virtual device: the loops of the TrainingActor around the product's queue and fair shares."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulation.costs import DeviceCosts
from benchmarks.simulation.device import Gpu
from benchmarks.simulation.learners import MAX_STALENESS, Call, Learner
from benchmarks.simulation.settings import Ledger, Settings, Spent
from benchmarks.simulation.store import VirtualStore
from benchmarks.simulation.workload import Tenant
from joynexus.queues.training_queue import TrainingQueue
from joynexus.scheduling.cost import Measured
from joynexus.scheduling.grouping import GroupChooser, Head
from joynexus.types import LaneItem

CONSUMER = "trainer"
FIRST_ITEM_S = 0.1
"""How long one gather waits for a first item; the TrainingActor's number."""


class Gate:
    """Counts a tenant's items that wait in its lane, and lets its producer wait for room."""

    def __init__(self) -> None:
        self._waiting = 0
        self._below = asyncio.Event()

    def put(self) -> None:
        """Count an item in."""
        self._waiting += 1

    def taken(self, count: int) -> None:
        """Count items out."""
        self._waiting -= count
        self._below.set()

    async def until_below(self, limit: int) -> None:
        """Wait until fewer than ``limit`` items wait."""
        while self._waiting >= limit:
            self._below.clear()
            await self._below.wait()


@dataclass(eq=False, slots=True)
class _Slot:
    tenant: Tenant
    learner: Learner
    gate: Gate
    finished: asyncio.Event


class VirtualTrainer:
    """One backbone's trainer. The next group is gathered while this one computes."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, gpu: Gpu, costs: DeviceCosts, settings: Settings, ledger: Ledger
    ) -> None:
        self._loop, self._gpu, self._costs, self._ledger = loop, gpu, costs, ledger
        self._spec = settings.training
        self._store = VirtualStore(settings.store_bytes, costs.row_bytes)
        self._spent = Spent()
        self._chooser = GroupChooser(
            max_rows=self._spec.max_group_samples,
            max_wait_s=self._spec.max_wait_ms / 1000,
            spent=self._spent.of,
        )
        self._slots: dict[str, _Slot] = {}
        self._inbox: deque[tuple[LaneItem, ...]] = deque()
        self._inboxed: Counter[str] = Counter()
        self._wanted: dict[str, int] = {}
        self._work, self._hungry = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.queue = TrainingQueue(settings.queue, clock=loop.time)
        self.served: Counter[str] = Counter()
        """Rows trained, by tenant."""
        self.on_group: Callable[[], None] = lambda: None
        """Called after every group."""

    def start(self) -> None:
        """Begin both loops."""
        self._tasks = [self._loop.create_task(self._feed()), self._loop.create_task(self._compute())]

    def stop(self) -> None:
        """End both loops."""
        for task in self._tasks:
            task.cancel()

    async def open(self, tenant: Tenant, learner: Learner) -> tuple[Gate, asyncio.Event]:
        """Give a tenant a slot and a lane; returns its gate, and what is set when its learner has finished."""
        slot = _Slot(tenant, learner, Gate(), asyncio.Event())
        self._slots[tenant.name] = slot
        self._chooser.add(tenant.name, signature=tenant.signature, weight=tenant.weight)
        await self.queue.open_lane(tenant.name, signature=tenant.signature, workload=0, weight=tenant.weight)
        self._work.set()
        return slot.gate, slot.finished

    async def close(self, tenant: str) -> None:
        """Free a tenant's slot and lane."""
        del self._slots[tenant]
        self._chooser.remove(tenant)
        await self.queue.close_lane(tenant)

    async def _feed(self) -> None:
        while True:
            wanted = {tenant: room - self._inboxed[tenant] for tenant, room in self._wanted.items()}
            wanted = {tenant: room for tenant, room in wanted.items() if room > 0}
            if not wanted:
                self._hungry.clear()
                await self._hungry.wait()
                continue
            lease = await self.queue.gather(
                CONSUMER,
                wanted,
                max_samples=self._spec.max_group_samples,
                max_wait_s=self._spec.max_wait_ms / 1000,
                timeout_s=FIRST_ITEM_S,
            )
            if lease.items:
                self._inboxed.update(item.tenant for item in lease.items)
                self._inbox.append(lease.items)
                self._work.set()

    async def _compute(self) -> None:
        while True:
            self._take_in()
            choice = self._chooser.choose(self._heads(), self._loop.time(), may_wait=True)
            self._look()
            if choice.tenants:
                heads = [self._slots[name].learner.head() for name in choice.tenants]
                await self._run([head for head in heads if head is not None])
                self.on_group()
            elif not self._inbox:
                await self._sleep(choice.hold_until)

    def _take_in(self) -> None:
        while self._inbox:
            items = self._inbox.popleft()
            self._inboxed.subtract(item.tenant for item in items)
            for item in items:
                slot = self._slots.get(item.tenant)
                if slot is not None:
                    slot.gate.taken(1)
                    slot.learner.offer(item, self._loop.time())

    def _look(self) -> None:
        """Note what the learners can take."""
        self._wanted = {name: room for name, slot in self._slots.items() if (room := slot.learner.room()) > 0}
        if self._wanted:
            self._hungry.set()

    def _heads(self) -> dict[str, Head]:
        """Return the next call of every tenant that has one."""
        heads: dict[str, Head] = {}
        for name, slot in self._slots.items():
            call = slot.learner.head()
            if call is not None:
                heads[name] = Head(rows=call.rows, since=call.ready_at, has_features=call.is_carried)
        return heads

    async def _sleep(self, until: float | None) -> None:
        """Wait for items or for a time."""
        self._work.clear()
        timer = None if until is None else self._loop.call_at(until, self._work.set)
        await self._work.wait()
        if timer is not None:
            timer.cancel()

    async def _run(self, calls: Sequence[Call]) -> None:
        """One group step: a backbone pass over what the store lacks, then each tenant's part, the cheapest first."""
        ledger, now = self._ledger, self._loop.time()
        ledger.groups += 1
        ledger.group_tenants += len(calls)
        ledger.group_waits_s += [now - call.ready_at for call in calls]
        await self._gpu.run(self._encode(calls))
        for call in sorted(calls, key=lambda each: each.rows):
            part_s = self._costs.train_s(call.rows)
            await self._gpu.run(part_s)
            ledger.charge(call.tenant, "head", part_s - self._costs.optimizer_s)
            ledger.charge(call.tenant, "optimizer", self._costs.optimizer_s)
            self._spent.add(call.tenant, Measured(rows=call.rows, head_s=part_s))
            await self._answer(call)
        for call in calls:
            self._chooser.finished(call.tenant, self._loop.time())

    def _encode(self, calls: Sequence[Call]) -> float:
        """Find or encode every call's rows; returns the seconds of both."""
        missing = {call.tenant: self._look_up(call) for call in calls}
        encoded = sum(missing.values())
        seconds = self._costs.encode_s(encoded)
        copies = 0.0
        for call in calls:
            found = call.rows - missing[call.tenant]
            copy_s = found * (self._costs.carry_row_s if call.is_carried else self._costs.lookup_row_s)
            copies += copy_s
            self._ledger.charge(call.tenant, "copy", copy_s)
            prefix_s = seconds * missing[call.tenant] / max(encoded, 1)
            self._ledger.charge(call.tenant, "prefix", prefix_s)
            self._spent.add(call.tenant, Measured(encoded=missing[call.tenant], prefix_s=prefix_s, head_s=copy_s))
            self._ledger.carried += found if call.is_carried else 0
            self._ledger.reused += 0 if call.is_carried else found
        self._ledger.encoded += encoded
        return seconds + copies

    def _look_up(self, call: Call) -> int:
        """Rows of a call that have to be encoded; they are kept from now on, also for the calls beside it."""
        missing = 0
        for key, rows in () if call.is_carried else call.blocks:
            missing += 0 if self._store.find(key) else rows
            self._store.keep(key)
        return missing

    async def _answer(self, call: Call) -> None:
        slot = self._slots.get(call.tenant)
        if slot is None:
            return
        version = slot.learner.version
        used = slot.learner.on_result(self._loop.time())
        self.served[call.tenant] += call.rows
        self._ledger.trained_rows += call.rows
        if used:
            await self.queue.acknowledge(CONSUMER, used)
        if slot.learner.version > version:
            slot.gate.taken(await self.queue.set_min_version(call.tenant, slot.learner.version - MAX_STALENESS))
        if slot.learner.is_finished:
            slot.finished.set()
