"""The DataProducer: reads a tenant's demonstrations and keeps its lane of the training queue filled.

One thread makes micro-batches in their fixed order and puts them by value. A full lane holds it back. It keeps no
state of its own: order and content of the batches follow from the dataset, the seed and the ordinal alone, so that a
new producer goes on wherever the trainer says. Later epochs go without frames, and the trainer asks for in full what it
lacks (``full_item``).
"""

import asyncio
import dataclasses
import threading
from typing import Any

from joynexus.actors import names
from joynexus.actors.queue_client import QueueClient
from joynexus.data.producer import LightCounts, ProducerEngine
from joynexus.errors import JoyNexusError, ServiceError
from joynexus.observability.logs import setup_logging, tenant_logger
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import SftSpec, TenantSpec
from joynexus.types import LaneItem, PolicyStats


class DataProducer:
    """Feeds the SFT workloads of one tenant."""

    def __init__(self, service: str, tenant: str) -> None:
        spec = ServiceSpec.model_validate_json(service)
        self._tenant = TenantSpec.model_validate_json(tenant)
        setup_logging(spec.storage.root / names.LOGS, role=names.producer(self._tenant.tenant))
        self._log = tenant_logger(__name__, self._tenant.tenant)
        training = spec.training
        stores = training.prefix_store.device_bytes + training.prefix_store.host_bytes > 0
        self._light_epochs = training.light_epochs and stores
        self._queue = QueueClient(spec.service, self._tenant.policy.backbone)
        self._engines: dict[int, ProducerEngine] = {}
        self._running: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._next = 0

    async def ping(self) -> dict[str, Any]:
        """Tell that the actor lives, how far it is, what it saved by leaving frames out, and what stopped it."""
        engine = None if self._running is None else self._engines[self._running]
        counts = LightCounts() if engine is None else engine.light_counts
        return {"next_ordinal": self._next, "error": self._error, **dataclasses.asdict(counts)}

    async def describe(self, workload: int, spec: SftSpec) -> tuple[InterfaceContract, PolicyStats]:
        """Open and verify a workload's dataset.

        Returns:
            What its files declare, and the statistics over all its frames.

        Raises:
            DatasetError: If a file is missing, damaged or inconsistent.
        """
        engine = await asyncio.to_thread(self._engine, workload, spec)
        return engine.contract, await asyncio.to_thread(engine.statistics)

    async def instructions(self, workload: int, spec: SftSpec) -> tuple[str, ...]:
        """Tell the instructions of a workload's dataset, as far as it knows them."""
        return (await asyncio.to_thread(self._engine, workload, spec)).instructions

    async def fit(self, workload: int, spec: SftSpec, stats: PolicyStats) -> dict[str, Any] | None:
        """Compare a workload's dataset with the policy's statistics, as ``summary.json`` holds it.

        Returns:
            See :class:`joynexus.data.fit_report.FitReport`; None where the statistics are the dataset's own.
        """
        engine = await asyncio.to_thread(self._engine, workload, spec)
        report = await asyncio.to_thread(engine.fit, stats, self._tenant.policy)
        for line in [] if report is None else report.lines():
            self._log.info("fit: %s", line)
        return None if report is None else report.to_json()

    def _engine(self, workload: int, spec: SftSpec) -> ProducerEngine:
        if workload not in self._engines:
            self._engines[workload] = ProducerEngine.open(self._tenant, workload, spec, light_epochs=self._light_epochs)
        return self._engines[workload]

    async def start(self, workload: int, spec: SftSpec, first: int, stored_from: int | None = None) -> None:
        """Produce micro-batches from one ordinal on, until the workload has all it needs.

        Args:
            workload: Its index.
            spec: The workload.
            first: Where to begin.
            stored_from: The trainer that runs now got the micro-batches from here on; None for one that has none yet.
        """
        await self.stop()
        engine = await asyncio.to_thread(self._engine, workload, spec)
        engine.begin(first, stored_from=first if stored_from is None else stored_from)
        self._running = workload
        self._stop = threading.Event()
        self._error = None
        arguments = (engine, first, self._stop)
        self._thread = threading.Thread(target=self._produce, args=arguments, name="producer", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the producing thread; harmless when there is none."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30.0)
        self._thread = None

    async def full_item(self, workload: int, ordinal: int) -> LaneItem:
        """Make a micro-batch in full that went without frames; it takes the place of the one in the lane.

        Raises:
            ServiceError: If the workload was not started in this process; ask again.
            DatasetError: If a sample can't be read; :meth:`ping` tells of it too.
        """
        if self._running != workload:
            raise ServiceError(f"{self._tenant.tenant}: workload {workload} is not produced here yet. Ask again.")
        try:
            return await asyncio.to_thread(self._engines[workload].full_item, ordinal)
        except JoyNexusError as error:
            self._error = f"{type(error).__name__}: {error}"
            raise

    def _produce(self, engine: ProducerEngine, first: int, stop: threading.Event) -> None:
        try:
            for ordinal in range(first, engine.num_items):
                self._next = ordinal
                if self._queue.put(engine.next_item(ordinal), stop) in (None, "stale"):
                    return
        except Exception as error:  # noqa: BLE001  # a thread's error has to reach whoever asks
            self._log.exception("producer thread")
            self._error = f"{type(error).__name__}: {error}"
