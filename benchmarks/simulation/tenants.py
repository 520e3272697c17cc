"""What tenants do: producers fill lanes, workers step simulators and ask a replica, evaluations end by themselves."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any

import numpy as np

from benchmarks.simulation.costs import DeviceCosts
from benchmarks.simulation.device import Gpu
from benchmarks.simulation.learners import MAX_STALENESS, Learner
from benchmarks.simulation.settings import Ledger, Settings, Spent
from benchmarks.simulation.trainer import Gate, VirtualTrainer
from benchmarks.simulation.workload import EvaluationWork, RlWork, SftWork, Tenant, jitter
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.scheduling.cost import Measured
from joynexus.types import NEVER_STALE, ActionChunk, LaneItem, Observation, PredictRequest, TrainingBatch

LANE_AHEAD = 8
"""SFT micro-batches that a producer keeps in its lane. Data are taken to be read faster than they are learnt from."""


@cache
def observation(rows: int) -> Observation:
    """Return rows without pixels or state: only their number counts here."""
    return Observation(
        images=np.zeros((rows, 0, 1, 1, 3), dtype=np.uint8),
        image_mask=np.zeros((rows, 0), dtype=np.bool_),
        state=np.zeros((rows, 0), dtype=np.float32),
        instructions=("",) * rows,
    )


@cache
def batch(rows: int) -> TrainingBatch:
    """Return a batch of which only the number of rows counts."""
    return TrainingBatch(
        observation=observation(rows),
        actions=np.zeros((rows, 1, 1), dtype=np.float32),
        action_is_pad=np.zeros((rows, 1), dtype=np.bool_),
        sample_ids=("",) * rows,
    )


@cache
def _chunk() -> ActionChunk:
    return ActionChunk(actions=np.zeros((1, 1, 1), dtype=np.float32), policy_version=0)


class VirtualReplica(Executor):
    """A replica: the product's batcher in front of a device that only takes time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, gpu: Gpu, costs: DeviceCosts, settings: Settings, ledger: Ledger
    ) -> None:
        self._loop, self._gpu, self._costs, self._ledger = loop, gpu, costs, ledger
        self._signatures: dict[str, str] = {}
        self._asked_at: dict[int, float] = {}
        self._spent = Spent()
        self._batcher = GroupBatcher(
            _answers, self._signatures.__getitem__, settings.inference, executor=self, spent=self._spent.of
        )

    def open(self, tenant: Tenant) -> None:
        """Serve a tenant."""
        self._signatures[tenant.name] = tenant.signature
        self._batcher.set_share(tenant.name, tenant.weight)

    def close(self, tenant: str) -> None:
        """Serve a tenant no longer."""
        self._batcher.remove_tenant(tenant)
        del self._signatures[tenant]

    async def predict(self, request: PredictRequest) -> None:
        """Ask, and wait for the answer; one request object is asked with by one caller at a time."""
        self._asked_at[id(request)] = self._loop.time()
        await self._batcher.submit(request)

    async def aclose(self) -> None:
        """Stop the batcher."""
        await self._batcher.aclose()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        """Run a batch: the batcher's executor."""
        del kwargs
        requests: Sequence[PredictRequest] = args[0]
        answered: Future[Any] = Future()
        self._gpu.start(self._charge(requests), lambda: answered.set_result(fn(*args)))
        return answered

    def _charge(self, requests: Sequence[PredictRequest]) -> float:
        """Book a batch; returns its seconds: one backbone pass, then each tenant's module."""
        now, ledger = self._loop.time(), self._ledger
        ledger.predict_waits_s += [now - self._asked_at.pop(id(request)) for request in requests]
        rows: Counter[str] = Counter()
        for request in requests:
            rows[request.tenant] += len(request.observation)
        total = rows.total()
        ledger.batches += 1
        ledger.batch_rows += total
        prefix_s = seconds = self._costs.encode_s(total)
        for tenant, count in rows.items():
            act_s = self._costs.act_s(count)
            seconds += act_s
            ledger.charge(tenant, "prefix", prefix_s * count / total)
            ledger.charge(tenant, "head", act_s)
            part_s = prefix_s * count / total
            self._spent.add(tenant, Measured(rows=count, encoded=count, prefix_s=part_s, head_s=act_s))
        return seconds


def _answers(requests: Sequence[PredictRequest], urgent: object) -> list[ActionChunk]:
    del urgent  # the simulated device is not interrupted
    return [_chunk()] * len(requests)


async def run_evaluation(tenant: Tenant, work: EvaluationWork, replica: VirtualReplica) -> None:
    """Run episodes, ``num_envs`` at a time."""
    rng = random.Random(f"steps/{tenant.seed}")
    request = _request(tenant, work.num_envs)
    for _ in range(work.episodes // work.num_envs * work.decisions):
        await replica.predict(request)
        await asyncio.sleep(work.step_s * jitter(rng))


async def run_sft(tenant: Tenant, work: SftWork, trainer: VirtualTrainer, gate: Gate) -> None:
    """Put every micro-batch into the lane, once, as fast as there is room."""
    for ordinal in range(work.num_steps):
        await gate.until_below(LANE_AHEAD)
        await _put(trainer, tenant, ordinal, NEVER_STALE, work.batch_rows, gate)


async def run_rollout(
    tenant: Tenant, work: RlWork, replica: VirtualReplica, trainer: VirtualTrainer, learner: Learner, gate: Gate
) -> None:
    """Collect episodes for ever, as long as the lane holds less than the next update needs."""
    rng = random.Random(f"steps/{tenant.seed}")
    request = _request(tenant, work.num_envs)
    episode = 0
    while True:
        await gate.until_below(work.episodes * MAX_STALENESS)
        version = learner.version
        for _ in range(work.decisions):
            await replica.predict(request)
            await asyncio.sleep(work.step_s * jitter(rng))
        for _ in range(work.num_envs):
            await _put(trainer, tenant, episode, version, work.decisions, gate)
            episode += 1


def _request(tenant: Tenant, rows: int) -> PredictRequest:
    return PredictRequest(tenant=tenant.name, observation=observation(rows), seeds=(0,) * rows)


async def _put(trainer: VirtualTrainer, tenant: Tenant, ordinal: int, version: int, rows: int, gate: Gate) -> None:
    item = LaneItem(
        item_id=f"{tenant.name}/{ordinal}",
        tenant=tenant.name,
        workload=0,
        ordinal=ordinal,
        policy_version=version,
        payload=batch(rows),
    )
    gate.put()
    answer = await trainer.queue.put(item)
    if answer != "ok":
        gate.taken(1)
        if answer != "stale":
            raise RuntimeError(f"simulation: tenant {tenant.name!r}: item {ordinal} was answered {answer!r}.")
