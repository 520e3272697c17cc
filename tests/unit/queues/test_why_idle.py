"""What the queues tell of why an engine behind them was idle, on a virtual clock."""

import asyncio
from concurrent.futures import Executor, Future

import numpy as np
import pytest

from joynexus.errors import TenantFailedError
from joynexus.observability.idle_clock import IdleClock
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.queues.training_queue import TrainingQueue
from joynexus.specs.service import InferenceSpec, QueueSpec
from joynexus.types import Observation, PredictRequest


class Inline(Executor):
    """Runs a batch at once, in the event loop's own thread."""

    def submit(self, run, /, *args) -> Future:
        future: Future = Future()
        future.set_result(run(*args))
        return future


def request() -> PredictRequest:
    observation = Observation(
        images=np.zeros((1, 0, 0, 0, 3), np.uint8),
        image_mask=np.zeros((1, 0), bool),
        state=np.zeros((1, 2), np.float32),
        instructions=("go",),
    )
    return PredictRequest(tenant="a", observation=observation, seeds=(0,), deterministic=True, version=None)


def test_a_lease_tells_for_how_long_its_first_item_waited_for_others(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(), clock=loop.time)

    async def main():
        for tenant in "ab":
            await queue.open_lane(tenant, signature="s", workload=0)
        wanted = {"a": 9, "b": 9}
        gather = asyncio.create_task(queue.gather("t", wanted, max_samples=99, max_wait_s=0.5, timeout_s=100.0))
        await asyncio.sleep(3.0)
        await queue.put(make_item("a", 0))
        return await gather, await queue.gather("t", wanted, max_samples=99, max_wait_s=0.5, timeout_s=1.0)

    waited, empty = run(main())
    assert waited.waited_s == pytest.approx(0.5)
    assert empty.waited_s == 0.0


def test_a_batcher_tells_why_its_engine_is_idle(run, loop):
    idle = IdleClock(loop.time)

    def engine(requests, urgent):
        with idle.working():
            loop.virtual.now += 2.0
        return [TenantFailedError("no policy")] * len(requests)

    async def main():
        idle.watch("no_data")
        batcher = GroupBatcher(engine, lambda tenant: "s", InferenceSpec(), executor=Inline(), because=idle.because)
        for _ in range(3):
            await asyncio.sleep(5.0)
            with pytest.raises(TenantFailedError, match="no policy"):
                await batcher.submit(request())
        await batcher.aclose()
        return idle.times()

    times = run(main())
    assert times.idle == {"no_data": pytest.approx(15.0)}
    assert times.wall_seconds == pytest.approx(21.0)
