"""The batcher's bounds on a virtual clock: an engine that takes as long as its cost model says, callers as robots."""

import asyncio
import random
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import pytest

from joynexus.queues.inference_queue import GroupBatcher
from joynexus.queues.running_batch import RunningBatch
from joynexus.queues.training_queue import TrainingQueue
from joynexus.scheduling.cost import Measured
from joynexus.specs.service import InferenceSpec, QueueSpec
from joynexus.types import ActionChunk, PredictRequest

HEAD_S = 0.0002
"""Of a row, unless a tenant's module is dearer."""
PAUSES = 12
"""Parts of a forward, between which it may be interrupted."""


@dataclass
class Engine(Executor):
    """Takes ``fixed_s + row_s * rows`` for the backbone and each tenant's own seconds for its module.

    At its pauses it runs what is urgent, as the real engine does.
    """

    loop: asyncio.AbstractEventLoop
    fixed_s: float = 0.010
    row_s: float = 0.0005
    dear: dict[str, float] = field(default_factory=dict)
    """Seconds of a row of some tenants' modules."""
    spent_s: dict[str, Measured] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    busy_s: float = 0.0

    def submit(self, run, /, *args) -> Future:
        future: Future = Future()
        requests, urgent = args
        seconds = self.charge(requests)

        def go_on(part: int) -> None:
            if part == PAUSES:
                future.set_result(run(*args))
            elif urgent is not None and (taken := urgent.take()):
                self.loop.call_later(self.charge(taken), lambda: (urgent.give(run(taken, None)), go_on(part)))
            else:
                self.loop.call_later(seconds / PAUSES, go_on, part + 1)

        go_on(0)
        return future

    def charge(self, requests) -> float:
        """Book a forward, and return its seconds."""
        rows = {each.tenant: 0 for each in requests}
        for each in requests:
            rows[each.tenant] += len(each.observation)
        total = sum(rows.values())
        prefix_s = self.fixed_s + self.row_s * total
        own = {tenant: count * self.dear.get(tenant, HEAD_S) for tenant, count in rows.items()}
        for tenant, count in rows.items():
            known = self.spent(tenant)
            self.spent_s[tenant] = Measured(
                rows=known.rows + count,
                encoded=known.encoded + count,
                prefix_s=known.prefix_s + prefix_s * count / total,
                head_s=known.head_s + own[tenant],
            )
        seconds = prefix_s + sum(own.values())
        self.sizes.append(len(requests))
        self.busy_s += seconds
        return seconds

    def spent(self, tenant: str) -> Measured:
        return self.spent_s.get(tenant, Measured())

    def batcher(self, **spec) -> GroupBatcher:
        return GroupBatcher(
            lambda requests, _: [
                ActionChunk(actions=each.observation.state[:, None, :], policy_version=0) for each in requests
            ],
            lambda tenant: "y" if tenant.startswith("y") else "x",
            InferenceSpec(**{"max_batch_size": 32, "max_wait_ms": 5.0, **spec}),
            executor=self,
            spent=self.spent,
        )


@pytest.fixture
def make_engine(loop):
    return lambda **options: Engine(loop, **options)


@pytest.fixture
def robot(loop, observe):
    """Asks, and asks again once its chunk is executed; returns the latencies."""

    async def ask(
        batcher, tenant: str, *, until: float, period_s: float = 0.1, away_s: float | None = None, jitter: float = 0.1
    ) -> list[float]:
        draw = random.Random(tenant)
        request = PredictRequest(tenant=tenant, observation=observe(1), seeds=(0,))
        took: list[float] = []
        await asyncio.sleep(draw.uniform(0.0, period_s))
        while loop.time() < until:
            began = loop.time()
            await batcher.submit(request)
            took.append(loop.time() - began)
            rest = period_s - took[-1] if away_s is None else away_s
            await asyncio.sleep(max(0.0, rest * (1.0 + jitter * draw.uniform(-1.0, 1.0))))
        return took

    return ask


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))]


