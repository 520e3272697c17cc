"""A whole simulated service: GPUs with a trainer and a replica each; tenants come, are admitted, work and leave."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulation.clock import VirtualLoop
from benchmarks.simulation.costs import DeviceCosts
from benchmarks.simulation.device import Gpu
from benchmarks.simulation.learners import Learner, RlLearner, SftLearner
from benchmarks.simulation.settings import Ledger, Settings
from benchmarks.simulation.tenants import VirtualReplica, run_evaluation, run_rollout, run_sft
from benchmarks.simulation.trainer import VirtualTrainer
from benchmarks.simulation.workload import EvaluationWork, RlWork, SftWork, Tenant
from joynexus.errors import AdmissionError
from joynexus.scheduling.admission import ServiceState, admit
from joynexus.scheduling.plan import LanePlan, MemoryEstimate, TenantPlan
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.service import ServiceSpec
from joynexus.specs.signature import PrefixLayout

CROWD = 4
"""Tenants by which a GPU that has a dataset's features may be fuller than the emptiest, and still be preferred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """One tenant's time, in virtual seconds."""

    arrival_s: float
    admitted_s: float
    end_s: float

    @property
    def wall_s(self) -> float:
        """From its arrival to its end, waiting for a slot included."""
        return self.end_s - self.arrival_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run of the service came to."""

    stays: Mapping[str, Stay]
    learners: Mapping[str, Learner]
    """Of tenants that train."""
    ledger: Ledger
    gpus: int
    busy_s: float
    """Of all GPUs together."""
    start_s: float
    """First arrival."""
    end_s: float
    """Last end."""

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end."""
        return self.end_s - self.start_s

    @property
    def held_s(self) -> float:
        """GPU-seconds that the service holds: all its GPUs, from the first arrival to the last end."""
        return self.gpus * self.makespan_s

    @property
    def utilisation(self) -> float:
        """Busy part of the held time."""
        return self.busy_s / self.held_s if self.held_s else 0.0


class _Node:
    """One GPU of the service, and who lives there."""

    def __init__(
        self, index: int, loop: asyncio.AbstractEventLoop, costs: DeviceCosts, settings: Settings, ledger: Ledger
    ) -> None:
        self.backbone = f"gpu-{index}"
        self.gpu = Gpu(loop)
        self.trainer = VirtualTrainer(loop, self.gpu, costs, settings, ledger)
        self.replica = VirtualReplica(loop, self.gpu, costs, settings, ledger)
        training = settings.training.model_copy(update={"slots": settings.slots})
        self.spec = ServiceSpec(backbones={self.backbone: LiteBackboneSpec()}, training=training)
        self.plans: dict[str, TenantPlan] = {}
        self.datasets: set[str] = set()
        """Whose features may be in its store."""

    def admit(self, plan: TenantPlan) -> bool:
        """Ask the product's admission whether a tenant fits now."""
        plan = plan.model_copy(update={"backbone": self.backbone})
        try:
            admit(plan, ServiceState(service=self.spec, tenants=tuple(self.plans.values())))
        except AdmissionError:
            return False
        self.plans[plan.tenant] = plan
        return True


