import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import Executor, Future

import numpy as np
import pytest

from joynexus.errors import (
    BackPressureError,
    InvalidBatchError,
    QueueClosedError,
    ServiceError,
    StalePolicyError,
    TenantFailedError,
    TenantNotFoundError,
)
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.queues.running_batch import RunningBatch
from joynexus.specs.service import InferenceSpec
from joynexus.types import ActionChunk, PredictRequest

FORWARD_S = 1.0


class VirtualExecutor(Executor):
    """Runs a batch at the end of its forward, on the virtual clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, run, /, *args) -> Future:
        future: Future = Future()
        self._loop.call_later(FORWARD_S, self._finish, future, run, args)
        return future

    def _finish(self, future: Future, run, args) -> None:
        try:
            future.set_result(run(*args))
        except Exception as error:  # noqa: BLE001  # as an executor does
            future.set_exception(error)


class FakeEngine:
    """Answers each row with its own state, and remembers what it ran.

    A request fails alone where its state is negative; the whole batch raises where one is above 1000.
    """

    def __init__(self) -> None:
        self.batches: list[list[PredictRequest]] = []
        self.raises: Exception = RuntimeError("out of memory")

    def signature_of(self, tenant: str) -> str:
        if tenant == "nobody":
            raise TenantNotFoundError("nobody: has no policy")
        if tenant == "broken":
            raise ZeroDivisionError("broken")
        return "other" if tenant.startswith("y") else "x"

    def run(self, requests: list[PredictRequest], urgent: object = None) -> list[ActionChunk | Exception]:
        self.batches.append(requests)
        if any(state_of(each) > 1000 for each in requests):
            raise self.raises
        return [
            StalePolicyError("negative")
            if state_of(each) < 0
            else ActionChunk(actions=each.observation.state[:, None, :], policy_version=0)
            for each in requests
        ]

    @property
    def tenants(self) -> list[list[str]]:
        return [[each.tenant for each in batch] for batch in self.batches]

    @property
    def states(self) -> list[list[float]]:
        return [[state_of(each) for each in batch] for batch in self.batches]


def state_of(request: PredictRequest) -> float:
    return float(request.observation.state[0, 0])


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def make_batcher(engine, loop):
    def make(**spec) -> GroupBatcher:
        options = {"max_batch_size": 32, "max_wait_ms": 5.0, **spec}
        return GroupBatcher(engine.run, engine.signature_of, InferenceSpec(**options), executor=VirtualExecutor(loop))

    return make


@pytest.fixture
def ask(observe):
    async def ask(batcher: GroupBatcher, tenant: str, state: float = 0.0, rows: int = 1) -> float:
        request = PredictRequest(tenant=tenant, observation=observe(rows, state), seeds=(0,) * rows)
        chunk = await batcher.submit(request)
        assert np.all(chunk.actions == chunk.actions[0])
        return float(chunk.actions[0, 0, 0])

    return ask


def start(*coroutines):
    return [asyncio.create_task(each) for each in coroutines]


async def occupy(batcher, ask) -> asyncio.Task:
    """Keep the engine busy for a second."""
    task = asyncio.create_task(ask(batcher, "busy"))
    await asyncio.sleep(0.1)
    return task


def test_next_batch_fills_while_the_forward_runs(run, loop, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        await occupy(batcher, ask)
        tasks = []
        for index in range(8):
            tasks += start(ask(batcher, f"t{index}", index))
            await asyncio.sleep(0.05)
        return await asyncio.gather(*tasks)

    assert run(main()) == list(range(8))
    assert [len(batch) for batch in engine.batches] == [1, 8]
    assert loop.time() == pytest.approx(2 * FORWARD_S, abs=0.01)


def test_a_batch_has_one_signature(run, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        await occupy(batcher, ask)
        tenants = ["x1", "y", "x2", "y2", "x3", "y"]
        return await asyncio.gather(*(ask(batcher, tenant, index) for index, tenant in enumerate(tenants)))

    assert run(main()) == list(range(6))
    assert sorted(map(sorted, engine.tenants[1:])) == [["x1", "x2", "x3"], ["y", "y", "y2"]]


def test_a_tenant_with_many_requests_does_not_hold_up_the_others(run, engine, make_batcher, ask):
    batcher = make_batcher(max_batch_size=8)

    async def main():
        await occupy(batcher, ask)
        flood = start(*(ask(batcher, "flood", index) for index in range(100)))
        others = start(ask(batcher, "a"), ask(batcher, "b"))
        await asyncio.gather(*others)
        assert not any(task.done() for task in flood[10:])
        return Counter(engine.tenants[1])

    assert run(main()) == {"flood": 6, "a": 1, "b": 1}


def test_shares_follow_the_weights(run, engine, make_batcher, ask):
    batcher = make_batcher(max_batch_size=10)
    batcher.set_share("heavy", 3.0)

    async def main():
        await occupy(batcher, ask)
        start(*(ask(batcher, tenant) for _ in range(200) for tenant in ("heavy", "a", "b")))
        await asyncio.sleep(20 * FORWARD_S)

    run(main())
    served = Counter(tenant for batch in engine.tenants[1:19] for tenant in batch)
    assert served["heavy"] / served.total() == pytest.approx(0.6, abs=0.02)
    assert served["a"] == pytest.approx(served["b"], abs=1)


def test_shares_are_of_rows(run, engine, make_batcher, ask):
    batcher = make_batcher(max_batch_size=12)

    async def main():
        await occupy(batcher, ask)
        start(*(ask(batcher, tenant, rows=rows) for _ in range(100) for tenant, rows in (("wide", 4), ("narrow", 1))))
        await asyncio.sleep(9 * FORWARD_S)

    run(main())
    rows = Counter()
    for batch in engine.batches[1:9]:
        for request in batch:
            rows[request.tenant] += len(request.observation)
    assert rows["wide"] == pytest.approx(rows["narrow"], abs=4)


def test_rows_of_a_batch_are_bounded_and_a_larger_request_runs_alone(run, engine, make_batcher, ask):
    batcher = make_batcher(max_batch_size=8)

    async def main():
        await occupy(batcher, ask)
        wanted = [("a", 3), ("b", 20), ("c", 5), ("d", 4)]
        await asyncio.gather(*(ask(batcher, tenant, rows=rows) for tenant, rows in wanted))

    run(main())
    assert engine.tenants[1:] == [["a", "c"], ["b"], ["d"]]


# waiting


def test_lonely_caller_never_waits_for_others(run, loop, engine, make_batcher, ask):
    batcher = make_batcher(max_wait_ms=500.0)

    async def main():
        for _ in range(10):
            await ask(batcher, "a")

    run(main())
    assert loop.time() == pytest.approx(10 * FORWARD_S, abs=1e-6)


def test_callers_that_come_back_are_waited_for(run, loop, engine, make_batcher, ask):
    """Eight robots that need 0.1 s between two questions: soon all are in every batch."""
    batcher = make_batcher(max_wait_ms=200.0)

    async def robot(index: int) -> None:
        for _ in range(20):
            await ask(batcher, f"t{index}")
            await asyncio.sleep(0.1 + 0.01 * index)

    async def main():
        await asyncio.gather(*(robot(index) for index in range(8)))

    run(main())
    assert [len(batch) for batch in engine.batches[3:-3]] == [8] * (len(engine.batches) - 6)
    # No longer than the slowest robot needs: the wait ends with the last that is expected, not after 0.2 s.
    assert loop.time() == pytest.approx(len(engine.batches) * (FORWARD_S + 0.17), rel=0.05)


def test_callers_who_never_came_back_are_not_waited_for(run, loop, engine, make_batcher, ask):
    batcher = make_batcher(max_wait_ms=200.0)

    async def main():
        await asyncio.gather(*(ask(batcher, f"t{index}") for index in range(8)))
        before = loop.time()
        await ask(batcher, "t0")
        return loop.time() - before

    assert run(main()) == pytest.approx(FORWARD_S, abs=0.002)  # of 0.2 s that it could have waited


def test_wait_for_callers_that_no_longer_come_back_is_bounded_and_forgotten(run, loop, engine, make_batcher, ask):
    batcher = make_batcher(max_wait_ms=200.0)
    took: list[float] = []

    async def robot(index: int) -> None:
        for _ in range(6):
            await ask(batcher, f"t{index}")
            await asyncio.sleep(0.1 + 0.01 * index)

    async def main():
        await asyncio.gather(*(robot(index) for index in range(8)))
        for _ in range(5):
            before = loop.time()
            await ask(batcher, "t0")
            took.append(loop.time() - before - FORWARD_S)

    run(main())
    assert took[-1] == pytest.approx(0.0, abs=1e-6)
    assert max(took) <= 0.2 + 1e-6


def test_one_tenant_can_fill_half_of_the_room_and_no_more(run, engine, make_batcher, ask):
    batcher = make_batcher(max_queued_rows=100)

    async def main():
        await occupy(batcher, ask)
        flood = start(*(ask(batcher, "flood", index) for index in range(300)))
        await asyncio.sleep(0)
        stats = batcher.stats()
        other = await ask(batcher, "a", 7)
        answers = await asyncio.gather(*flood, return_exceptions=True)
        return stats.queued_rows, other, sum(isinstance(each, BackPressureError) for each in answers)

    assert run(main()) == (50, 7.0, 250)


def test_wait_ends_when_the_batch_is_full(run, loop, engine, make_batcher, ask):
    batcher = make_batcher(max_batch_size=4, max_wait_ms=500.0)

    async def main():
        await asyncio.gather(*(ask(batcher, f"t{index}") for index in range(8)))
        before = loop.time()
        await asyncio.gather(*(ask(batcher, f"t{index}") for index in range(4)))
        return loop.time() - before

    assert run(main()) == pytest.approx(FORWARD_S)


# faults


def test_request_that_fails_fails_alone(run, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        await occupy(batcher, ask)
        return await asyncio.gather(*(ask(batcher, "a", state) for state in (1, -1, 2)), return_exceptions=True)

    first, second, third = run(main())
    assert (first, third) == (1, 2)
    assert isinstance(second, StalePolicyError)
    assert batcher.stats().failed == 1


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(RuntimeError("out of memory"), ServiceError), (StalePolicyError("too old"), StalePolicyError)],
)
def test_c21_engine_that_raises_fails_its_batch_with_a_typed_error_and_the_loop_survives(
    run, loop, engine, make_batcher, ask, raised, expected
):
    batcher = make_batcher()
    engine.raises = raised

    async def main():
        ok = await ask(batcher, "a", 1)
        bad = await asyncio.gather(ask(batcher, "a", 5000), ask(batcher, "b", 5001), return_exceptions=True)
        return ok, bad, await ask(batcher, "a", 2), loop.time()

    first, bad, last, took = run(main())
    assert (first, last) == (1, 2)
    assert [type(each) for each in bad] == [expected, expected]
    assert bad[0] is not bad[1]
    assert took == pytest.approx(3 * FORWARD_S, abs=0.01)  # three forwards, and no hang in between


def test_c21_ok_malformed_ok_with_a_real_thread_within_two_seconds(engine, ask):
    async def main():
        batcher = GroupBatcher(engine.run, engine.signature_of, InferenceSpec())
        answers = [
            (await asyncio.gather(ask(batcher, "a", state), return_exceptions=True))[0] for state in (1, 5000, -1, 2)
        ]
        await batcher.aclose()
        return answers

    started = time.monotonic()
    first, raised, malformed, last = asyncio.run(main())
    assert (first, last) == (1, 2)
    assert isinstance(raised, ServiceError)
    assert isinstance(malformed, StalePolicyError)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(("tenant", "expected"), [("nobody", TenantNotFoundError), ("broken", TenantFailedError)])
def test_c21_tenant_without_a_signature_is_refused_and_the_loop_survives(run, make_batcher, ask, tenant, expected):
    batcher = make_batcher()

    async def main():
        first = await ask(batcher, "a", 1)
        with pytest.raises(expected):
            await ask(batcher, tenant)
        return first, await ask(batcher, "a", 2)

    assert run(main()) == (1, 2)


def test_wrong_number_of_answers_fails_the_batch(run, engine, make_batcher, ask):
    batcher = make_batcher()
    batcher._engine_run = lambda requests, urgent: []

    async def main():
        with pytest.raises(ServiceError, match="0 answers to 1"):
            await ask(batcher, "a")

    run(main())


def test_c22_cancelled_requests_are_never_run_and_leave_no_room_taken(run, engine, make_batcher, ask):
    batcher = make_batcher(max_queued_rows=100)

    async def main():
        await occupy(batcher, ask)
        given_up = start(*(ask(batcher, f"t{index % 7}", 500 + index) for index in range(100)))
        await asyncio.sleep(0.1)
        with pytest.raises(BackPressureError):
            await ask(batcher, "a")
        for task in given_up:
            task.cancel()
        await asyncio.sleep(0)
        assert batcher.stats().queued_requests == batcher.stats().queued_rows == 0
        return await asyncio.gather(*(ask(batcher, "a", index) for index in range(20)))

    assert run(main()) == list(range(20))
    assert all(state < 500 for batch in engine.states for state in batch)
    stats = batcher.stats()
    assert (stats.cancelled, stats.queued_requests, stats.queued_rows, stats.requests) == (100, 0, 0, 21)


def test_c22_cancelled_in_the_very_turn_in_which_its_batch_would_start(run, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        given_up = start(ask(batcher, "a", 500))
        await asyncio.sleep(0)  # the request is in, the batch task has not run yet
        given_up[0].cancel()
        await asyncio.wait(given_up)
        return await ask(batcher, "a", 1)

    assert run(main()) == 1
    assert engine.states == [[1.0]]
    assert batcher.stats().cancelled == 1


def test_caller_that_gives_up_during_the_forward_disturbs_nobody(run, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        await occupy(batcher, ask)
        first, second = start(ask(batcher, "a", 1), ask(batcher, "b", 2))
        await asyncio.sleep(FORWARD_S)
        first.cancel()
        return await second, await ask(batcher, "a", 3)

    assert run(main()) == (2, 3)


def test_request_that_no_queue_could_hold_is_refused_for_good(run, make_batcher, ask, observe):
    batcher = make_batcher(max_queued_rows=10)

    async def main():
        for rows in (11, 0):
            with pytest.raises(InvalidBatchError, match=f"{rows} rows"):
                await batcher.submit(PredictRequest(tenant="a", observation=observe(rows), seeds=(0,) * rows))
        return await ask(batcher, "a", 1, rows=10)

    assert run(main()) == 1


def test_closing_answers_those_who_wait_and_finishes_the_forward(run, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        running = await occupy(batcher, ask)
        waiting = start(ask(batcher, "a"))
        await asyncio.sleep(0)
        await batcher.aclose()
        await batcher.aclose()
        with pytest.raises(QueueClosedError):
            await ask(batcher, "a")
        return await running, (await asyncio.gather(*waiting, return_exceptions=True))[0]

    done, refused = run(main())
    assert done == 0.0
    assert isinstance(refused, QueueClosedError)
    assert len(engine.batches) == 1


def test_removed_tenants_requests_are_answered_and_the_others_run(run, engine, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        await occupy(batcher, ask)
        gone, stays = start(ask(batcher, "gone"), ask(batcher, "stays", 1))
        await asyncio.sleep(0)
        batcher.remove_tenant("gone")
        with pytest.raises(TenantNotFoundError, match="gone"):
            await gone
        return await stays

    assert run(main()) == 1
    assert engine.tenants[1] == ["stays"]


def test_callers_are_answered_if_the_batch_task_dies(run, make_batcher, ask):
    batcher = make_batcher()

    async def main():
        await occupy(batcher, ask)
        waiting = start(ask(batcher, "a"))
        await asyncio.sleep(0)
        batcher._task.cancel()
        with pytest.raises(QueueClosedError):
            await waiting[0]
        return await ask(batcher, "a", 2)

    assert run(main()) == 2


# the thread


def test_engine_runs_in_one_thread_of_its_own_and_the_loop_goes_on(observe):
    threads: set[int] = set()
    running = threading.Event()
    go = threading.Event()

    def engine_run(requests: list[PredictRequest], urgent: object) -> list[ActionChunk]:
        threads.add(threading.get_ident())
        running.set()
        assert go.wait(10.0)
        return [ActionChunk(actions=each.observation.state[:, None, :], policy_version=0) for each in requests]

    async def main():
        batcher = GroupBatcher(engine_run, lambda tenant: "x", InferenceSpec())
        requests = [PredictRequest(tenant=f"t{index}", observation=observe(1, index), seeds=(0,)) for index in range(9)]
        first = asyncio.create_task(batcher.submit(requests[0]))
        assert await asyncio.to_thread(running.wait, 10.0)
        others = [asyncio.create_task(batcher.submit(each)) for each in requests[1:]]
        await asyncio.sleep(0)
        assert batcher.stats().queued_requests == 8  # taken while the engine computes
        go.set()
        await asyncio.gather(first, *others)
        await batcher.aclose()
        return batcher.stats()

    stats = asyncio.run(main())
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert (stats.batches, stats.requests, stats.mean_rows, stats.mean_tenants) == (2, 9, 4.5, 4.5)
    assert stats.mean_wait_s > 0
    assert stats.mean_run_s > 0


def noting_starts(engine: FakeEngine, loop, draw: random.Random, started_at: dict[int, float]):
    """An engine that is interrupted now and then, and notes when each request was begun."""

    def run(requests: list[PredictRequest], urgent: RunningBatch | None) -> list[ActionChunk | Exception]:
        started_at.update((int(abs(state_of(each))), loop.time() - FORWARD_S) for each in requests)
        taken = [] if urgent is None or draw.random() < 0.3 else list(urgent.take())
        if taken:
            started_at.update((int(abs(state_of(each))), loop.time()) for each in taken)
            urgent.give(engine.run(taken))
        return engine.run(requests)

    return run


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_callers_gets_its_own_answers_and_leaves_nothing(run, loop, engine, make_batcher, ask, seed):
    """Tenants of two signatures, all sizes, failures, and callers that give up at any moment."""
    batcher = make_batcher(max_batch_size=8, max_queued_rows=10_000)
    draw = random.Random(seed)
    gave_up_at: dict[int, float] = {}
    started_at: dict[int, float] = {}

    batcher._engine_run = noting_starts(engine, loop, draw, started_at)

    async def caller(number: int) -> None:
        await asyncio.sleep(draw.uniform(0.0, 20.0))
        state = -number if draw.random() < 0.1 else number
        task = asyncio.create_task(ask(batcher, draw.choice(["x1", "x2", "y", "y2"]), state, rows=draw.randint(1, 10)))
        if draw.random() < 0.3:
            await asyncio.sleep(draw.choice([0.0, 0.001, 0.5, 1.0, 3.0]))
            if not task.done():
                task.cancel()
                gave_up_at[number] = loop.time()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        if number not in gave_up_at:
            assert answer == number if state > 0 else isinstance(answer, StalePolicyError)

    async def main():
        await asyncio.gather(*(caller(number) for number in range(1, 151)))

    run(main())
    assert len(gave_up_at) > 10
    assert set(started_at) | set(gave_up_at) == set(range(1, 151))
    late = {number for number, moment in gave_up_at.items() if number in started_at and started_at[number] > moment}
    assert late == set()
    assert len({id(request) for batch in engine.batches for request in batch}) == sum(map(len, engine.batches))
    for batch in engine.batches:
        assert len({engine.signature_of(each.tenant) for each in batch}) == 1
        assert len(batch) == 1 or sum(len(each.observation) for each in batch) <= 8
    stats = batcher.stats()
    assert (stats.queued_requests, stats.queued_rows) == (0, 0)
    assert stats.requests + stats.cancelled == 150
