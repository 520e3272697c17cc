"""The two baselines: each tenant alone on a whole GPU that it holds from its start to its end.

No queue, no batcher and no event loop: plain sums, so that they also check the simulated service, in which a single
tenant has to cost the same (a test).

- *Isolated, conventional*: every epoch's and every update's prefixes are encoded again, as the neighbouring frameworks
  do; forwards have the size that is wanted, without padding; nothing is rolled out beyond the last update.
- *Isolated, with our own reuse*: the product for one tenant; a store of its own, features that travel with the
  trajectory, padded forwards.

Both collect the next experience during an update, as the product does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.costs import DeviceCosts
from benchmarks.simulation.learners import SftLearner, minibatches
from benchmarks.simulation.settings import Kind, Settings
from benchmarks.simulation.store import VirtualStore
from benchmarks.simulation.workload import EvaluationWork, RlWork, SftWork, Tenant, jitter


@dataclass(slots=True)
class Alone:
    """What one tenant costs alone."""

    held_s: float = 0.0
    """Wall time, during which it holds a GPU."""
    seconds: dict[Kind, float] = field(default_factory=dict[Kind, float])
    """Device-seconds by kind."""

    @property
    def busy_s(self) -> float:
        """Device-seconds."""
        return sum(self.seconds.values())

    def charge(self, kind: Kind, seconds: float) -> float:
        """Book device-seconds, and return them."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        return seconds


def run_alone(tenant: Tenant, costs: DeviceCosts, settings: Settings, *, reuses: bool) -> Alone:
    """Run a tenant on a GPU of its own.

    Args:
        tenant: Who.
        costs: Of the GPU.
        settings: Size of the store, and whether features are shipped; ignored where nothing is reused.
        reuses: Whether with our own reuse; else conventionally.
    """
    costs = costs if reuses else costs.unpadded()
    if isinstance(tenant.work, SftWork):
        return _sft(tenant, tenant.work, costs, settings.store_bytes if reuses else 0)
    if isinstance(tenant.work, RlWork):
        return _Rollout(tenant, tenant.work, costs, settings, reuses=reuses).run()
    return _evaluate(tenant, tenant.work, costs)


def _sft(tenant: Tenant, work: SftWork, costs: DeviceCosts, store_bytes: int) -> Alone:
    alone, store = Alone(), VirtualStore(store_bytes, costs.row_bytes)
    learner = SftLearner(tenant, work)
    for ordinal in range(work.num_steps):
        missing = 0
        for key, rows in learner.blocks(ordinal):
            missing += 0 if store.find(key) else rows
            store.keep(key)
        alone.held_s += _step(alone, costs, work.batch_rows, missing, costs.lookup_row_s)
    return alone


def _step(alone: Alone, costs: DeviceCosts, rows: int, missing: int, copy_row_s: float) -> float:
    """Book one training call of which ``missing`` rows have to be encoded; returns its seconds."""
    seconds = alone.charge("prefix", costs.encode_s(missing)) + alone.charge("copy", (rows - missing) * copy_row_s)
    head_s = costs.train_s(rows) - costs.optimizer_s
    return seconds + alone.charge("head", head_s) + alone.charge("optimizer", costs.optimizer_s)


def _predict(alone: Alone, costs: DeviceCosts, rows: int) -> float:
    return alone.charge("prefix", costs.encode_s(rows)) + alone.charge("head", costs.act_s(rows))


def _evaluate(tenant: Tenant, work: EvaluationWork, costs: DeviceCosts) -> Alone:
    alone, rng = Alone(), random.Random(f"steps/{tenant.seed}")
    for _ in range(work.episodes // work.num_envs * work.decisions):
        alone.held_s += _predict(alone, costs, work.num_envs) + work.step_s * jitter(rng)
    return alone


class _Rollout:
    """RL alone: rollout and update side by side on one GPU, which each has half of while both want it."""

    def __init__(self, tenant: Tenant, work: RlWork, costs: DeviceCosts, settings: Settings, *, reuses: bool) -> None:
        self._tenant, self._work, self._costs, self._reuses = tenant, work, costs, reuses
        self._is_carried = reuses and settings.carries(costs)
        self._store = VirtualStore(settings.store_bytes if reuses else 0, costs.row_bytes)
        self._rng = random.Random(f"steps/{tenant.seed}")
        self._alone = Alone()
        self._now = 0.0
        self._updates: list[float] = []
        """Seconds that are left of each update that has begun or waits."""

    def run(self) -> Alone:
        """Collect and update until the last update is done."""
        work = self._work
        for iteration in range(work.num_iterations):
            self._finish_updates(keep=1)
            for _ in range(work.episodes // work.num_envs * work.decisions):
                self._decide()
            self._updates.append(self._update(iteration))
        self._finish_updates(keep=1)
        if self._reuses:
            self._collect_in_vain()
        self._finish_updates(keep=0)
        self._alone.held_s = self._now
        return self._alone

    def _update(self, iteration: int) -> float:
        seconds = 0.0
        epoch = minibatches(f"{self._tenant.name}/{iteration}", self._work.rows, self._work)
        copy_row_s = self._costs.carry_row_s if self._is_carried else self._costs.lookup_row_s
        for blocks in epoch * self._work.num_epochs:
            missing = 0
            for key, rows in () if self._is_carried else blocks:
                missing += 0 if self._store.find(key) else rows
                self._store.keep(key)
            rows = sum(count for _, count in blocks)
            seconds += _step(self._alone, self._costs, rows, missing, copy_row_s)
        return seconds

    def _decide(self) -> None:
        self._share(_predict(self._alone, self._costs, self._work.num_envs))
        self._pass(self._work.step_s * jitter(self._rng))

    def _collect_in_vain(self) -> None:
        """The product's worker goes on during the last update, until its lane is full or the tenant leaves."""
        for _ in range(self._work.episodes // self._work.num_envs * self._work.decisions):
            left = sum(self._updates)
            seconds = _predict(self._alone, self._costs, self._work.num_envs) if left else 0.0
            if seconds >= left:  # the tenant has gone before the answer comes
                self._now += 2 * left
                self._updates = []
                return
            self._share(seconds)
            self._pass(min(self._work.step_s * jitter(self._rng), sum(self._updates)))

    def _share(self, seconds: float) -> None:
        """Do a forward beside an update: while both run, each at half speed."""
        both = min(seconds, sum(self._updates))
        self._spend(both)
        self._now += both + seconds

    def _pass(self, seconds: float) -> None:
        """Wait for a simulator: an update has the GPU for itself."""
        self._spend(seconds)
        self._now += seconds

    def _finish_updates(self, *, keep: int) -> None:
        """Wait until all updates but the last ``keep`` are done: experience would be too old else."""
        while len(self._updates) > keep:
            self._now += self._updates.pop(0)

    def _spend(self, seconds: float) -> None:
        while self._updates and seconds > 0.0:
            done = min(seconds, self._updates[0])
            seconds -= done
            self._updates[0] -= done
            if self._updates[0] <= 0.0:
                self._updates.pop(0)


def queue_on(gpus: int, tenants: Sequence[Tenant], alone: Sequence[Alone]) -> list[float]:
    """Return when each tenant ends if they take turns on so many GPUs, first come, first served, a whole GPU each."""
    free = [0.0] * gpus
    ends: list[float] = []
    for tenant, each in zip(tenants, alone, strict=True):
        first = free.index(min(free))
        free[first] = max(free[first], tenant.arrival_s) + each.held_s
        ends.append(free[first])
    return ends