class SimulatedService:
    """Runs tenants through a service on virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, costs: DeviceCosts, settings: Settings) -> None:
        self._loop, self._settings, self._carries = loop, settings, settings.carries(costs)
        self._ledger = Ledger()
        self._nodes = [_Node(index, loop, costs, settings, self._ledger) for index in range(settings.gpus)]
        self._queue: deque[tuple[Tenant, asyncio.Future[_Node]]] = deque()
        """Tenants that wait for a slot, first come, first served."""
        self._learners: dict[str, Learner] = {}
        self._stays: dict[str, Stay] = {}

    async def run(self, tenants: Sequence[Tenant]) -> Outcome:
        """Let all tenants come and go."""
        for node in self._nodes:
            node.trainer.start()
        await asyncio.gather(*(self._live(tenant) for tenant in tenants))
        for node in self._nodes:
            node.trainer.stop()
            await node.replica.aclose()
        return Outcome(
            stays=self._stays,
            learners=self._learners,
            ledger=self._ledger,
            gpus=len(self._nodes),
            busy_s=sum(node.gpu.busy_s for node in self._nodes),
            start_s=min(stay.arrival_s for stay in self._stays.values()),
            end_s=max(stay.end_s for stay in self._stays.values()),
        )

    async def _live(self, tenant: Tenant) -> None:
        await asyncio.sleep(tenant.arrival_s)
        node = await self._place(tenant)
        admitted_s = self._loop.time()
        node.replica.open(tenant)
        if isinstance(tenant.work, EvaluationWork):
            await run_evaluation(tenant, tenant.work, node.replica)
        else:
            await self._train(tenant, tenant.work, node)
        node.replica.close(tenant.name)
        self._stays[tenant.name] = Stay(arrival_s=tenant.arrival_s, admitted_s=admitted_s, end_s=self._loop.time())
        del node.plans[tenant.name]
        self._admit_waiting()

    async def _train(self, tenant: Tenant, work: SftWork | RlWork, node: _Node) -> None:
        if isinstance(work, SftWork):
            learner: Learner = SftLearner(tenant, work)
        else:
            learner = RlLearner(tenant, work, is_carried=self._carries)
        self._learners[tenant.name] = learner
        gate, finished = await node.trainer.open(tenant, learner)
        if isinstance(work, SftWork):
            worker = self._loop.create_task(run_sft(tenant, work, node.trainer, gate))
        else:
            worker = self._loop.create_task(run_rollout(tenant, work, node.replica, node.trainer, learner, gate))
        await _first_of(worker, finished)
        await node.trainer.close(tenant.name)

    async def _place(self, tenant: Tenant) -> _Node:
        """Return the GPU that takes a tenant in, as soon as one can."""
        node = None if self._queue else self._find(tenant)
        if node is not None:
            return node
        placed: asyncio.Future[_Node] = self._loop.create_future()
        self._queue.append((tenant, placed))
        return await placed

    def _admit_waiting(self) -> None:
        while self._queue and (node := self._find(self._queue[0][0])) is not None:
            self._queue.popleft()[1].set_result(node)

    def _find(self, tenant: Tenant) -> _Node | None:
        """Choose a GPU: one that has seen the dataset unless it is crowded, else the emptiest.

        The product leaves the choice to the tenant, who names a backbone; this is what an operator would advise.
        """
        dataset = tenant.work.dataset if isinstance(tenant.work, SftWork) else ""
        plan = _plan(tenant, self._settings)
        fewest = min(len(node.plans) for node in self._nodes)

        def order(node: _Node) -> tuple[bool, int]:
            is_home = dataset in node.datasets and len(node.plans) <= fewest + CROWD
            return (not is_home, len(node.plans))

        for node in sorted(self._nodes, key=order):
            if node.admit(plan):
                node.datasets.update({dataset} if dataset else ())
                return node
        return None


async def _first_of(worker: asyncio.Task[None], finished: asyncio.Event) -> None:
    """Wait until a tenant's learner has finished, and end its worker; a worker's error ends the simulation."""
    waiting = asyncio.ensure_future(finished.wait())
    while not waiting.done():
        pending = {waiting} if worker.done() else {waiting, worker}
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    worker.cancel()
    await asyncio.wait({worker})


def _plan(tenant: Tenant, settings: Settings) -> TenantPlan:
    """What admission asks for: the layout of the prefix, and the memory of the slot."""
    layout = PrefixLayout(
        backbone={"layout": tenant.signature},
        num_cameras=1,
        image_size=(224, 224),
        prompt_template="{instruction}",
        max_prompt_tokens=48,
        state_dim=None,
    )
    queue = settings.queue
    return TenantPlan(
        tenant=tenant.name,
        backbone="gpu-0",
        layout=layout,
        module_parameters=settings.module_bytes // 16,
        memory=MemoryEstimate(module=settings.module_bytes, activations=0, prefix=0),
        bundles=(),
        elastic=(),
        workloads=(),
        lane=LanePlan(items=queue.lane_items, nbytes=queue.lane_bytes, weight=tenant.weight, priority="normal"),
    )


def simulate(tenants: Sequence[Tenant], costs: DeviceCosts, settings: Settings) -> Outcome:
    """Run tenants through a service, from the first arrival to the last end."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(SimulatedService(loop, costs, settings).run(tenants))
    finally:
        loop.close()
