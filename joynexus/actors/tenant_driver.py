"""One tenant's life, from admission to the freed slot, in one thread of the Master.

    prepare:   placement group -> producer and first environment -> do they fit the policy? -> slot, version 0
    workloads: one after the other; each starts its workers, follows the trainer's progress, and stops them
    end:       export -> lane, slot, policy, actors and group freed

Every step is safe to repeat and finds what already runs, so that a Master which comes back after a crash starts the
same thread again from the record on disk. The workers and the trainer meanwhile went on by themselves.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from joynexus.actors import names
from joynexus.actors.evaluation import EvaluationWatch
from joynexus.actors.health import HealthManager
from joynexus.actors.records import ENDED, TenantRecord, TenantStatus, WorkloadRecord
from joynexus.actors.roles import RoleClient
from joynexus.actors.tenant_roles import TenantRoles
from joynexus.errors import JoyNexusError, ServiceError, TenantFailedError
from joynexus.scheduling.plan import TenantPlan, compile_plan, items_in_flight
from joynexus.specs.contract import InterfaceContract, check_policy, check_sources
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import EvaluationSpec, RlSpec, SftSpec, TenantSpec
from joynexus.types import PolicyStats, WorkloadProgress

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks at a workload's progress."""
OPEN_S = 600.0
"""How long opening a dataset or a simulator may take."""


