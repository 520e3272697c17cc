"""The Master: takes tenants in, keeps what should run running, and answers what runs.

    caller --submit--> Master: compile -> admit -> record on disk -> answer
    bring-up thread:   Serve | PolicyStore, per backbone: placement group, queue, TrainingActor; then all replicas
    health thread:     HealthManager (actors/health.py)
    one thread a tenant: TenantDriver (actors/tenant_driver.py)

The Master is a detached actor that Ray itself restarts. Its records are on disk before it answers; all else that it
knows it finds again by name. While it is away, training, rollout and serving go on: none of them calls it.
"""

import asyncio
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray import serve

from joynexus.actors import names
from joynexus.actors.health import HealthManager
from joynexus.actors.inference import deploy_replicas
from joynexus.actors.lifeline import LifelineWatch
from joynexus.actors.placement import check_service_fits, create_group, remove_group
from joynexus.actors.policy_store import PolicyStore
from joynexus.actors.records import ENDED, RecordStore, TenantRecord, WorkloadRecord
from joynexus.actors.roles import Role, RoleClient, end_role
from joynexus.actors.tenant_driver import TenantDriver
from joynexus.actors.training import TrainingActor
from joynexus.actors.usage import UsageBook
from joynexus.actors.workloads import DriverContext
from joynexus.errors import AdmissionError, JoyNexusError, ServiceError, TenantExistsError, TenantNotFoundError
from joynexus.observability.group_log import GroupColumns
from joynexus.observability.logs import setup_logging
from joynexus.queues.training_queue import TrainingQueue
from joynexus.scheduling.admission import ServiceState, admit
from joynexus.scheduling.plan import compile_plan
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec

log = logging.getLogger(__name__)

FAREWELL_S = 1.0
"""Between the answer to ``shut_down`` and the end of the Master."""
SERVICE_ITSELF = ""
"""Its key among those that belong to a driver; no tenant's name is empty."""
RESTORE_PATIENCE_S = 5.0
"""How long a restore waits for another role; the next health round tries again."""