async def shares_at(engine: Engine, moment: float) -> dict[str, float]:
    """Each tenant's part of the device-seconds up to a moment at which all still have requests waiting."""
    await asyncio.sleep(moment - engine.loop.time())
    total = sum(each.seconds for each in engine.spent_s.values())
    return {tenant: each.seconds / total for tenant, each in sorted(engine.spent_s.items())}


async def saturate(batcher, observe, tenant: str, count: int, loop, until: float) -> None:
    """Keep ``count`` requests waiting."""
    request = PredictRequest(tenant=tenant, observation=observe(1), seeds=(0,))

    async def one() -> None:
        while loop.time() < until:
            await batcher.submit(request)

    await asyncio.gather(*(one() for _ in range(count)))


# fairness


def test_weights_three_one_one_share_device_seconds_within_two_percent(run, loop, observe, make_engine):
    engine = make_engine()
    batcher = engine.batcher()
    batcher.set_share("a", 3.0)

    async def main():
        floods = (saturate(batcher, observe, tenant, 64, loop, 1.5) for tenant in "abc")
        return (await asyncio.gather(shares_at(engine, 1.5), *floods))[0]

    assert run(main()) == {
        "a": pytest.approx(0.6, abs=0.02),
        "b": pytest.approx(0.2, abs=0.02),
        "c": pytest.approx(0.2, abs=0.02),
    }


def test_a_module_twenty_times_as_dear_gets_device_time_by_weight_and_not_by_rows(run, loop, observe, make_engine):
    engine = make_engine(fixed_s=0.002, dear={"dear": 20 * HEAD_S})
    batcher = engine.batcher()

    async def main():
        floods = (saturate(batcher, observe, tenant, 64, loop, 3.0) for tenant in ("b", "c", "dear"))
        return (await asyncio.gather(shares_at(engine, 3.0), *floods))[0]

    assert list(run(main()).values()) == [pytest.approx(1 / 3, abs=0.02)] * 3


def test_late_tenant_is_in_the_next_batch(run, loop, observe, make_engine):
    engine = make_engine()
    batcher = engine.batcher()
    request = PredictRequest(tenant="late", observation=observe(1), seeds=(0,))

    async def main():
        floods = [asyncio.create_task(saturate(batcher, observe, tenant, 100, loop, 2.0)) for tenant in "ab"]
        waits = []
        for _ in range(20):
            await asyncio.sleep(0.037)
            began, batches = loop.time(), len(engine.sizes)
            await batcher.submit(request)
            waits.append((len(engine.sizes) - batches, loop.time() - began))
        await asyncio.gather(*floods)
        return waits

    waits = run(main())
    assert max(count for count, _ in waits) <= 1
    assert max(seconds for _, seconds in waits) <= 2 * (0.010 + 32 * (0.0005 + HEAD_S)) + 1e-6


def test_no_signature_starves(run, loop, observe, make_engine, robot):
    """A tenant alone with its signature pays for whole forwards: its share of the seconds is what it can count on."""
    engine = make_engine()
    batcher = engine.batcher()

    async def main():
        floods = [saturate(batcher, observe, tenant, 40, loop, 2.0) for tenant in "abcdefgh"]
        return await asyncio.gather(robot(batcher, "y", until=2.0, away_s=0.01), shares_at(engine, 2.0), *floods)

    took, shares, *_ = run(main())
    assert shares["y"] == pytest.approx(1 / 9, abs=0.02)
    one_forward, others = 0.010 + 0.0005 + HEAD_S, 0.010 + 32 * (0.0005 + HEAD_S)
    assert max(took) <= 9 * one_forward + 2 * others


