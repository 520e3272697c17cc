"""Fair shares where they matter: everybody wants more than there is, for as long as is looked at."""

import asyncio
from collections.abc import Mapping, Sequence

from benchmarks.simulation.clock import VirtualLoop
from benchmarks.simulation.costs import DeviceCosts
from benchmarks.simulation.device import Gpu
from benchmarks.simulation.learners import SftLearner
from benchmarks.simulation.settings import Ledger, Settings
from benchmarks.simulation.tenants import run_sft
from benchmarks.simulation.trainer import VirtualTrainer
from benchmarks.simulation.workload import SftWork, Tenant

ENDLESS = 1_000_000
"""Steps of a tenant that never finishes."""
WARM_UP = 0.4
"""Part of the groups before shares are counted: stores are filled, and those who paid for it have caught up."""


def backlogged(weights: Sequence[float], batch_rows: Sequence[int]) -> list[Tenant]:
    """Return tenants that always have more to train, each on a small dataset of its own.

    Args:
        weights: Repeated in order for all tenants.
        batch_rows: One per tenant: what their calls cost differs with it.
    """
    return [
        Tenant(
            name=f"b{index:04d}",
            arrival_s=0.0,
            signature="layout-0",
            work=SftWork(dataset=f"dataset-{index}", dataset_rows=2 * rows, batch_rows=rows, num_steps=ENDLESS),
            weight=weights[index % len(weights)],
            seed=index,
        )
        for index, rows in enumerate(batch_rows)
    ]


def saturated_shares(
    tenants: Sequence[Tenant], costs: DeviceCosts, settings: Settings, *, groups: int
) -> dict[str, float]:
    """Serve backlogged tenants on one GPU.

    Args:
        tenants: From :func:`backlogged`.
        costs: Of the GPU.
        settings: Of the service.
        groups: Group steps to look at.

    Returns:
        Device-seconds by tenant, after the warm-up.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_serve(loop, tenants, costs, settings, groups))
    finally:
        loop.close()


async def _serve(
    loop: asyncio.AbstractEventLoop, tenants: Sequence[Tenant], costs: DeviceCosts, settings: Settings, groups: int
) -> dict[str, float]:
    ledger = Ledger()
    trainer = VirtualTrainer(loop, Gpu(loop), costs, settings, ledger)
    trainer.start()
    workers: list[asyncio.Task[None]] = []
    for tenant in tenants:
        assert isinstance(tenant.work, SftWork)
        gate, _ = await trainer.open(tenant, SftLearner(tenant, tenant.work))
        workers.append(loop.create_task(run_sft(tenant, tenant.work, trainer, gate)))
    before = await _until(loop, trainer, ledger, int(groups * WARM_UP))
    after = await _until(loop, trainer, ledger, groups)
    trainer.stop()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return {tenant.name: after.get(tenant.name, 0.0) - before.get(tenant.name, 0.0) for tenant in tenants}


async def _until(
    loop: asyncio.AbstractEventLoop, trainer: VirtualTrainer, ledger: Ledger, groups: int
) -> Mapping[str, float]:
    """Wait until so many groups have run, and return the device-seconds so far."""
    reached: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if ledger.groups >= groups and not reached.done():
            reached.set_result(None)

    trainer.on_group = look
    await reached
    trainer.on_group = lambda: None
    return {name: sum(kinds.values()) for name, kinds in ledger.seconds.items()}