class Master:
    """The control plane of one service."""

    def __init__(self, service: str, root: str, lifeline: str | None = None) -> None:
        """Bring the service up, in the background.

        Args:
            service: ServiceSpec as JSON.
            root: Folder of its state and runs.
            lifeline: Of the driver that the service belongs to: it shuts down when that is gone.
        """
        self._spec = ServiceSpec.model_validate_json(service)
        self._lifeline = lifeline
        self._namespace = names.namespace(self._spec.service)
        setup_logging(Path(root) / names.LOGS, role=names.MASTER)
        self._root = Path(root)
        self._records = RecordStore(self._root / "state" / self._spec.service)
        self._tenants: dict[str, TenantRecord] = self._records.load()
        self._drivers: dict[str, TenantDriver] = {}
        self._lock = threading.Lock()
        self._fault: JoyNexusError | None = None
        self._ready = threading.Event()
        self._health = HealthManager(self._spec.health, self._namespace, on_failed=self._role_failed)
        self._usage = UsageBook(self._spec, self._namespace, self._root / "state" / f"{self._spec.service}.usage.json")
        self._started_at = time.time()
        self._closing = threading.Lock()
        self._is_closed = False
        self._lifelines = LifelineWatch(self._tied, self._cut)
        self._lifelines.start()
        threading.Thread(target=self._bring_up, name="bring-up", daemon=True).start()

    # ---- bring-up

    def _bring_up(self) -> None:
        try:
            self._start_roles()
            self._health.start()
            with self._lock:
                for record in sorted(self._tenants.values(), key=lambda each: each.order):
                    if record.status not in ENDED:
                        self._drive(record)
        except JoyNexusError as error:
            self._fault = error
        except Exception as error:
            log.exception("bring-up")
            self._fault = ServiceError(f"service {self._spec.service!r}: {type(error).__name__}: {error}")
        self._ready.set()

    def _start_roles(self) -> None:
        check_service_fits(self._spec)
        with ThreadPoolExecutor(1) as pool:  # Serve starts while the trainers load
            serving = pool.submit(lambda: serve.start(proxy_location="Disabled"))
            self._health.watch(Role(name=names.POLICY_STORE, actor_class=PolicyStore), self._restore_store)
            for backbone in self._spec.backbones:
                self._start_trainer(backbone)
            serving.result()
        for backbone in self._spec.backbones:
            deploy_replicas(self._spec, backbone)

    def _start_trainer(self, backbone: str) -> None:
        training, queue = self._spec.training.resources, self._spec.queue.resources
        group = create_group(
            names.service_group(self._spec.service, backbone),
            [training, queue],
            timeout_s=self._spec.placement_timeout_s,
            owner=f"service {self._spec.service!r}, backbone {backbone!r}",
            strategy="STRICT_PACK",  # the queue stands beside the trainer: items travel by value
        )
        lanes = Role(
            name=names.queue(backbone),
            actor_class=TrainingQueue,
            arguments=(self._spec.queue,),
            resources=queue,
            group=group,
            bundle=1,
        )
        trainer = Role(
            name=names.trainer(backbone),
            actor_class=TrainingActor,
            arguments=(self._spec.model_dump_json(), backbone),
            resources=training,
            group=group,
            bundle=0,
        )
        self._health.watch(lanes, lambda: self._restore_queue(backbone))
        self._health.watch(
            trainer, lambda: self._restore_trainer(backbone), lambda answer: self._usage.observe(backbone, answer)
        )

    # ---- what a role that was made anew has to be told

    def _restore_store(self) -> None:
        for backbone in self._spec.backbones:
            self._client(names.trainer(backbone)).call("republish", patience_s=RESTORE_PATIENCE_S)

    def _restore_queue(self, backbone: str) -> None:
        for driver in self._drivers_of(backbone):
            driver.restore_lane()

    def _restore_trainer(self, backbone: str) -> None:
        self._usage.retire(backbone)
        self._client(names.queue(backbone)).call("release", names.trainer(backbone), patience_s=RESTORE_PATIENCE_S)
        for driver in self._drivers_of(backbone):
            driver.restore_training()

    def _drivers_of(self, backbone: str) -> list[TenantDriver]:
        with self._lock:
            drivers = list(self._drivers.values())
        return [each for each in drivers if each.record.spec.policy.backbone == backbone]

    def _client(self, role: str) -> RoleClient:
        return RoleClient(role, self._namespace)

    def _role_failed(self, role: Role, reason: str) -> None:
        """A role is given up: its tenant fails, or every tenant of a service role."""
        with self._lock:
            drivers = list(self._drivers.values())
        for driver in drivers:
            if role.tenant in (None, driver.record.name):
                driver.fail(f"{role.name}: {reason}")

    # ---- calls

    async def ping(self) -> dict[str, Any]:
        """Tell that the Master lives, and whether the service is up."""
        state = "READY" if self._ready.is_set() else "STARTING"
        state = "FAILED" if self._fault else state
        name, root = self._spec.service, str(self._root)
        return {"service": name, "state": state, "root": root, "lifeline": self._lifeline}

    async def wait_ready(self, timeout_s: float) -> str:
        """Wait for the service to be up, and return its spec as JSON.

        Raises:
            JoyNexusError: Why it can't be brought up.
        """
        if not await asyncio.to_thread(self._ready.wait, timeout_s):
            raise ServiceError(f"service {self._spec.service!r}: not up after {timeout_s:.0f} s. See 'joynexus logs'.")
        if self._fault is not None:
            raise self._fault
        return self._spec.model_dump_json()

    async def submit(self, tenant: str, folder: str, lifeline: str | None = None) -> None:
        """Take a tenant in; its record is on disk when this returns.

        Args:
            tenant: TenantSpec as JSON, its paths absolute.
            folder: Where everything of the tenant is written.
            lifeline: Of the driver that it belongs to (:mod:`joynexus.actors.lifeline`); None: to nobody.

        Raises:
            TenantExistsError: If a living tenant has the name.
            AdmissionError: If the service can't hold it; nothing was created.
            SpecError: If it names a backbone that the service lacks.
        """
        await self.wait_ready(600.0)
        await asyncio.to_thread(self._submit, TenantSpec.model_validate_json(tenant), Path(folder), lifeline)

    def _submit(self, spec: TenantSpec, folder: Path, lifeline: str | None) -> None:
        with self._lock:
            living = self._living()
            if spec.tenant in living:
                raise TenantExistsError(f"{spec.tenant}: a tenant of this name runs. Stop it, or take another name.")
            plans = [compile_plan(each.spec, self._spec) for each in living.values()]
            admit(compile_plan(spec, self._spec), ServiceState(service=self._spec, tenants=tuple(plans)))
            record = TenantRecord(
                spec=spec,
                folder=folder,
                workloads=[WorkloadRecord(type=each.type) for each in spec.workloads],
                interactive=not spec.workloads,
                lifeline=lifeline,
                order=1 + max((each.order for each in self._tenants.values()), default=0),
            )
            self._records.save(record)
            self._tenants[spec.tenant] = record
            self._drive(record)

    def _living(self) -> dict[str, TenantRecord]:
        return {name: record for name, record in self._tenants.items() if record.status not in ENDED}

    def _drive(self, record: TenantRecord) -> None:
        context = DriverContext(
            service=self._spec, namespace=self._namespace, health=self._health, save=self._records.save
        )
        driver = TenantDriver(record, context)
        self._drivers[record.name] = driver
        driver.start()

    async def request_stop(self, tenant: str) -> None:
        """Ask a tenant to stop; it does, whether anybody waits or not."""
        record = self._record(tenant)
        if record.status not in ENDED:
            record.stop_requested = True
            self._records.save(record)

    async def stop(self, tenant: str, timeout_s: float = 120.0) -> str:
        """Stop a tenant and wait until nothing of it is left.

        Returns:
            Its final status.
        """
        await self.request_stop(tenant)
        record = self._record(tenant)
        if not await asyncio.to_thread(self._drivers[tenant].join, timeout_s):
            raise ServiceError(f"{tenant}: still stopping after {timeout_s:.0f} s. Call again.")
        return record.status

    def _record(self, tenant: str) -> TenantRecord:
        if tenant not in self._tenants:
            raise TenantNotFoundError(f"{tenant}: no such tenant. Known: {sorted(self._tenants)}.")
        return self._tenants[tenant]

    async def append(self, tenant: str, workload: str) -> int:
        """Give an interactive tenant one more workload.

        Returns:
            Its index.

        Raises:
            AdmissionError: If the tenant has ended or was submitted with its workloads.
        """
        record = self._record(tenant)
        if record.status in ENDED or not record.interactive:
            raise AdmissionError(f"{tenant}: takes no further workloads ({record.status}). Submit it without any.")
        grown = record.spec.model_dump(mode="json")
        grown["workloads"].append(json.loads(workload))
        spec = TenantSpec.model_validate(grown)
        compile_plan(spec, self._spec)
        record.workloads.append(WorkloadRecord(type=spec.workloads[-1].type))
        record.spec = spec
        self._records.save(record)
        return len(spec.workloads) - 1

    async def open_worker(self, tenant: str) -> str:
        """Start an EnvironmentActor for an interactive tenant's own calls, and return its name."""
        self._record(tenant)
        return await asyncio.to_thread(self._drivers[tenant].open_worker)

    async def status(self) -> dict[str, dict[str, Any]]:
        """Every tenant's record, its newest progress, and what it was charged."""
        charged = await asyncio.to_thread(self._usage.by_tenant)
        return {
            name: {
                **record.model_dump(mode="json", exclude={"spec"}),
                "tenant": name,
                "backbone": record.spec.policy.backbone,
                "device_seconds": charged.get(name, 0.0),
            }
            for name, record in sorted(self._tenants.items(), key=lambda each: each[1].order)
        }

    async def spec_of(self, tenant: str) -> str:
        """A tenant's spec as JSON."""
        return self._record(tenant).spec.model_dump_json()

    async def usage(self, *, fresh: bool = False) -> dict[str, Any]:
        """Device-seconds, idle time, prefixes and group sizes, of trainers and replicas, over all restarts.

        Args:
            fresh: Ask every engine now, in place of what each told last, up to some seconds ago.
        """
        return await asyncio.to_thread(self._usage.report, fresh=fresh)

    async def groups(self) -> dict[str, dict[str, GroupColumns]]:
        """The groups of each backbone's trainer and of its replicas, thinned out where there were many."""
        return await asyncio.to_thread(self._usage.groups)

    async def restarts(self) -> dict[str, int]:
        """How often each role was made anew."""
        return dict(self._health.restarts)

    def _tied(self) -> dict[str, str]:
        """Who belongs to which driver; the service itself under its own key."""
        with self._lock:
            tied = {name: record.lifeline for name, record in self._living().items() if not record.stop_requested}
        return {name: line for name, line in {**tied, SERVICE_ITSELF: self._lifeline}.items() if line is not None}

    def _cut(self, name: str) -> None:
        """The driver that a tenant, or the service, belongs to is gone."""
        if name == SERVICE_ITSELF:
            log.warning("the run that started this service is gone: shutting down")
            self._shut_down()
            return
        record = self._tenants[name]
        log.warning("%s: the run that submitted it is gone: stopping it", name)
        record.reason = "the run that submitted it is gone"
        record.stop_requested = True
        self._records.save(record)

    async def shut_down(self) -> None:
        """Stop every tenant and end every role, this one last, a moment after the answer.

        It goes on where the caller dies meanwhile; repeated calls wait for the first.
        """
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._close()
                self._is_closed = True
                threading.Timer(FAREWELL_S, end_role, (names.MASTER, self._namespace)).start()

    def _close(self) -> None:
        self._ready.wait(60.0)
        self._lifelines.stop()
        with self._lock:
            drivers = list(self._drivers.values())
        for driver in drivers:
            driver.record.stop_requested = True
        for driver in drivers:
            driver.join(60.0)
        self._health.stop()
        for backbone in self._spec.backbones:
            serve.delete(names.application(self._spec.service, backbone))
            for role in (names.trainer(backbone), names.queue(backbone)):
                self._health.unwatch(role)
            remove_group(names.service_group(self._spec.service, backbone))
        self._health.unwatch(names.POLICY_STORE)