class TenantStoppedError(Exception):
    """Raised in the driver's own thread when the tenant was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """What the Master lends to its drivers."""

    service: ServiceSpec
    namespace: str
    health: HealthManager
    save: Callable[[TenantRecord], None]


class TenantDriver:
    """Drives one tenant; ``start`` it once."""

    def __init__(self, record: TenantRecord, context: DriverContext) -> None:
        self.record = record
        self._context = context
        self._backbone = record.spec.policy.backbone
        self._plan: TenantPlan = compile_plan(record.spec, context.service)
        self._roles = TenantRoles(record.spec, self._plan, context.service, context.namespace, context.health)
        self._trainer = RoleClient(names.trainer(self._backbone), context.namespace)
        self._queue = RoleClient(names.queue(self._backbone), context.namespace)
        self._store = RoleClient(names.POLICY_STORE, context.namespace)
        self._failed: str | None = None
        self._slot_open = False
        self._stats: PolicyStats | None = None
        self._thread = threading.Thread(target=self._run, name=f"tenant-{record.name}", daemon=True)

    def start(self) -> None:
        """Begin, or go on after a restart of the Master."""
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Called by the health manager: a role of this tenant is given up."""
        self._failed = reason

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _spec(self) -> TenantSpec:
        """The tenant's spec; an interactive tenant's grows."""
        return self.record.spec

    # ---- the thread

    def _run(self) -> None:
        status: TenantStatus = "FAILED"
        try:
            self._prepare()
            self._update(status="RUNNING")
            while self._has_next():
                if self._is_fit(self.record.workload):
                    self._run_workload(self.record.workload)
            self._export()
            status = "COMPLETED"
        except TenantStoppedError:
            status = "STOPPED"
        except JoyNexusError as error:
            self.record.reason = f"{type(error).__name__}: {error}"
        except Exception as error:
            log.exception("driver of %s", self.record.name)
            self.record.reason = f"{type(error).__name__}: {error}"
        self._release()
        self._close_workload_record(status)
        self._update(status=status)

    def _has_next(self) -> bool:
        """Whether another workload is to be run; an interactive tenant waits for one until it is stopped."""
        while self.record.workload >= len(self.record.spec.workloads):
            if not self.record.interactive:
                return False
            self._check()
            time.sleep(POLL_S)
        return True

    def _update(self, *, status: TenantStatus | None = None) -> None:
        if status is not None:
            self.record.status = status
        self._context.save(self.record)

    def _check(self) -> None:
        """Raise what ends the tenant: its own wish, or a role that was given up."""
        if self.record.stop_requested:
            raise TenantStoppedError
        if self._failed is not None:
            raise TenantFailedError(self._failed)

    # ---- prepare

    def _prepare(self) -> None:
        self._check()
        self.record.signature = self._plan.signature
        self._update()
        self._roles.reserve()
        contracts = self._open_datasets()
        if self.record.status == "PENDING":  # later, under a new Master, the workers are busy and were checked
            self._check_contracts(contracts + self._open_environments())
        self._check()
        self._open_slot()

    def _check_contracts(self, contracts: list[InterfaceContract]) -> None:
        """Refuse a tenant whose policy, datasets and environments disagree, before anything is trained."""
        policy = self._spec.policy
        for contract in contracts:
            check_policy(policy.interface, contract, owner=self.record.name)
        for other in contracts[1:]:
            check_sources(contracts[0], other, cameras=policy.observation.cameras, owner=self.record.name)

    def _open_datasets(self) -> list[InterfaceContract]:
        """Open every dataset before anything starts; statistics come from the first."""
        wanted = [(i, each) for i, each in enumerate(self._spec.workloads) if isinstance(each, SftSpec)]
        if not wanted:
            return []
        producer = self._roles.producer(self._restore_producer)
        contracts: list[InterfaceContract] = []
        for index, spec in wanted:
            contract, stats = producer.call("describe", index, spec, timeout_s=OPEN_S)
            self._stats = self._stats or stats
            contracts.append(contract)
        return contracts

    def _open_environments(self) -> list[InterfaceContract]:
        """Open each distinct environment once, in the first worker; the first workload's stays open."""
        wanted = [each.environment for each in self._spec.workloads if not isinstance(each, SftSpec)]
        if not wanted:
            return []
        worker = self._worker(0)
        seen: dict[str, InterfaceContract] = {}
        for environment in reversed(wanted):  # so that the first workload's environment is the one that stays open
            key = environment.model_dump_json()
            if key not in seen:
                seen[key] = worker.call("describe", environment, timeout_s=OPEN_S)
        return list(seen.values())

    def _worker(self, index: int) -> RoleClient:
        return self._roles.worker(index, lambda client: self._restore_worker(index, client))

    def open_worker(self) -> str:
        """Start the first worker for calls of the tenant's own, and return its name."""
        return self._worker(0).name

    def _open_slot(self) -> None:
        self._trainer.call(
            "open_tenant", self._spec.model_dump_json(), str(self.record.folder), self._stats, timeout_s=OPEN_S
        )
        self._slot_open = True
        version = self._trainer.call("sync_point", self.record.name)
        if not self._store.call("served", self.record.name, version, OPEN_S, timeout_s=OPEN_S + 10):
            raise ServiceError(f"{self.record.name}: no replica took over version {version} within {OPEN_S:.0f} s.")
        self._open_api_lane()

    def _open_api_lane(self) -> None:
        """Give a tenant that is driven through the API a lane of its own, apart from its workloads'."""
        if self.record.interactive:
            lane, spec = names.api_lane(self.record.name), self._spec
            self._queue.call(
                "open_lane",
                lane,
                signature=self._plan.signature,
                workload=0,
                weight=spec.weight,
                priority=spec.priority,
                max_in_flight=self._context.service.queue.lane_items,
            )

    # ---- repeat what a new process has to be told

    def _restore_producer(self, client: RoleClient) -> None:
        progress = self._progress()
        if progress is not None and progress.kind == "sft" and not progress.finished:
            spec = self._spec.workloads[self.record.workload]
            client.call("start", self.record.workload, spec, progress.next_ordinal, timeout_s=OPEN_S)

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
        """Give a new TrainingActor this tenant again; called by the Master after it replaced one."""
        if not self._slot_open or self.record.status in ENDED:
            return
        self._trainer.call(
            "open_tenant", self._spec.model_dump_json(), str(self.record.folder), self._stats, timeout_s=OPEN_S
        )
        if self._training_runs():
            index = self.record.workload
            self._trainer.call("start_workload", self.record.name, index, self._spec.workloads[index])

    def restore_lane(self) -> None:
        """Open this tenant's lane again in a new queue, and let the producer go on from what the trainer has."""
        if self.record.status in ENDED:
            return
        self._open_api_lane()
        if not self._training_runs():
            return
        self._open_lane(self.record.workload)
        progress = self._progress()
        if progress is not None and progress.kind == "sft":
            self._restore_producer(RoleClient(names.producer(self.record.name), self._context.namespace))

    def _training_runs(self) -> bool:
        index = self.record.workload
        return index < len(self._spec.workloads) and not isinstance(self._spec.workloads[index], EvaluationSpec)

    # ---- workloads

    def _is_fit(self, index: int) -> bool:
        """Whether a workload may start. One that an interactive tenant was given later was not checked before.

        Where it can't, it has failed, and the tenant goes on: it keeps its policy and is told why.
        """
        record = self.record.workloads[index]
        if not self.record.interactive or record.status == "RUNNING":  # under a new Master it goes on
            return True
        try:
            self._check_contracts([self._open_source(index)])
        except JoyNexusError as error:
            record.status, record.reason = "FAILED", f"{type(error).__name__}: {error}"
            self.record.workload = index + 1
            self._update()
            return False
        return True

    def _open_source(self, index: int) -> InterfaceContract:
        workload = self._spec.workloads[index]
        if isinstance(workload, SftSpec):
            return self._roles.producer(self._restore_producer).call("describe", index, workload, timeout_s=OPEN_S)[0]
        return self._worker(0).call("describe", workload.environment, timeout_s=OPEN_S)

    def _run_workload(self, index: int) -> None:
        workload, record = self._spec.workloads[index], self.record.workloads[index]
        record.status = "RUNNING"
        self._update()
        if isinstance(workload, SftSpec):
            self._run_sft(index, workload, record)
        elif isinstance(workload, RlSpec):
            self._run_rl(index, workload, record)
        else:
            self._run_evaluation(index, workload, record)
        record.status = "COMPLETED"
        self.record.workload = index + 1
        self._update()

    def _open_lane(self, index: int) -> None:
        progress = self._trainer.call("start_workload", self.record.name, index, self._spec.workloads[index])
        self._queue.call(
            "open_lane",
            self.record.name,
            signature=self._plan.signature,
            workload=index,
            weight=self._spec.weight,
            priority=self._spec.priority,
            max_in_flight=items_in_flight(self._spec, self._spec.workloads[index]),
            next_episode=progress.next_ordinal if progress.kind == "rl" else 0,
        )

    def _run_sft(self, index: int, workload: SftSpec, record: WorkloadRecord) -> None:
        self._open_lane(index)
        producer = self._roles.producer(self._restore_producer)
        first = self._trainer.call("progress")[self.record.name].next_ordinal
        producer.call("start", index, workload, first, timeout_s=OPEN_S)
        try:
            self._follow(record, workers=[producer.name])
        finally:
            self._quietly(lambda: producer.call("stop", patience_s=5.0))

    def _run_rl(self, index: int, workload: RlSpec, record: WorkloadRecord) -> None:
        self._open_lane(index)
        workers = [self._worker(each) for each in range(workload.rollout.min_workers)]
        try:
            for worker in workers:
                worker.call("start_rollout", index, workload, timeout_s=OPEN_S)
            self._follow(record, workers=[worker.name for worker in workers])
        finally:
            for worker in workers:
                self._quietly(lambda worker=worker: worker.call("stop", patience_s=5.0))

    def _run_evaluation(self, index: int, workload: EvaluationSpec, record: WorkloadRecord) -> None:
        watch = EvaluationWatch(workload, index, self.record.folder)
        workers = {each: self._worker(each) for each in range(workload.num_workers)}
        for each, worker in workers.items():
            watch.start_worker(each, worker)
        stall = _Stall(self._context.service.health.stall_s, f"{self.record.name}: evaluation {index}")
        while not watch.finished():
            self._check()
            for worker in workers.values():
                self._raise_worker_error(worker.name)
            stall.look(watch.count())
            time.sleep(POLL_S)
        record.results = watch.results()

    def _follow(self, record: WorkloadRecord, *, workers: list[str]) -> None:
        """Follow a training workload until the trainer has finished it."""
        stall = _Stall(self._context.service.health.stall_s, f"{self.record.name}: {record.type}")
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
        record.results = {
            **count,
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

    # ---- the end

    def _export(self) -> None:
        self._trainer.call("export", self.record.name, str(self.record.folder / "export"), timeout_s=OPEN_S)

    def _release(self) -> None:
        """Leave nothing of the tenant behind: actors first, since a group with living actors never goes."""
        name = self.record.name
        self._quietly(self._roles.release)
        for lane in (name, names.api_lane(name)):
            self._quietly(lambda lane=lane: self._queue.call("close_lane", lane, patience_s=15.0))
        self._quietly(lambda: self._trainer.call("close_tenant", name, patience_s=60.0))
        self._quietly(lambda: self._store.call("remove", name, patience_s=15.0))

    def _close_workload_record(self, status: TenantStatus) -> None:
        for each in self.record.workloads:
            if each.status == "RUNNING":
                each.status = "STOPPED" if status == "STOPPED" else "FAILED"

    def _quietly(self, action: Callable[[], Any]) -> None:
        """Run a clean-up step whose failure must not keep the others from being done."""
        try:
            action()
        except JoyNexusError as error:
            log.info("clean-up of %s: %s", self.record.name, error)
        except Exception:
            log.exception("clean-up of %s", self.record.name)


class _Stall:
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
