"""One point of the simulation: so many tenants on the shared service, and each of them alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.harness import Row
from benchmarks.simulation.costs import DeviceCosts
from benchmarks.simulation.isolated import Alone, queue_on, run_alone
from benchmarks.simulation.measures import jain, percentile
from benchmarks.simulation.saturation import backlogged, saturated_shares
from benchmarks.simulation.service import Outcome, simulate
from benchmarks.simulation.settings import INFERENCE, TRAINING, Settings
from benchmarks.simulation.workload import SftWork, Tenant, draw_tenants

MAX_GPUS = 8
TENANTS_PER_GPU = 32
"""The node grows with its tenants: one GPU for every so many, up to all of :data:`MAX_GPUS`."""
WEIGHTS = (3.0, 1.0, 1.0)
BATCH_ROWS = (16, 32, 64)
"""Of backlogged tenants, in turn with other steps than the weights, so that dear calls and weights are independent."""
CALLS_EACH = 150
"""Training calls that a backlogged tenant of mean weight gets, about."""
MIN_GROUPS = 1000
"""Group steps of backlogged tenants, however few they are."""
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """What so many tenants came to."""

    tenants: Sequence[Tenant]
    shared: Outcome
    reuse: Sequence[Alone]
    """Isolated, with our own reuse; in the order of the tenants."""
    conventional: Sequence[Alone]
    """Isolated, conventional."""

    def held_ratio(self, alone: Sequence[Alone]) -> float:
        """GPU-hours of a baseline over those of the shared service."""
        return sum(each.held_s for each in alone) / self.shared.held_s

    def busy_ratio(self, alone: Sequence[Alone]) -> float:
        """Device-seconds of a baseline over those of the shared service."""
        return sum(each.busy_s for each in alone) / self.shared.busy_s

    def slowdowns(self) -> list[float]:
        """Wall time on the shared service, with the wait for a slot, over that alone on a whole GPU with our reuse."""
        pairs = zip(self.tenants, self.reuse, strict=True)
        return [self.shared.stays[tenant.name].wall_s / alone.held_s for tenant, alone in pairs]

    def turn_ends(self) -> list[float]:
        """When tenants end who take turns on as many GPUs as the service has, conventionally, a whole GPU each."""
        return queue_on(self.shared.gpus, self.tenants, self.conventional)


def run_point(count: int, seed: int, costs: DeviceCosts, settings: Settings | None = None) -> Point:
    """Simulate so many tenants, shared and alone."""
    tenants = draw_tenants(count, seed)
    settings = settings or Settings(gpus=gpus_for(count))
    return Point(
        tenants=tenants,
        shared=simulate(tenants, costs, settings),
        reuse=[run_alone(tenant, costs, settings, reuses=True) for tenant in tenants],
        conventional=[run_alone(tenant, costs, settings, reuses=False) for tenant in tenants],
    )


def gpus_for(count: int) -> int:
    """Return the GPUs of a service for so many tenants."""
    return min(MAX_GPUS, -(-count // TENANTS_PER_GPU))


def cost_row(point: Point) -> Row:
    """GPU-hours, device-seconds and makespan."""
    shared = point.shared
    start = point.tenants[0].arrival_s
    return {
        "tenants": len(point.tenants),
        "gpus": shared.gpus,
        "gpu_hours_shared": shared.held_s / HOUR_S,
        "gpu_hours_ratio_conventional": point.held_ratio(point.conventional),
        "gpu_hours_ratio_reuse": point.held_ratio(point.reuse),
        "busy_ratio_conventional": point.busy_ratio(point.conventional),
        "busy_ratio_reuse": point.busy_ratio(point.reuse),
        "utilisation_shared": shared.utilisation,
        "utilisation_conventional": _utilisation(point.conventional),
        "makespan_s": shared.makespan_s,
        "makespan_ratio_same_gpus": (max(point.turn_ends()) - start) / shared.makespan_s,
    }


def _utilisation(alone: Sequence[Alone]) -> float:
    return sum(each.busy_s for each in alone) / sum(each.held_s for each in alone)


def delay_row(point: Point) -> Row:
    """Queueing delays, and how full groups and batches are."""
    ledger, stays = point.shared.ledger, point.shared.stays.values()
    return {
        "tenants": len(point.tenants),
        "predict_wait_p50_ms": 1e3 * percentile(ledger.predict_waits_s, 0.5),
        "predict_wait_p99_ms": 1e3 * percentile(ledger.predict_waits_s, 0.99),
        "group_wait_p50_ms": 1e3 * percentile(ledger.group_waits_s, 0.5),
        "group_wait_p99_ms": 1e3 * percentile(ledger.group_waits_s, 0.99),
        "slot_wait_p99_s": percentile([stay.admitted_s - stay.arrival_s for stay in stays], 0.99),
        "rows_per_batch": ledger.batch_rows / max(ledger.batches, 1),
        "tenants_per_group": ledger.group_tenants / max(ledger.groups, 1),
        "encoded_per_trained_row": ledger.encoded / max(ledger.trained_rows, 1),
    }


def fairness_row(point: Point, costs: DeviceCosts) -> Row:
    """Shares where everybody is backlogged, and how much slower each tenant of the mixture was."""
    slowdowns = point.slowdowns()
    gpus = point.shared.gpus
    beside = min(max(2, len(point.tenants) // gpus), Settings().slots)
    weighted = weighted_service(beside, costs)
    mean = sum(weighted) / len(weighted)
    turns = [
        (end - tenant.arrival_s) / alone.held_s
        for tenant, end, alone in zip(point.tenants, point.turn_ends(), point.reuse, strict=True)
    ]
    return {
        "tenants": len(point.tenants),
        "backlogged_per_gpu": beside,
        "jain_weighted_service": jain(weighted),
        "largest_share_error": max(abs(each / mean - 1.0) for each in weighted),
        "slowdown_p50": percentile(slowdowns, 0.5),
        "slowdown_p99": percentile(slowdowns, 0.99),
        "worst_slowdown": max(slowdowns),
        "worst_slowdown_taking_turns": max(turns),
        "jain_of_speeds": jain([1.0 / each for each in slowdowns]),
    }


@cache
def weighted_service(count: int, costs: DeviceCosts) -> list[float]:
    """Return device-seconds by weight of so many backlogged tenants of one GPU, with weights 3 : 1 : 1 and so on.

    Their calls have 16, 32 or 64 rows, so that fair numbers of calls would not be fair seconds.
    """
    tenants = backlogged(WEIGHTS, [BATCH_ROWS[index // len(WEIGHTS) % len(BATCH_ROWS)] for index in range(count)])
    per_group = TRAINING.max_group_samples * len(BATCH_ROWS) / sum(BATCH_ROWS)
    groups = max(MIN_GROUPS, int(CALLS_EACH * count / min(per_group, count)))
    shares = saturated_shares(tenants, costs, Settings(), groups=groups)
    return [shares[tenant.name] / tenant.weight for tenant in tenants]


def own_datasets(tenants: Sequence[Tenant]) -> list[Tenant]:
    """Return the same tenants, no two of which know one dataset."""
    changed: list[Tenant] = []
    for tenant in tenants:
        work = tenant.work
        if isinstance(work, SftWork):
            work = replace(work, dataset=f"{work.dataset}/{tenant.name}")
        changed.append(replace(tenant, work=work))
    return changed


def switches(count: int, seed: int, costs: DeviceCosts) -> list[Row]:
    """Switch one mechanism off at a time, and take away what tenants have in common."""
    gpus = gpus_for(count)
    single_call = TRAINING.model_copy(update={"max_group_samples": 1})
    single_request = INFERENCE.model_copy(update={"max_batch_size": 1})
    ways: Mapping[str, Settings] = {
        "everything": Settings(gpus=gpus),
        "without groups": Settings(gpus=gpus, training=single_call, inference=single_request),
        "without shipped features": Settings(gpus=gpus, ship_features="never"),
        "without a store and shipped features": Settings(gpus=gpus, ship_features="never", store_bytes=0),
    }
    tenants = draw_tenants(count, seed)
    found = {name: simulate(tenants, costs, settings) for name, settings in ways.items()}
    found["with a dataset for each tenant"] = simulate(own_datasets(tenants), costs, Settings(gpus=gpus))
    whole = found["everything"]
    alone_s = sum(run_alone(tenant, costs, Settings(), reuses=True).busy_s for tenant in tenants)
    return [
        {
            "way": name,
            "tenants": count,
            "busy_s": each.busy_s,
            "busy_over_everything": each.busy_s / whole.busy_s,
            "isolated_reuse_over_busy": alone_s / each.busy_s,
            "makespan_s": each.makespan_s,
            "makespan_over_everything": each.makespan_s / whole.makespan_s,
            "predict_wait_p99_ms": 1e3 * percentile(each.ledger.predict_waits_s, 0.99),
        }
        for name, each in found.items()
    ]
