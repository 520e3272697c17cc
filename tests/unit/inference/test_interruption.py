"""A prediction that is interrupted, and those that it is interrupted for, come to what each comes to by itself."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from joynexus.errors import ServiceError, StalePolicyError, TenantNotFoundError
from joynexus.inference.engine import InferenceEngine
from joynexus.inference.interruption import PAUSES_AHEAD, Pace
from joynexus.models import pauses
from joynexus.queues import flood_control
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.scheduling import preemption
from joynexus.specs.service import InferenceSpec
from joynexus.types import ActionChunk

pytestmark = pytest.mark.timeout(180)  # the first test imports transformers, which takes long on a busy machine

NO_STORE = {"prefix_store": {"device_bytes": 0, "host_bytes": 0}}


class Comes:
    """Requests that come at given pauses of a prediction."""

    def __init__(self, at: dict[int, list]) -> None:
        self._at = at
        self.pauses = 0
        self.answers: list = []

    def take(self) -> list:
        self.pauses += 1
        return self._at.get(self.pauses - 1, [])

    def give(self, answers) -> None:
        self.answers.append(answers)


def equal(one: ActionChunk, other: ActionChunk) -> bool:
    assert isinstance(one, ActionChunk), one
    assert isinstance(other, ActionChunk), other
    return np.array_equal(one.actions, other.actions) and one.policy_version == other.policy_version


MODULES = ["oft", "gaussian", "flow_matching", "diffusion", "discrete_tokens"]


@pytest.mark.parametrize("module", MODULES)
def test_whoever_interrupts_at_whatever_pause_both_come_to_the_same(make_engine, snapshot, request_of, module):
    """Nine rows are three chunks of the backbone and three forwards of the module: each of their pauses is tried."""

    def engine() -> InferenceEngine:
        made = make_engine(**NO_STORE)
        for index, tenant in enumerate(("flood", "a", "b")):
            made.set_policy(snapshot(tenant, 0, module=("oft", *MODULES)[index] if index else module, seed=index))
        return made

    flood, urgent = [request_of("flood", 1, rows=9)], [request_of("a", 2), request_of("b", 3, rows=2)]
    alone = engine()
    (want,), wanted = alone.predict(flood), alone.predict(urgent)
    watched = Comes({})
    alone.predict(flood, watched)
    assert watched.pauses > 6
    interrupted = engine()
    for pause in range(watched.pauses):
        comes = Comes({pause: urgent})
        (got,) = interrupted.predict(flood, comes)
        assert equal(got, want), pause
        (answers,) = comes.answers
        assert all(equal(*each) for each in zip(answers, wanted, strict=True)), pause


def test_the_same_frames_in_both_are_found_in_the_store(make_engine, snapshot, request_of):
    """Whoever interrupts may put the very row into the store that is half through, or push one out that was found."""
    engine = make_engine(prefix_store={"device_bytes": 1 << 13, "host_bytes": 0})
    for index, tenant in enumerate(("flood", "a")):
        engine.set_policy(snapshot(tenant, 0, seed=index))
    requests = [request_of("flood", content, rows=3) for content in range(4)]
    urgent = [[request_of("a", content, rows=3)] for content in (0, 7, 3, 8, 0)]
    wanted, owed = engine.predict(requests), [engine.predict(each)[0] for each in urgent]
    for _ in range(2):
        comes = Comes(dict(enumerate(urgent)))
        answers = engine.predict(requests, comes)
        assert all(equal(*each) for each in zip(answers, wanted, strict=True))
        assert all(equal(answer, want) for (answer,), want in zip(comes.answers, owed, strict=True))


def test_an_error_of_whoever_interrupts_is_its_own(make_engine, snapshot, request_of, monkeypatch):
    engine = make_engine(**NO_STORE)
    for tenant in ("flood", "a"):
        engine.set_policy(snapshot(tenant))
    flood = [request_of("flood", 1, rows=5)]
    (want,) = engine.predict(flood)
    comes = Comes({1: [request_of("nobody"), request_of("a", version=9), request_of("a", 4)]})
    (got,) = engine.predict(flood, comes)
    assert equal(got, want)
    ((unknown, stale, good),) = comes.answers
    assert isinstance(unknown, TenantNotFoundError)
    assert isinstance(stale, StalePolicyError)
    assert isinstance(good, ActionChunk)
    comes = Comes({1: [request_of("a", 4)]})
    monkeypatch.setattr(engine, "_run_aside", lambda requests: requests["of no such kind"])
    (got,) = engine.predict(flood, comes)
    assert equal(got, want)
    assert isinstance(comes.answers[0][0], ServiceError)


def test_each_pays_for_its_own_part(make_engine, snapshot, request_of):
    """Of a small request in the middle of a large one: seconds, rows and groups are booked to whom they belong."""
    engine = make_engine(**NO_STORE)
    for tenant in ("flood", "a"):
        engine.set_policy(snapshot(tenant))
    flood, urgent = [request_of("flood", 1, rows=32)], [request_of("a", 2)]
    engine.predict(flood), engine.predict(urgent)
    before = engine.usage()
    for _ in range(5):
        engine.predict(flood, Comes({3: urgent}))
    usage = engine.usage()
    seconds = {name: usage.device_seconds[name] - before.device_seconds[name] for name in ("flood", "a")}
    assert 0 < seconds["a"] < 0.6 * seconds["flood"]
    assert usage.busy_seconds == pytest.approx(sum(usage.device_seconds.values()))
    assert usage.samples["a"] - before.samples["a"] == 5
    assert usage.num_groups - before.num_groups == 10
    assert usage.mean_tenants == 1.0


def test_pauses_are_of_one_thread_and_end_with_their_computation(engine, snapshot, request_of):
    engine.set_policy(snapshot("a"))
    seen: list[int] = []

    def other() -> None:
        engine.predict([request_of("a", 5)])

    with pauses.visited(lambda: seen.append(threading.get_ident())):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == []
    engine.predict([request_of("a", 6)])
    assert seen == []


def test_a_stack_runs_through(make_engine, snapshot, request_of):
    """The slots of stacked modules are theirs: whoever comes meanwhile is run after them."""
    engine = make_engine(**NO_STORE, stack_heads="always")
    for index, tenant in enumerate(("a", "b", "c")):
        engine.set_policy(snapshot(tenant, module="flow_matching", seed=index))
    requests = [request_of(tenant, index, rows=6) for index, tenant in enumerate("abc")]
    wanted = engine.predict(requests)
    assert engine._heads.num_stacked > 0
    watched = Comes({})
    engine.predict(requests, watched)
    for pause in range(watched.pauses):
        comes = Comes({pause: [requests[1], requests[2]]})
        answers = engine.predict(requests, comes)
        assert all(equal(*each) for each in zip(answers, wanted, strict=True))


def test_through_the_batcher_a_request_overtakes_a_flood_that_runs(make_engine, snapshot, request_of, monkeypatch):
    """A real thread: the flood's batch has begun when the other request comes, and ends after it."""
    monkeypatch.setattr(preemption, "LEAST_GAIN", 0.0)  # however late this machine takes the batch to be
    monkeypatch.setattr(flood_control, "CROWD", 1e9)  # and however long its first runs were
    engine = make_engine(**NO_STORE)
    for tenant in ("flood", "a"):
        engine.set_policy(snapshot(tenant))
    holds, begun, go = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def run(requests, urgent):
        if holds.is_set() and urgent is not None and not go.is_set():
            begun.set()
            assert go.wait(30.0)
        return engine.predict(requests, urgent)

    async def main():
        batcher = GroupBatcher(run, engine.signature_of, InferenceSpec(max_batch_size=8, max_wait_ms=0.0))
        await asyncio.gather(*(batcher.submit(request_of("flood", index, rows=8)) for index in range(3)))
        await batcher.submit(request_of("a", 99))
        holds.set()

        async def ask(tenant: str, content: int, rows: int) -> ActionChunk:
            chunk = await batcher.submit(request_of(tenant, content, rows=rows))
            order.append(tenant)
            return chunk

        flood = [asyncio.create_task(ask("flood", index, 8)) for index in range(3)]
        assert await asyncio.to_thread(begun.wait, 30.0)
        urgent = asyncio.create_task(ask("a", 99, 1))
        await asyncio.sleep(0)
        go.set()
        answers = await asyncio.gather(urgent, *flood)
        stats = batcher.stats()
        await batcher.aclose()
        return answers, stats

    (urgent, *flood), stats = asyncio.run(main())
    assert order == ["a", "flood", "flood", "flood"]
    assert stats.asides == 1
    assert equal(urgent, engine.predict([request_of("a", 99)])[0])
    assert all(equal(each, engine.predict([request_of("flood", i, rows=8)])[0]) for i, each in enumerate(flood))


class Mark:
    """Stands for an event of a GPU."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self._number = number
        self._waited = waited

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self._waited.append(self._number)


def test_the_host_stays_near_an_accelerator() -> None:
    made: list[Mark] = []
    waited: list[int] = []

    def mark() -> Mark:
        made.append(Mark(len(made), waited))
        return made[-1]

    pace = Pace(torch.device("cuda"), mark)
    for _ in range(5):
        pace.keep()
    assert waited == list(range(5 - PAUSES_AHEAD))
    idle = Pace(torch.device("cpu"), mark)
    idle.keep()
    assert len(made) == 5
