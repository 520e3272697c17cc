"""Running one workload of a tenant: who is started for it, how its progress is followed, and when it has ended.

The trainer, the workers and the producer do the work by themselves. The runner tells them to begin, looks at what they
answer to the health manager's pings, and tells them to stop. What a process that is made anew has to be told is here
too, since it follows from the workload.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from joynexus.actors import names
from joynexus.actors.evaluation import EvaluationWatch
from joynexus.actors.health import HealthManager
from joynexus.actors.records import TenantRecord, WorkloadRecord
from joynexus.actors.roles import RoleClient
from joynexus.actors.tenant_roles import TenantRoles
from joynexus.errors import JoyNexusError, TenantFailedError
from joynexus.observability.logs import tenant_logger
from joynexus.scheduling.plan import TenantPlan, items_in_flight
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import EvaluationSpec, RlSpec, SftSpec, TenantSpec
from joynexus.types import PolicyStats, WorkloadProgress

POLL_S = 0.2
"""Between two looks at a workload's progress."""
OPEN_S = 600.0
"""How long opening a dataset or a simulator may take."""
FIT = "fit"
"""Result of an SFT workload: how its data fits the statistics that the policy brought."""


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """What the Master lends to its drivers."""

    service: ServiceSpec
    namespace: str
    health: HealthManager
    save: Callable[[TenantRecord], None]


