"""In whatever order it is called, the training queue loses no item, hands none out twice, and keeps its bounds."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.queues.training_queue import TrainingQueue
from joynexus.specs.service import QueueSpec
from joynexus.types import LaneItem

TENANTS = {"a": "x", "b": "x", "c": "y"}
SPEC = QueueSpec(lane_items=4, lane_bytes=100, max_in_flight=5, lease_s=10.0, ageing_s=3.0)
tenants = st.sampled_from(sorted(TENANTS))
consumers = st.sampled_from(["one", "two"])
numbers = st.integers(0, 5)

operations = st.one_of(
    st.tuples(st.just("put"), tenants, st.integers(1, 9), st.sampled_from([None, 0, 1, 2, 3])),
    st.tuples(st.just("put"), tenants, st.integers(1, 9), st.none()),
    st.tuples(st.just("put_again"), tenants, numbers),
    st.tuples(st.just("gather"), consumers, st.dictionaries(tenants, numbers), st.integers(1, 20)),
    st.tuples(st.just("gather"), consumers, st.just(dict.fromkeys(TENANTS, 9)), st.integers(1, 20)),
    st.tuples(st.just("gather"), consumers, st.just({"a": 1, "b": 1}), st.just(20)),
    st.tuples(st.just("acknowledge"), consumers, tenants, numbers),
    st.tuples(st.just("release"), consumers),
    st.tuples(st.just("renew"), consumers),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 4.0, 11.0])),
    st.tuples(st.just("set_min_version"), tenants, st.integers(0, 4)),
    st.tuples(st.just("next_workload"), tenants),
)


@dataclass
class Model:
    """What a queue without any cleverness would know."""

    waiting: dict[str, list[LaneItem]] = field(default_factory=lambda: defaultdict(list))
    leased: dict[str, dict[str, LaneItem]] = field(default_factory=lambda: defaultdict(dict))
    deadline: dict[str, float] = field(default_factory=dict)
    finished: dict[str, list[LaneItem]] = field(default_factory=lambda: defaultdict(list))
    workload: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    min_version: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    made: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def all_of(self, tenant: str) -> list[LaneItem]:
        held = [item for items in self.leased.values() for item in items.values() if item.tenant == tenant]
        return [*self.waiting[tenant], *held]

    def take_back(self, consumer: str) -> None:
        for item in self.leased.pop(consumer, {}).values():
            if item.policy_version >= self.min_version[item.tenant]:
                self.waiting[item.tenant].append(item)
        for items in self.waiting.values():
            items.sort(key=lambda item: item.ordinal)

    def expire(self, now: float) -> None:
        for consumer in [name for name, deadline in self.deadline.items() if deadline <= now + 1e-6]:
            del self.deadline[consumer]
            self.take_back(consumer)

    def expected_answer(self, item: LaneItem) -> str:
        tenant = item.tenant
        if item.workload < self.workload[tenant] or item.policy_version < self.min_version[tenant]:
            return "stale"
        if any(each.item_id == item.item_id for each in [*self.all_of(tenant), *self.finished[tenant]]):
            return "duplicate"
        waiting = self.waiting[tenant]
        is_full = len(waiting) >= SPEC.lane_items
        return "full" if is_full or sum(each.nbytes for each in [*waiting, item]) > SPEC.lane_bytes else "ok"


class Run:
    """Does every operation on the queue and on the model, and compares."""

    def __init__(self, loop, make_item) -> None:
        self.loop, self.make_item = loop, make_item
        self.queue = TrainingQueue(SPEC, clock=loop.time)
        self.model = Model()

    async def open(self) -> None:
        for tenant, signature in TENANTS.items():
            await self.queue.open_lane(
                tenant, signature=signature, workload=self.model.workload[tenant], weight=1.0 + (tenant == "a")
            )

    async def put(self, tenant: str, rows: int, version: int | None) -> None:
        model = self.model
        item = self.make_item(tenant, model.made[tenant], rows=rows, version=version, workload=model.workload[tenant])
        model.made[tenant] += 1
        await self._put(item)

    async def put_again(self, tenant: str, number: int) -> None:
        known = [*self.model.all_of(tenant), *self.model.finished[tenant]]
        if known:
            await self._put(known[number % len(known)])

    async def _put(self, item: LaneItem) -> None:
        expected = self.model.expected_answer(item)
        assert await self.queue.put(item) == expected
        if expected == "ok":
            self.model.waiting[item.tenant].append(item)

    async def gather(self, consumer: str, wanted: dict[str, int], max_samples: int) -> None:
        model = self.model
        model.expire(self.loop.time())
        ready = {
            tenant
            for tenant, count in wanted.items()
            if count and model.waiting[tenant] and self.in_flight(tenant) < SPEC.max_in_flight
        }
        before = {tenant: self.in_flight(tenant) for tenant in TENANTS}
        lease = await self.queue.gather(consumer, wanted, max_samples=max_samples, max_wait_s=0.0, timeout_s=0.0)
        assert bool(lease) == bool(ready)
        assert {TENANTS[item.tenant] for item in lease.items} <= {lease.signature}
        assert len(lease.items) == 1 or sum(item.cost for item in lease.items) <= max_samples
        for tenant in TENANTS:
            got = [item for item in lease.items if item.tenant == tenant]
            assert len(got) <= wanted.get(tenant, 0)
            assert before[tenant] + len(got) <= max(SPEC.max_in_flight, before[tenant])
            heads, model.waiting[tenant] = model.waiting[tenant][: len(got)], model.waiting[tenant][len(got) :]
            assert got == heads  # in order, and nothing that did not wait
            model.leased[consumer].update((item.item_id, item) for item in got)
        if lease:
            model.deadline[consumer] = self.loop.time() + SPEC.lease_s

    def in_flight(self, tenant: str) -> int:
        return len(self.model.all_of(tenant)) - len(self.model.waiting[tenant])

    async def acknowledge(self, consumer: str, tenant: str, number: int) -> None:
        """Of any item that is known, whoever holds it: late acknowledgements hold too."""
        model = self.model
        known = model.all_of(tenant)
        if consumer in model.deadline:
            model.deadline[consumer] = self.loop.time() + SPEC.lease_s
        if not known:
            assert await self.queue.acknowledge(consumer, [f"{tenant}/none"]) == 0
            return
        item = known[number % len(known)]
        assert await self.queue.acknowledge(consumer, [item.item_id, item.item_id]) == 1
        for items in model.leased.values():
            items.pop(item.item_id, None)
        model.waiting[tenant] = [each for each in model.waiting[tenant] if each is not item]
        model.finished[tenant].append(item)

    async def release(self, consumer: str) -> None:
        held = len(self.model.leased[consumer])
        assert await self.queue.release(consumer) == held
        self.model.deadline.pop(consumer, None)
        self.model.take_back(consumer)

    async def renew(self, consumer: str) -> None:
        await self.queue.renew(consumer)
        if consumer in self.model.deadline:
            self.model.deadline[consumer] = self.loop.time() + SPEC.lease_s

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def set_min_version(self, tenant: str, version: int) -> None:
        model = self.model
        model.min_version[tenant] = max(model.min_version[tenant], version)
        kept = [item for item in model.waiting[tenant] if item.policy_version >= model.min_version[tenant]]
        assert await self.queue.set_min_version(tenant, version) == len(model.waiting[tenant]) - len(kept)
        model.waiting[tenant] = kept

    async def next_workload(self, tenant: str) -> None:
        model = self.model
        model.workload[tenant] += 1
        model.made[tenant] = 0
        for items in model.leased.values():
            for item_id in [each.item_id for each in items.values() if each.tenant == tenant]:
                del items[item_id]
        model.waiting[tenant] = []
        model.finished[tenant] = []
        await self.open()

    async def check(self) -> None:
        self.model.expire(self.loop.time())
        for tenant, stats in (await self.queue.stats()).items():
            waiting = self.model.waiting[tenant]
            assert stats.waiting == len(waiting)
            assert stats.waiting_samples == sum(item.cost for item in waiting)
            assert stats.waiting_bytes == sum(item.nbytes for item in waiting)
            assert stats.in_flight == self.in_flight(tenant)

    async def drain(self) -> None:
        """In the end every item that was accepted and not finished comes out, each once."""
        for consumer in ("one", "two"):
            await self.release(consumer)
        expected = {tenant: list(items) for tenant, items in self.model.waiting.items() if items}
        got: dict[str, list[LaneItem]] = defaultdict(list)
        everything = dict.fromkeys(TENANTS, 99)
        while lease := await self.queue.gather("end", everything, max_samples=20, max_wait_s=0.0, timeout_s=0.0):
            for item in lease.items:
                got[item.tenant].append(item)
            await self.queue.acknowledge("end", [item.item_id for item in lease.items])
        assert dict(got) == expected


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(operations, min_size=10, max_size=40))
def test_no_item_is_lost_or_handed_out_twice(make_loop, make_item, steps):
    loop = make_loop()
    run = Run(loop, make_item)

    async def main():
        await run.open()
        for tenant in "aaaabbcc":
            await run.put(tenant, 1, None)
        for name, *arguments in steps:
            await getattr(run, name)(*arguments)
            await run.check()
        await run.drain()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
