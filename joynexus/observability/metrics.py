"""Every metric that joynexus itself writes: ``area/name``, with its unit and what it means.

``docs/metrics.md`` explains them to users; a test holds the two lists together. Plugins may write further ones, under
any area.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_.-]*)+")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """``area/name``; counts since the start end in no unit, times in ``_s``, sizes in ``_bytes``."""
    unit: str
    """``1`` for a plain number or a fraction."""
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("training/loss", "1", "Loss of the newest micro-batch, mean over its rows"),
    Metric("training/unweighted_loss", "1", "Loss `weighted`: the same before the weights"),
    Metric("training/rows", "rows", "Rows of the newest micro-batch that entered the loss"),
    Metric("training/grad_norm", "1", "2-norm of the tenant's whole gradient before clipping"),
    Metric("training/lr", "1", "Learning rate of the newest optimizer step"),
    Metric("training/optimizer_steps", "steps", "Optimizer steps applied to the slot so far"),
    Metric("training/policy_version", "version", "Newest published policy version"),
    Metric("training/group_id", "id", "Group step that served the call; equal ids shared a step"),
    Metric("training/group_tenants", "tenants", "Tenants in that group step"),
    Metric("training/group_samples", "samples", "Samples of all tenants in that group step"),
    Metric("training/encoded", "prefixes", "Prefixes that the call caused to be encoded by the backbone"),
    Metric("training/reused", "prefixes", "Prefixes that the call found in the prefix store"),
    Metric("training/device_seconds", "s", "Device time charged to the tenant for the call"),
    Metric("training/policy_loss", "1", "PPO: clipped surrogate, mean over decisions"),
    Metric("training/value_loss", "1", "PPO: half the squared error of the critic"),
    Metric("training/entropy", "nat", "PPO: entropy of a whole action chunk"),
    Metric("training/kl", "nat", "PPO: estimate of KL(old, new) over a whole action chunk"),
    Metric("training/clip_fraction", "1", "PPO: part of the decisions whose ratio was clipped"),
    Metric("training/skipped_updates", "updates", "RL: iterations whose data gave no gradient"),
    Metric("rollout/episodes", "episodes", "RL: episodes that the iteration learnt from"),
    Metric("rollout/decisions", "decisions", "RL: action chunks of those episodes"),
    Metric("rollout/return_mean", "reward", "RL: mean undiscounted return of those episodes"),
    Metric("rollout/success_once", "1", "RL: part of them in which the task was solved at some step"),
    Metric("rollout/success_at_end", "1", "RL: part of them that ended solved"),
    Metric("rollout/episode_steps", "steps", "RL: mean environment steps of those episodes"),
    Metric("rollout/staleness", "versions", "RL: mean of trainer's version less sampling version"),
    Metric("rollout/dropped_stale", "trajectories", "RL: dropped so far for being too old"),
    Metric("rollout/crashes", "episodes", "Episodes lost so far to simulator faults; never counted as failures"),
    Metric("evaluation/episodes", "episodes", "Episodes with an outcome, crashes aside"),
    Metric("evaluation/success_once", "1", "Part of them in which the task was solved at some step"),
    Metric("evaluation/success_at_end", "1", "Part of them that ended solved"),
    Metric("evaluation/return_mean", "reward", "Mean undiscounted return of those episodes"),
    Metric("evaluation/crashes", "episodes", "Episodes lost to simulator faults, after one more try"),
    Metric("queue/waiting", "items", "Items in the tenant's lane"),
    Metric("queue/waiting_bytes", "B", "Bytes in the tenant's lane"),
    Metric("queue/in_flight", "items", "Leased and not yet acknowledged"),
    Metric("inference/batches", "batches", "Forwards of a replica so far"),
    Metric("inference/batch_tenants", "tenants", "Mean tenants of a batch"),
    Metric("inference/batch_rows", "rows", "Mean rows of a batch"),
    Metric("inference/wait_s", "s", "Mean time from a request to its forward"),
    Metric("prefix_store/hits", "prefixes", "Found in the store so far"),
    Metric("prefix_store/misses", "prefixes", "Not found, and encoded, so far"),
    Metric("prefix_store/size_bytes", "B", "Features that the store holds"),
    Metric("usage/device_seconds", "s", "Charged to the tenant so far, training and inference together"),
    Metric("health/restarts", "restarts", "Roles of the tenant that were made anew so far"),
    Metric("environment/workers", "workers", "EnvironmentActors of the tenant"),
)

KNOWN: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
"""By name."""


def named(area: str, values: Mapping[str, float], *, only: Iterable[str] | None = None) -> dict[str, float]:
    """Put plain names under an area: ``loss`` becomes ``training/loss``.

    Args:
        area: First part of the names.
        values: Values by plain name.
        only: Names to keep; None keeps all.

    Raises:
        ValueError: If a name has characters that file names and labels can't have.
    """
    kept = set(values if only is None else only)
    result = {f"{area}/{name}": value for name, value in values.items() if name in kept}
    for name in result:
        check_name(name)
    return result


def check_name(name: str) -> None:
    """Refuse a metric name that is not of the form ``area/name``.

    Raises:
        ValueError: If it is not.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"metric {name!r}: not of the form area/name, in lower-case letters, digits and '_'. Rename it."
        )