class WorkloadRunner:
    """Runs the workloads of one tenant, one at a time, in the thread of its driver."""

    def __init__(
        self,
        record: TenantRecord,
        plan: TenantPlan,
        context: DriverContext,
        *,
        check: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            record: Of the tenant; results are written into it.
            plan: Of the tenant.
            context: What the Master lends.
            check: Called between two looks; raises what ends the tenant.
        """
        self.record = record
        self.roles = TenantRoles(record.spec, plan, context.service, context.namespace, context.health)
        self._plan = plan
        self._context = context
        self._check = check
        self._backbone = record.spec.policy.backbone
        self._trainer = RoleClient(names.trainer(self._backbone), context.namespace)
        self._queue = RoleClient(names.queue(self._backbone), context.namespace)
        self._log = tenant_logger(__name__, record.name)
        self.stats: PolicyStats | None = None
        """What the policy normalises with, once its slot is open."""

    @property
    def _spec(self) -> TenantSpec:
        """The tenant's spec; an interactive tenant's grows."""
        return self.record.spec

    # ---- what a workload needs, opened

    def open_dataset(self, index: int, workload: SftSpec) -> tuple[InterfaceContract, PolicyStats]:
        """Open and verify a workload's dataset; see :meth:`joynexus.actors.producer.DataProducer.describe`."""
        return self._producer().call("describe", index, workload, timeout_s=OPEN_S)

    def check_instructions(self, index: int, workload: SftSpec) -> None:
        """Refuse a dataset whose instructions are too long for the policy; its slot is open.

        Raises:
            InvalidBatchError: If one is.
        """
        found: tuple[str, ...] = self._producer().call("instructions", index, workload, timeout_s=OPEN_S)
        if found:
            self._trainer.call("check_instructions", self.record.name, found)

    def open_environment(self, workload: RlSpec | EvaluationSpec) -> InterfaceContract:
        """Open a workload's environment in the first worker, and return what it declares."""
        return self.worker(0).call("describe", workload.environment, timeout_s=OPEN_S)

    def worker(self, index: int) -> RoleClient:
        """Start EnvironmentActor ``index``, or find it."""
        return self.roles.worker(index, lambda client: self._restore_worker(index, client))

    def _producer(self) -> RoleClient:
        return self.roles.producer(self._restore_producer)

    # ---- running

    def run(self, index: int) -> None:
        """Run a workload to its end; its results are in the record then.

        Raises:
            TenantFailedError: If it failed, or made no progress for too long.
        """
        workload, record = self._spec.workloads[index], self.record.workloads[index]
        record.status = "RUNNING"
        self._log.info("workload %d (%s) begins", index, workload.type)
        self._context.save(self.record)
        if isinstance(workload, SftSpec):
            self._run_sft(index, workload, record)
        elif isinstance(workload, RlSpec):
            self._run_rl(index, workload, record)
        else:
            self._run_evaluation(index, workload, record)
        record.status = "COMPLETED"
        self.record.workload = index + 1
        self._context.save(self.record)

    def _open_lane(self, index: int) -> WorkloadProgress:
        """Let the trainer begin a workload, or go on with it, and open its lane from there."""
        progress: WorkloadProgress = self._trainer.call(
            "start_workload", self.record.name, index, self._spec.workloads[index]
        )
        self._queue.call(
            "open_lane",
            self.record.name,
            signature=self._plan.signature,
            workload=index,
            weight=self._spec.weight,
            priority=self._spec.priority,
            max_in_flight=items_in_flight(self._spec, self._spec.workloads[index]),
            next_episode=progress.next_ordinal,
        )
        return progress

    def _run_sft(self, index: int, workload: SftSpec, record: WorkloadRecord) -> None:
        producer = self._producer()
        if self.stats is not None and FIT not in record.results:
            record.results[FIT] = producer.call("fit", index, workload, self.stats, timeout_s=OPEN_S)
            self._context.save(self.record)
        progress = self._open_lane(index)
        producer.call("start", index, workload, progress.next_ordinal, timeout_s=OPEN_S)
        try:
            self._follow(record, workers=[producer.name])
        finally:
            self._stop([producer])

    def _run_rl(self, index: int, workload: RlSpec, record: WorkloadRecord) -> None:
        self._open_lane(index)
        workers = [self.worker(each) for each in range(workload.rollout.min_workers)]
        try:
            for worker in workers:
                worker.call("start_rollout", index, workload, timeout_s=OPEN_S)
            self._follow(record, workers=[worker.name for worker in workers])
        finally:
            self._stop(workers)

    def _stop(self, workers: list[RoleClient]) -> None:
        for worker in workers:
            try:
                worker.call("stop", patience_s=5.0)
            except JoyNexusError as error:
                self._log.info("%s did not stop: %s", worker.name, error)

    def _run_evaluation(self, index: int, workload: EvaluationSpec, record: WorkloadRecord) -> None:
        watch = EvaluationWatch(workload, index, self.record.folder)
        workers = {each: self.worker(each) for each in range(workload.num_workers)}
        for each, worker in workers.items():
            watch.start_worker(each, worker)
        stall = Stall(self._context.service.health.stall_s, f"{self.record.name}: evaluation {index}")
        while not watch.finished():
            self._check()
            for worker in workers.values():
                self._raise_worker_error(worker.name)
            stall.look(watch.count())
            time.sleep(POLL_S)
        record.results = watch.results()

    def _follow(self, record: WorkloadRecord, *, workers: list[str]) -> None:
        """Follow a training workload until the trainer has finished it."""
        stall = Stall(self._context.service.health.stall_s, f"{self.record.name}: {record.type}")
        while True:
            self._check()
            progress = self._progress()
            if progress is not None and progress.workload == self.record.workload:
                self._take_over(record, progress)
                if progress.error is not None:
                    raise TenantFailedError(progress.error)
                if progress.finished:
                    return
                stall.look((progress.steps, progress.iterations, progress.next_ordinal))
            for worker in workers:
                self._raise_worker_error(worker)
            time.sleep(POLL_S)

    def _take_over(self, record: WorkloadRecord, progress: WorkloadProgress) -> None:
        count = {"steps": progress.steps} if progress.kind == "sft" else {"iterations": progress.iterations}
        fit = {FIT: record.results[FIT]} if record.results.get(FIT) else {}
        record.results = {
            **count,
            **fit,
            "target": progress.target,
            "loss_first": progress.loss_first,
            "loss_last": progress.loss_last,
            "dropped_stale": progress.dropped_stale,
            **progress.metrics,
        }
        self.record.policy_version = progress.policy_version

    def _progress(self) -> WorkloadProgress | None:
        answer = self._context.health.answer(names.trainer(self._backbone))
        return None if answer is None else answer["progress"].get(self.record.name)

    def _raise_worker_error(self, name: str) -> None:
        answer = self._context.health.answer(name)
        if answer is not None and answer.get("error"):
            raise TenantFailedError(f"{name}: {answer['error']}")

    # ---- what a process that was made anew has to be told

    def _restore_producer(self, client: RoleClient) -> None:
        progress = self._progress()
        if progress is not None and progress.kind == "sft" and not progress.finished:
            spec = self._spec.workloads[self.record.workload]
            client.call("start", self.record.workload, spec, progress.next_ordinal, stored_from=0, timeout_s=OPEN_S)

    def _restore_worker(self, index: int, client: RoleClient) -> None:
        if self.record.status != "RUNNING" or self.record.workload >= len(self._spec.workloads):
            return
        workload = self._spec.workloads[self.record.workload]
        if isinstance(workload, RlSpec):
            client.call("start_rollout", self.record.workload, workload, timeout_s=OPEN_S)
        elif isinstance(workload, EvaluationSpec):
            watch = EvaluationWatch(workload, self.record.workload, self.record.folder)
            watch.start_worker(index, client)

    def restore_training(self) -> None:
        """Let a new trainer go on with the running workload, from its newest checkpoint."""
        if not self._training_runs():
            return
        index = self.record.workload
        workload = self._spec.workloads[index]
        if isinstance(workload, SftSpec):
            # What the old trainer held is made again by ordinal, rather than looked for.
            self._queue.call("close_lane", self.record.name)
            progress = self._open_lane(index)
            self._producer().call("start", index, workload, progress.next_ordinal, timeout_s=OPEN_S)
        else:
            self._trainer.call("start_workload", self.record.name, index, workload)

    def restore_lane(self) -> None:
        """Open the running workload's lane in a new queue, and let the producer go on from what the trainer has."""
        if not self._training_runs():
            return
        index = self.record.workload
        workload, progress = self._spec.workloads[index], self._open_lane(index)
        if isinstance(workload, SftSpec):
            self._producer().call("start", index, workload, progress.next_ordinal, stored_from=0, timeout_s=OPEN_S)

    def _training_runs(self) -> bool:
        index = self.record.workload
        if index >= len(self._spec.workloads) or self.record.workloads[index].status != "RUNNING":
            return False
        return not isinstance(self._spec.workloads[index], EvaluationSpec)


class Stall:
    """Turns silence into a failure: a workload is never RUNNING for ever with no progress."""

    def __init__(self, limit_s: float, what: str) -> None:
        self._limit_s = limit_s
        self._what = what
        self._last: Any = None
        self._since = time.monotonic()

    def look(self, progress: Any) -> None:  # noqa: ANN401  # anything that compares
        """Note a progress value; raise if it has been the same for too long."""
        now = time.monotonic()
        if progress != self._last:
            self._last, self._since = progress, now
        elif now - self._since > self._limit_s:
            raise TenantFailedError(f"{self._what}: no progress for {self._limit_s:.0f} s. See 'joynexus logs'.")
