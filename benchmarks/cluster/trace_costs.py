"""What a trace tells the simulation: measured costs, the tenants' work, and the busy seconds to compare with.

Costs are of the tenants that share no forward, and the seconds to compare with are of the shared run, which the
simulation has not seen: see :mod:`benchmarks.simulation.check`.
"""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.cluster.trace_run import Outcome
from benchmarks.simulation.fit import fit_line
from benchmarks.simulation.workload import BLOCK_ROWS
from joynexus.specs.algorithm import PpoSpec
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import EvaluationSpec, RlSpec, SftSpec, TenantSpec

OWN_WORK = ("head_forward", "backward", "other")
"""Kinds of a training call that are its tenant's own, the optimizer apart."""


def for_simulation(
    service: ServiceSpec, tenants: Sequence[TenantSpec], shared: Outcome, alone: Outcome
) -> dict[str, Any]:
    """Return ``costs``, ``tenants`` and ``busy_s``, and how the service was set up.

    Args:
        service: That ran the trace.
        tenants: The trace.
        shared: What is to be predicted.
        alone: What costs are measured of.
    """
    training, inference = service.training, service.inference
    return {
        "costs": _costs(service, tenants, alone),
        "tenants": [each for tenant in tenants for each in _works(tenant, alone)],
        "busy_s": {each.tenant: shared.busy_of(each.tenant) for each in tenants},
        "store_bytes": training.prefix_store.device_bytes + training.prefix_store.host_bytes,
        "ship_features": "always" if shared.usage["training"]["carried"] else "never",
        "training": {"max_group_samples": training.max_group_samples, "max_wait_ms": training.max_wait_ms},
        "inference": {
            "max_batch_size": inference.max_batch_size,
            "max_wait_ms": inference.max_wait_ms,
            "device_second_worth": inference.device_second_worth,
        },
    }


def _costs(service: ServiceSpec, tenants: Sequence[TenantSpec], alone: Outcome) -> dict[str, float]:
    """Fit the cost model: a forward's line through one row (acting) and a full chunk (fine-tuning)."""
    (backbone,) = service.backbones.values()
    seen, chunk = tenants[0].policy.observation, backbone.chunk_size
    height, width = seen.image_size
    calls = sum(_training_calls(each, alone) for each in tenants)
    trained, acted = (sum(alone.usage[engine]["samples"].values()) for engine in ("training", "inference"))
    one_row_s = _seconds(alone, "inference", "prefix") / max(alone.usage["inference"]["encoded"], 1)
    chunk_s = _seconds(alone, "training", "prefix") / max(alone.usage["training"]["encoded"], 1) * chunk
    fixed_s, row_s = fit_line([(1.0, one_row_s), (float(chunk), chunk_s)])
    copy_s = _seconds(alone, "training", "copy") / max(trained, 1)
    return {
        "prefix_fixed_s": fixed_s,
        "prefix_row_s": row_s,
        "chunk_rows": chunk,
        "lookup_row_s": copy_s,
        "carry_row_s": copy_s,
        "train_fixed_s": _seconds(alone, "training", *OWN_WORK) / max(calls, 1),
        "train_row_s": 0.0,
        "optimizer_s": _seconds(alone, "training", "optimizer") / max(calls, 1),
        "act_fixed_s": _seconds(alone, "inference", "head_forward", "other", "copy") / max(acted, 1),
        "act_row_s": 0.0,
        "row_bytes": backbone.prefix_bytes(len(seen.cameras), seen.image_size, seen.max_prompt_tokens),
        "frame_bytes": 3 * height * width * len(seen.cameras),
    }


def _works(tenant: TenantSpec, alone: Outcome) -> list[dict[str, Any]]:
    """Describe a tenant's workloads, of which each is a tenant of the simulation."""
    found = [_work(tenant, each, alone) for each in tenant.workloads]
    names = [tenant.tenant] if len(found) == 1 else [f"{tenant.tenant}/{each['type']}" for each in found]
    return [{"name": name, "weight": tenant.weight, "work": work} for name, work in zip(names, found, strict=True)]


def _work(tenant: TenantSpec, work: SftSpec | RlSpec | EvaluationSpec, alone: Outcome) -> dict[str, Any]:
    if isinstance(work, SftSpec):
        return _sft(tenant, work, alone)
    return _rl(tenant, work, alone) if isinstance(work, RlSpec) else _evaluation(tenant, work, alone)


def _sft(tenant: TenantSpec, work: SftSpec, alone: Outcome) -> dict[str, Any]:
    rows = alone.usage["training"]["prefixes"][tenant.tenant]["encoded"]  # each of the dataset's is encoded once
    return {
        "type": "sft",
        "dataset": tenant.tenant,
        "dataset_rows": max(round(rows / BLOCK_ROWS), 1) * BLOCK_ROWS,
        "batch_rows": work.batch_size,
        "num_steps": work.num_steps * work.gradient_accumulation,
    }


def _rl(tenant: TenantSpec, work: RlSpec, alone: Outcome) -> dict[str, Any]:
    episodes, ppo = work.rollout.episodes_per_iteration, _ppo(work)
    return {
        "type": "rl",
        "num_iterations": work.num_iterations,
        "episodes": episodes,
        "decisions": max(round(_rows(tenant, work, alone) / episodes), 1),
        "num_envs": work.environment.num_envs * work.rollout.min_workers,
        "step_s": _step_s(tenant, alone),
        "num_epochs": ppo.num_epochs,
        "minibatch_rows": ppo.minibatch_size,
    }


def _evaluation(tenant: TenantSpec, work: EvaluationSpec, alone: Outcome) -> dict[str, Any]:
    episodes = work.num_episodes * (2 if work.baseline else 1)
    return {
        "type": "evaluation",
        "episodes": episodes,
        "decisions": max(round(alone.usage["inference"]["samples"].get(tenant.tenant, 0) / episodes), 1),
        "num_envs": work.environment.num_envs * work.num_workers,
        "step_s": _step_s(tenant, alone),
    }


def _rows(tenant: TenantSpec, work: RlSpec, alone: Outcome) -> float:
    """Return the rows of one iteration."""
    trained = alone.usage["training"]["samples"][tenant.tenant]
    return trained / work.num_iterations / _ppo(work).num_epochs


def _ppo(work: RlSpec) -> PpoSpec:
    assert isinstance(work.algorithm, PpoSpec), f"trace: algorithm {work.algorithm.type!r}: its calls can't be counted"
    return work.algorithm


def _step_s(tenant: TenantSpec, alone: Outcome) -> float:
    """Return the time between a tenant's requests: mostly that of its simulator, and for what waits for it."""
    acted = alone.usage["inference"]["samples"].get(tenant.tenant, 0)
    return alone.tenants[tenant.tenant].running_s / max(acted, 1)


def _training_calls(tenant: TenantSpec, alone: Outcome) -> int:
    calls = 0
    for work in tenant.workloads:
        if isinstance(work, SftSpec):
            calls += work.num_steps * work.gradient_accumulation
        elif isinstance(work, RlSpec):
            per_epoch = math.ceil(_rows(tenant, work, alone) / _ppo(work).minibatch_size)
            calls += work.num_iterations * _ppo(work).num_epochs * per_epoch
    return calls


def _seconds(outcome: Outcome, engine: str, *kinds: str) -> float:
    """Return the seconds of some kinds of work, of all tenants together."""
    return sum(float(each.get(kind, 0.0)) for each in outcome.usage[engine]["by_kind"].values() for kind in kinds)