def test_low_class_progresses_by_ageing(run, loop, observe, make_engine):
    engine = make_engine(fixed_s=0.5)
    batcher = engine.batcher(max_batch_size=8)
    batcher.set_share("low", 1.0, "low")

    async def main():
        await asyncio.gather(
            saturate(batcher, observe, "low", 1, loop, 60.0),
            *(saturate(batcher, observe, t, 16, loop, 60.0) for t in "ab"),
        )

    run(main())
    assert engine.spent_s["low"].rows == pytest.approx(60 / 10, abs=1)


@pytest.fixture
def p95(loop, make_engine, observe, robot):
    """Of robots beside floods that keep 300 requests waiting, without the first part of each robot's answers."""

    def measure(
        *, floods: int, others: int, fixed_s: float = 0.01, row_s: float, period_s: float, seconds: float, skip: float
    ) -> float:
        async def main() -> float:
            batcher = make_engine(fixed_s=fixed_s, row_s=row_s).batcher()
            until = loop.time() + seconds
            names = [f"t{index}" for index in range(others)]
            tasks = [asyncio.create_task(robot(batcher, name, until=until, period_s=period_s)) for name in names]
            await asyncio.sleep(0.5)
            each = 300 // max(floods, 1)
            await asyncio.gather(*(saturate(batcher, observe, f"flood{i}", each, loop, until) for i in range(floods)))
            took = [late for each in await asyncio.gather(*tasks) for late in each[int(len(each) * skip) :]]
            await batcher.aclose()
            return percentile(took, 0.95)

        return loop.run_until_complete(main())

    return measure


@pytest.mark.parametrize("row_s", [0.0001, 0.0005, 0.001])
@pytest.mark.parametrize("others", [1, 2, 4, 8])
def test_a_flood_of_300_moves_another_tenants_p95_by_less_than_half(p95, row_s: float, others: int):
    """The flood keeps 300 requests waiting all the time; the others are robots that ask ten times a second."""
    like = {"others": others, "row_s": row_s, "period_s": 0.1, "seconds": 3.0, "skip": 0.2}
    assert p95(floods=1, **like) < 1.5 * p95(floods=0, **like)


FORWARDS = [(0.01, 0.0001), (0.01, 0.001), (0.01, 0.003), (0.001, 0.008)]
"""Fixed seconds, and those of a row."""
CROWDS = [(1, 1, 0.04), (1, 1, 0.1), (1, 2, 0.1), (1, 4, 0.1), (1, 8, 0.2), (3, 1, 0.1), (3, 2, 0.1), (3, 4, 0.15)]
"""Floods, others, and the time from one request of those to the next: alone, each needs less than its share, and all of
them half of the device at most."""


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_floods_move_others_by_less_than_half_whatever_forwards_cost(
    p95, forward: tuple[float, float], crowd: tuple[int, int, float]
):
    """Also where a forward grows with each row, and several keep the device busy; once what it costs is learnt."""
    (fixed_s, row_s), (floods, others, period_s) = forward, crowd
    like = {"others": others, "fixed_s": fixed_s, "row_s": row_s, "period_s": period_s, "seconds": 6.0, "skip": 1 / 3}
    assert p95(floods=floods, **like) < 1.5 * p95(floods=0, **like)


@pytest.mark.parametrize("others", [1, 8])
def test_giving_way_costs_a_flood_little(loop, make_engine, observe, robot, monkeypatch, others: int):
    """Where others leave the device idle, they interrupt; where they don't, hardly ever: forwards are shared there."""

    def flood_rows() -> tuple[int, int]:
        async def main() -> tuple[int, int]:
            engine = make_engine()
            batcher = engine.batcher()
            until = loop.time() + 5.0
            robots = [asyncio.create_task(robot(batcher, f"t{index}", until=until)) for index in range(others)]
            await asyncio.sleep(0.5)  # what forwards cost is learnt
            await asyncio.gather(saturate(batcher, observe, "flood", 300, loop, until), *robots)
            await batcher.aclose()
            return engine.spent("flood").rows, batcher.stats().asides

        return loop.run_until_complete(main())

    gives_way, asides = flood_rows()
    monkeypatch.setattr(RunningBatch, "gives_way", False)
    goes_through, none = flood_rows()
    assert (asides > 20, none) == (True, 0)
    assert gives_way > 0.85 * goes_through


