"""The TrainingActor: the shell around the training runtime, which owns the backbone and the tenants' slots.

    feed task (event loop):  queue.gather(what the learners can take) -> inbox        } the next group is gathered
    compute thread:          inbox -> runtime.offer -> runtime.step -> acknowledge    } while this one computes
    publisher:               snapshots -> PolicyStore, in order

The compute thread alone touches the runtime: calls of other actors reach it as commands, run between two group steps,
so that no state needs a lock and no step waits for the control plane. ``ping`` answers from the event loop.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ray.exceptions import RayError

from joynexus.actors import names, ray_calls
from joynexus.actors.publisher import Publisher
from joynexus.actors.roles import first_line
from joynexus.actors.turns import Turns
from joynexus.errors import ServiceError
from joynexus.observability.group_log import GroupColumns
from joynexus.observability.logs import setup_logging
from joynexus.observability.records import progress_metrics, result_metrics
from joynexus.observability.sinks import MetricsWriter
from joynexus.queues.training_queue import Lease
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import RlSpec, SftSpec, TenantSpec
from joynexus.types import LaneItem, PolicyStats, TrainingCall, TrainingResult, WorkloadProgress

if TYPE_CHECKING:
    from joynexus.training.runtime import StepOutcome

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
IDLE_S = 0.05
"""Longest sleep of the compute thread when there is nothing to do."""
FIRST_ITEM_S = 0.1
"""How long one gather waits for a first item: a learner that gets hungry meanwhile is asked for in the next one."""


class TrainingActor:
    """Trains every tenant of one backbone."""

    def __init__(self, service: str, backbone: str) -> None:
        # The Master, which starts this actor, names its class, and would wait for torch and pay for its memory.
        from joynexus.training.engine import TrainingEngine  # noqa: PLC0415
        from joynexus.training.runtime import TrainingRuntime  # noqa: PLC0415

        spec = ServiceSpec.model_validate_json(service)
        self._spec = spec
        self._backbone = backbone
        self._namespace = names.namespace(spec.service)
        self._consumer = names.trainer(backbone)
        setup_logging(spec.storage.root / names.LOGS, role=self._consumer)
        engine = TrainingEngine.load(spec.backbones[backbone], spec.training, backbone_name=backbone)
        self._engine = engine
        publisher = self._publisher = Publisher(backbone, self._namespace)
        self._runtime = TrainingRuntime(
            engine, publish=publisher.hand_over, keep_checkpoints=spec.storage.keep_checkpoints
        )
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[LaneItem, ...]] = queue.SimpleQueue()
        self._gathered_s = self._slept_s = 0.0
        """Since there was work: how long new items waited for their group, and how long the compute thread slept."""
        self._inboxed: Counter[str] = Counter()
        self._turns = Turns()
        self._wanted: dict[str, int] = {}
        self._wake = threading.Event()
        self._progress: dict[str, WorkloadProgress] = {}
        self._tick = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics: dict[str, MetricsWriter] = {}
        self._fault: str | None = None
        self._renewed_at = 0.0

    # ---- liveness

    async def ping(self) -> dict[str, Any]:
        """Tell that the actor lives, each workload's progress, and the usage so far.

        Raises:
            ServiceError: If the compute thread ended: the actor then has to be replaced.
        """
        self._start()
        if self._fault is not None:
            raise ServiceError(f"{self._consumer}: compute thread ended: {self._fault}")
        return {
            "progress": self._progress,
            "usage": self._engine.usage(),
            "groups": self._groups(),
            "silent_s": time.monotonic() - self._tick,
        }

    def _groups(self) -> GroupColumns:
        """The groups of the last pings' time: a lost answer loses none, and whoever collects knows them by ordinal."""
        groups = self._engine.groups_since()
        return groups.pick(groups.time_s > time.time() - max(10.0, 3 * self._spec.health.period_s))

    def _start(self) -> None:
        """Start thread and tasks once there is an event loop: the constructor runs outside it."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._feed()), self._publisher.start(self._loop)]
        threading.Thread(target=self._compute, name="compute", daemon=True).start()

    # ---- the compute thread

    def _compute(self) -> None:
        self._engine.idle.watch("control")  # but for what the engine itself counts as its work
        try:
            while True:
                self._tick = time.monotonic()
                self._run_commands()
                refused = self._take_in()
                self._ask_for(self._runtime.take_incomplete())
                outcome = self._runtime.step(may_wait=True)
                self._acknowledge([*refused, *outcome.acknowledged])
                self._note(outcome)
                self._look()
                if outcome.did_work:
                    self._gathered_s = self._slept_s = 0.0
                else:
                    self._sleep(IDLE_S if outcome.hold_s is None else min(outcome.hold_s, IDLE_S))
        except Exception as error:  # tenants' faults end in their own results; this is one of ours
            log.exception("compute thread of %s", self._consumer)
            self._fault = f"{type(error).__name__}: {error}"

    def _sleep(self, seconds: float) -> None:
        """Wait for items, calls or commands; items tell when they come for how long they waited for their group."""
        began = time.monotonic()
        with self._engine.idle.because("waiting_for_group" if self._engine.has_work else "no_data"):
            self._wake.wait(seconds)
            self._wake.clear()
        self._slept_s += time.monotonic() - began
        if self._gathered_s > 0:
            self._engine.idle.move(min(self._gathered_s, self._slept_s), "no_data", "waiting_for_group")
            self._gathered_s = self._slept_s = 0.0

    def _run_commands(self) -> None:
        while True:
            try:
                command, future = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001  # the caller gets it, whatever it is
                future.set_exception(error)

    def _take_in(self) -> list[str]:
        refused: list[str] = []
        while True:
            try:
                items = self._inbox.get_nowait()
            except queue.Empty:
                return refused
            refused += self._runtime.offer(items)
            self._inboxed.subtract(item.tenant for item in items)

    def _note(self, outcome: "StepOutcome") -> None:
        """Write metrics down, and let the queue drop what a new version makes too old to be learnt from."""
        for tenant, result in outcome.results.items():
            progress = outcome.progress.get(tenant)
            values = result_metrics(result) | ({} if progress is None else progress_metrics(progress))
            labels: dict[str, Any] = {} if progress is None else {"workload": progress.workload}
            if progress is not None and progress.kind == "rl":
                labels["episodes"] = list(progress.episodes)
            self._metrics[tenant].write(result.optimizer_steps, values, labels=labels)
        for tenant, version in outcome.oldest_useful.items():
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._send_min_version(tenant, version), self._loop)

    async def _send_min_version(self, tenant: str, version: int) -> None:
        try:
            await self._queue().set_min_version.remote(tenant, version)
        except (RayError, ValueError) as error:
            log.warning("training queue unreachable: %s; the learner drops stale items itself", error)

    def _look(self) -> None:
        """Publish what other threads may read: they never touch the runtime."""
        self._wanted = self._runtime.wanted()
        self._progress = self._runtime.progress()

    def _acknowledge(self, item_ids: list[str]) -> None:
        if item_ids and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._send_acknowledgement(item_ids), self._loop)

    async def _send_acknowledgement(self, item_ids: list[str]) -> None:
        try:
            await self._queue().acknowledge.remote(self._consumer, item_ids)
        except (RayError, ValueError) as error:
            log.warning("acknowledgement lost (%s); the items come again and are then known as duplicates", error)

    def _ask_for(self, light: list[LaneItem]) -> None:
        if self._loop is not None:
            for item in light:
                asyncio.run_coroutine_threadsafe(self._fetch(item), self._loop)

    # ---- tasks on the event loop

    def _queue(self) -> Any:  # noqa: ANN401
        return ray_calls.actor(names.queue(self._backbone), self._namespace)

    async def _feed(self) -> None:
        """Gather the next group while the compute thread is busy with this one."""
        while True:
            wanted = {tenant: room - self._inboxed[tenant] for tenant, room in self._wanted.items()}
            wanted = {tenant: room for tenant, room in wanted.items() if room > 0}
            try:
                if not wanted:  # the learners have all they need: keep what they hold
                    await self._keep_leases()
                    continue
                lease = await self._gather(wanted)
            except (RayError, ValueError) as error:
                log.warning("training queue unreachable: %s", error)
                await asyncio.sleep(0.5)
                continue
            if lease.items:
                self._gathered_s += lease.waited_s
                self._inboxed.update(item.tenant for item in lease.items)
                self._inbox.put(lease.items)
                self._wake.set()

    async def _fetch(self, light: LaneItem) -> None:
        """Get an item in full that came without frames and can't be completed, for as long as its workload runs.

        The producer may be under restart, or fail: then it tells the Master itself, which ends the tenant.
        """
        while self._is_running(light.tenant, light.workload):
            try:
                producer = ray_calls.actor(names.producer(light.tenant), self._namespace)
                item = await producer.full_item.remote(light.workload, light.ordinal)
            except (RayError, ValueError) as error:
                log.warning("item %s in full: %s; asking again", light.item_id, first_line(error))
                await asyncio.sleep(0.5)
                continue
            self._inboxed[light.tenant] += 1
            self._inbox.put((item,))
            self._wake.set()
            return

    def _is_running(self, tenant: str, workload: int) -> bool:
        progress = self._progress.get(tenant)
        return progress is not None and progress.workload == workload and not progress.finished and not progress.error

    async def _keep_leases(self) -> None:
        """Wait a moment, and renew now and then what is held: a long update is no sign of death."""
        await asyncio.sleep(IDLE_S / 5)
        now = time.monotonic()
        if now - self._renewed_at > self._spec.queue.lease_s / 4:
            self._renewed_at = now
            await self._queue().renew.remote(self._consumer)

    async def _gather(self, wanted: Mapping[str, int]) -> Lease:
        training = self._spec.training
        return await self._queue().gather.remote(
            self._consumer,
            dict(wanted),
            max_samples=training.max_group_samples,
            max_wait_s=training.max_wait_ms / 1000,
            timeout_s=FIRST_ITEM_S,
        )

    async def _command(self, command: Callable[[], Answer]) -> Answer:
        """Run something on the compute thread, between two group steps."""
        self._start()
        future: Future[Answer] = Future()
        self._commands.put((command, future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    # ---- control

    async def open_tenant(self, tenant: str, folder: str, stats: PolicyStats | None) -> PolicyStats | None:
        """Open or resume a tenant's slot, harmless when repeated; return the statistics that it normalises with.

        Raises:
            AdmissionError: If no slot or not enough memory is free.
        """
        spec = TenantSpec.model_validate_json(tenant)
        return await self._command(lambda: self._open(spec, Path(folder), stats))

    def _open(self, spec: TenantSpec, folder: Path, stats: PolicyStats | None) -> PolicyStats | None:
        self._publisher.share(spec.tenant, spec.weight, spec.priority)
        used = self._runtime.open_tenant(spec, folder, stats)
        if spec.tenant not in self._metrics:
            self._metrics[spec.tenant] = MetricsWriter(folder)
        return used

    async def check_instructions(self, tenant: str, instructions: tuple[str, ...]) -> None:
        """Refuse instructions that a tenant's policy can't read.

        Raises:
            InvalidBatchError: If a prompt is longer than the policy's token bucket.
        """
        await self._command(lambda: self._engine.check_instructions(tenant, instructions))

    async def sync_point(self, tenant: str) -> int:
        """Return the newest version that the tenant has published."""
        return await self._command(lambda: self._runtime.version(tenant))

    async def close_tenant(self, tenant: str) -> None:
        """Free a tenant's slot; nothing of it stays in the process."""
        await self._command(lambda: self._close(tenant))

    def _close(self, tenant: str) -> None:
        self._runtime.close_tenant(tenant)
        self._metrics.pop(tenant).close()
        self._turns.forget(tenant)
        self._publisher.forget(tenant)

    async def start_workload(self, tenant: str, index: int, workload: SftSpec | RlSpec) -> WorkloadProgress:
        """Begin a training workload, or tell how far it is."""
        return await self._command(lambda: self._runtime.start_workload(tenant, index, workload))

    async def next_sequence(self, tenant: str) -> int:
        """Return the number that the tenant's next training call has to bear."""
        return await self._command(lambda: self._runtime.next_sequence(tenant))

    async def republish(self) -> None:
        """Publish every tenant's base and newest version again, for a store that lost them."""
        await self._command(self._runtime.republish)

    async def checksum(self) -> str:
        """Hash of the backbone's weights."""
        return await self._command(self._runtime.checksum)

    # ---- the tenants' low-level calls

    async def submit(self, call: TrainingCall, after: object = None) -> TrainingResult:
        """Run one training call of a tenant; see :class:`joynexus.types.TrainingCall`.

        Args:
            call: It waits for those before it.
            after: Never read, here and below: the answer of another call, for which Ray waits before it makes this one.
        """
        del after
        future = await self._turns.take(
            call,
            lambda: self._command(lambda: self._submit_in_turn(call)),
            lambda: self._command(lambda: self._runtime.submit(call)),
        )
        self._wake.set()
        return await asyncio.wrap_future(future)

    def _submit_in_turn(self, call: TrainingCall) -> Future[TrainingResult] | None:
        is_early = call.sequence > self._runtime.next_sequence(call.tenant)
        return None if is_early else self._runtime.submit(call)

    async def sync_weights(self, tenant: str, after: object = None) -> int:
        """Publish a tenant's current parameters as a new version, and return its number."""
        del after
        return await self._command(lambda: self._runtime.sync_weights(tenant))

    async def save_state(self, tenant: str, name: str, after: object = None) -> str:
        """Write a named checkpoint of a tenant, and return its folder."""
        del after
        return str(await self._command(lambda: self._runtime.save_state(tenant, name)))

    async def load_state(self, tenant: str, name: str, after: object = None) -> None:
        """Take a tenant back to a named checkpoint."""
        del after
        await self._command(lambda: self._runtime.load_state(tenant, name))

    async def export(self, tenant: str, folder: str, after: object = None) -> str:
        """Write a tenant's module, spec and statistics for use elsewhere, and return the folder."""
        del after
        return str(await self._command(lambda: self._runtime.export(tenant, Path(folder))))
