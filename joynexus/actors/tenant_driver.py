"""One tenant's life, from admission to the freed slot, in one thread of the Master.

    prepare:   placement group -> producer and first environment -> do they fit the policy? -> slot, version 0
    workloads: one after the other; each starts its workers, follows the trainer's progress, and stops them
    end:       export -> lane, slot, policy, actors and group freed

Every step is safe to repeat and finds what already runs, so that a Master which comes back after a crash starts the
same thread again from the record on disk. The workers and the trainer meanwhile went on by themselves.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from joynexus.actors import names
from joynexus.actors.records import ENDED, TenantRecord, TenantStatus
from joynexus.actors.roles import RoleClient
from joynexus.actors.workloads import OPEN_S, POLL_S, DriverContext, WorkloadRunner
from joynexus.errors import JoyNexusError, ServiceError, TenantFailedError
from joynexus.observability.logs import tenant_logger
from joynexus.scheduling.plan import TenantPlan, compile_plan
from joynexus.specs.contract import InterfaceContract, check_policy, check_sources
from joynexus.specs.tenant import SftSpec, TenantSpec
from joynexus.types import PolicyStats


class TenantStoppedError(Exception):
    """Raised in the driver's own thread when the tenant was asked to stop."""


class TenantDriver:
    """Drives one tenant; ``start`` it once."""

    def __init__(self, record: TenantRecord, context: DriverContext) -> None:
        self.record = record
        self._context = context
        self._backbone = record.spec.policy.backbone
        self._plan: TenantPlan = compile_plan(record.spec, context.service)
        self._runner = WorkloadRunner(record, self._plan, context, check=self._check)
        self._trainer = RoleClient(names.trainer(self._backbone), context.namespace)
        self._queue = RoleClient(names.queue(self._backbone), context.namespace)
        self._store = RoleClient(names.POLICY_STORE, context.namespace)
        self._log = tenant_logger(__name__, record.name)
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
                    self._runner.run(self.record.workload)
            self._export()
            status = "COMPLETED"
        except TenantStoppedError:
            status = "STOPPED"
        except JoyNexusError as error:
            self.record.reason = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  # whatever it is ends this tenant alone
            self._log.exception("driver")
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
            self._log.info("%s%s", status, f": {self.record.reason}" if self.record.reason else "")
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
        self._runner.roles.reserve()
        contracts = self._open_datasets()
        if self.record.status == "PENDING":  # later, under a new Master, the workers are busy and were checked
            self._check_contracts(contracts + self._open_environments())
        self._check()
        self._open_slot()
        for index, workload in enumerate(self._spec.workloads):
            if isinstance(workload, SftSpec):
                self._runner.check_instructions(index, workload)

    def _check_contracts(self, contracts: list[InterfaceContract]) -> None:
        """Refuse a tenant whose policy, datasets and environments disagree, before anything is trained."""
        policy = self._spec.policy
        for contract in contracts:
            check_policy(policy.interface, contract, owner=self.record.name)
        for other in contracts[1:]:
            check_sources(contracts[0], other, cameras=policy.observation.cameras, owner=self.record.name)

    def _open_datasets(self) -> list[InterfaceContract]:
        """Open every dataset before anything starts; statistics come from the first."""
        contracts: list[InterfaceContract] = []
        for index, workload in enumerate(self._spec.workloads):
            if isinstance(workload, SftSpec):
                contract, stats = self._runner.open_dataset(index, workload)
                self._stats = self._stats or stats
                contracts.append(contract)
        return contracts

    def _open_environments(self) -> list[InterfaceContract]:
        """Open each distinct environment once; the first workload's is opened last, and so stays open."""
        seen: dict[str, InterfaceContract] = {}
        for workload in reversed(self._spec.workloads):
            if not isinstance(workload, SftSpec):
                key = workload.environment.model_dump_json()
                seen[key] = seen.get(key) or self._runner.open_environment(workload)
        return list(seen.values())

    def open_worker(self) -> str:
        """Start the first worker for calls of the tenant's own, and return its name."""
        return self._runner.worker(0).name

    def _open_slot(self) -> None:
        self._open_tenant()
        self._slot_open = True
        version = self._trainer.call("sync_point", self.record.name)
        if not self._store.call("served", self.record.name, version, OPEN_S, timeout_s=OPEN_S + 10):
            raise ServiceError(f"{self.record.name}: no replica took over version {version} within {OPEN_S:.0f} s.")
        self._open_api_lane()

    def _open_tenant(self) -> None:
        spec, folder = self._spec.model_dump_json(), str(self.record.folder)
        self._runner.stats = self._trainer.call("open_tenant", spec, folder, self._stats, timeout_s=OPEN_S)

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

    def restore_training(self) -> None:
        """Give a new TrainingActor this tenant again; called by the Master after it replaced one."""
        if not self._slot_open or self.record.status in ENDED:
            return
        self._open_tenant()
        self._runner.restore_training()

    def restore_lane(self) -> None:
        """Open this tenant's lanes again in a new queue; called by the Master after it replaced one."""
        if self.record.status not in ENDED:
            self._open_api_lane()
            self._runner.restore_lane()

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
            contract, _ = self._runner.open_dataset(index, workload)
            self._runner.check_instructions(index, workload)
            return contract
        return self._runner.open_environment(workload)

    # ---- the end

    def _export(self) -> None:
        self._trainer.call("export", self.record.name, str(self.record.folder / "export"), timeout_s=OPEN_S)

    def _release(self) -> None:
        """Leave nothing of the tenant behind: actors first, since a group with living actors never goes."""
        name = self.record.name
        self._quietly(self._runner.roles.release)
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
            self._log.info("clean-up: %s", error)
        except Exception:  # noqa: BLE001  # whatever it is, it is logged, and the tenant is cleaned up
            self._log.exception("clean-up")