def test_a_queue_that_is_longer_than_ageing_is_in_no_higher_class(run, loop, observe, make_engine, robot):
    """The flood's requests wait for 20 s each, but it is served all the time."""
    engine = make_engine(fixed_s=0.001, row_s=0.06)
    batcher = engine.batcher()

    async def main():
        flood = saturate(batcher, observe, "flood", 300, loop, 40.0)
        return (await asyncio.gather(robot(batcher, "t", until=40.0, period_s=0.5), flood))[0]

    took = run(main())
    assert percentile(took[len(took) // 2 :], 0.95) < 1.5 * (0.061 + HEAD_S)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_nobody_gains_a_share_by_interrupting(run, loop, observe, make_engine, robot, weight: float):
    """A robot that asks again at once interrupts until it has had its share, and then waits as everybody else."""
    engine = make_engine()
    batcher = engine.batcher()
    batcher.set_share("t", weight)

    async def main():
        flood = saturate(batcher, observe, "flood", 64, loop, 4.0)
        return await asyncio.gather(robot(batcher, "t", until=4.0, away_s=0.0), shares_at(engine, 4.0), flood)

    _, shares, _ = run(main())
    assert batcher.stats().asides > 20
    assert shares["t"] <= weight / (weight + 1.0) + 0.05


def test_a_lower_class_does_not_interrupt_a_higher_one(run, loop, observe, make_engine, robot):
    engine = make_engine()
    batcher = engine.batcher()
    batcher.set_share("t", 1.0, "low")

    async def main():
        flood = saturate(batcher, observe, "flood", 64, loop, 4.0)
        await asyncio.gather(robot(batcher, "t", until=4.0), flood)

    run(main())
    assert batcher.stats().asides == 0


def test_a_flood_among_tenants_that_all_ask_much_is_no_flood(run, loop, observe, make_engine):
    """Where everybody has many requests batches are as full as they can be."""
    engine = make_engine()
    batcher = engine.batcher()

    async def main():
        await asyncio.gather(*(saturate(batcher, observe, f"t{index}", 16, loop, 2.0) for index in range(8)))

    run(main())
    assert sum(engine.sizes[4:-8]) / len(engine.sizes[4:-8]) > 31


# waiting


@pytest.mark.parametrize("away_s", [0.004, 0.02])
def test_groups_of_robots_are_fuller_and_hardly_later(loop, make_engine, robot, away_s: float):
    """Eight tenants ask again some time after each answer: with and without a wait."""

    async def measure(max_wait_ms: float) -> tuple[float, float, float]:
        engine = make_engine()
        batcher = engine.batcher(max_wait_ms=max_wait_ms)
        until = loop.time() + 1.5
        names = [f"t{index}" for index in range(8)]
        took = await asyncio.gather(*(robot(batcher, name, until=until, away_s=away_s) for name in names))
        await batcher.aclose()
        flat = [late for each in took for late in each]
        return sum(engine.sizes) / len(engine.sizes), sum(flat) / len(flat), engine.busy_s / len(flat)

    (full, late, busy), (size, goes, spent) = (loop.run_until_complete(measure(wait)) for wait in (20.0, 0.0))
    assert full > 1.2 * size
    assert late < 1.25 * goes
    assert busy < 0.9 * spent


def test_wait_is_bounded_by_max_wait(run, loop, make_engine, robot):
    engine = make_engine()
    batcher = engine.batcher(max_wait_ms=5.0)

    async def main():
        names = [f"t{index}" for index in range(12)]
        return await asyncio.gather(*(robot(batcher, name, until=2.0, away_s=0.05, jitter=0.9) for name in names))

    took = [late for each in run(main()) for late in each]
    longest_run = 0.010 + 12 * (0.0005 + HEAD_S)
    assert max(took) <= 2 * longest_run + 0.005 + 1e-6


def test_where_a_forward_grows_with_its_rows_nobody_waits(run, loop, make_engine, robot):
    engine = make_engine(fixed_s=0.0, row_s=0.002)
    batcher = engine.batcher(max_wait_ms=50.0)

    async def main():
        names = [f"t{index}" for index in range(8)]
        await asyncio.gather(*(robot(batcher, name, until=3.0, period_s=0.1) for name in names))

    run(main())
    assert batcher.stats().waiting_for_group_s < 0.05


def test_idle_time_is_told_apart(run, loop, make_engine, robot):
    engine = make_engine()
    batcher = engine.batcher(max_wait_ms=20.0)

    async def main():
        names = [f"t{index}" for index in range(4)]
        await asyncio.gather(*(robot(batcher, name, until=2.0, away_s=0.03) for name in names))

    run(main())
    stats = batcher.stats()
    assert stats.waiting_for_group_s > 0
    assert stats.no_data_s > 0
    assert stats.no_data_s + stats.waiting_for_group_s + engine.busy_s == pytest.approx(loop.time(), rel=0.05)


# the training queue's gather


async def produce(queue: TrainingQueue, make_item, tenant: str, pauses: list[float]) -> None:
    for ordinal, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        assert await queue.put(make_item(tenant, ordinal)) == "ok"


async def gather_all(queue: TrainingQueue, loop, tenants: str, until: float) -> list[tuple[set[str], float]]:
    """Gather again and again: the tenants of each group, and how long it waited for them."""
    groups: list[tuple[set[str], float]] = []
    while loop.time() < until:
        lease = await queue.gather("trainer", dict.fromkeys(tenants, 4), max_samples=64, max_wait_s=0.02, timeout_s=0.5)
        await queue.acknowledge("trainer", [item.item_id for item in lease.items])
        if lease.items:
            groups.append(({item.tenant for item in lease.items}, lease.waited_s))
    return groups


def gathered(run, loop, make_item, **pauses: list[float]) -> list[tuple[set[str], float]]:
    queue = TrainingQueue(QueueSpec(), clock=loop.time)

    async def main():
        for tenant in pauses:
            await queue.open_lane(tenant, signature="x", workload=0)
        producers = (produce(queue, make_item, tenant, each) for tenant, each in pauses.items())
        until = max(map(sum, pauses.values()))
        return (await asyncio.gather(gather_all(queue, loop, "".join(pauses), until), *producers))[0]

    return run(main())


def test_gather_waits_for_a_tenant_that_is_due(run, loop, make_item):
    groups = gathered(run, loop, make_item, a=[0.1] * 20, b=[0.108, *[0.1] * 19])
    assert [tenants for tenants, _ in groups[3:]] == [{"a", "b"}] * len(groups[3:])
    assert max(waited for _, waited in groups[3:]) == pytest.approx(0.008, abs=0.001)


def test_gather_does_not_wait_for_a_tenant_that_is_not(run, loop, make_item):
    groups = gathered(run, loop, make_item, a=[0.1] * 40, b=[0.15, *[1.0] * 4])
    waits = [waited for tenants, waited in groups if tenants == {"a"}][15:]
    assert sum(waited > 0.001 for waited in waits) <= 4  # only where b was due


def test_gather_gives_up_on_a_tenant_that_puts_no_more(run, loop, make_item):
    groups = gathered(run, loop, make_item, a=[0.1] * 40, b=[0.105, *[0.1] * 9])
    assert [tenants for tenants, _ in groups[3:9]] == [{"a", "b"}] * 6
    assert max(waited for _, waited in groups) <= 0.02 + 1e-6
    assert max(waited for _, waited in groups[-15:]) <= 1e-6
