"""Every metric that joynexus itself writes: ``area/name``, with its unit and what it means.

``docs/metrics.md`` explains them to users; a test holds the two lists together. Plugins may write further ones, under
any area.
"""

import re
from collections.abc import Mapping
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
    Metric("training/loss", "1", "Loss of the call, mean over its rows; RL: of all minibatches of the iteration"),
    Metric("training/unweighted_loss", "1", "Loss `weighted`: the same before the weights"),
    Metric("training/rows", "rows", "Rows of the call that entered the loss"),
    Metric("training/accumulated_rows", "rows", "Rows whose gradient the optimizer step applied"),
    Metric("training/skipped", "1", "1 where no row counted, so that the optimizer step was not made"),
    Metric("training/grad_norm", "1", "2-norm of the tenant's whole gradient, before clipping"),
    Metric("training/lr", "1", "Learning rate of the optimizer step"),
    Metric("training/optimizer_steps", "steps", "Optimizer steps of the tenant so far"),
    Metric("training/iteration", "iterations", "RL: updates finished so far"),
    Metric("training/policy_version", "version", "Newest policy version of the tenant"),
    Metric("training/group_id", "id", "Group step that served the call; calls of one id were served together"),
    Metric("training/group_tenants", "tenants", "Tenants in that group step"),
    Metric("training/group_samples", "samples", "Samples of all tenants in that group step"),
    Metric("training/encoded", "prefixes", "Prefixes that the call caused to be encoded by the backbone"),
    Metric("training/reused", "prefixes", "Prefixes that the call found in the prefix store"),
    Metric("training/carried", "prefixes", "Prefixes whose features came with the call, so that none was encoded"),
    Metric("training/light_items", "items", "SFT: items that came without frames, since the trainer began"),
    Metric("training/fetched_items", "items", "SFT: of those, the ones that were fetched in full after all"),
    Metric("training/saved_bytes", "bytes", "SFT: frames that were neither read nor sent, in bytes"),
    Metric("training/device_seconds", "s", "Device time charged to the tenant for the call"),
    Metric("training/policy_loss", "1", "PPO: clipped surrogate, mean over decisions"),
    Metric("training/value_loss", "1", "PPO: half the squared error of the critic"),
    Metric("training/entropy", "nat", "PPO: entropy of a whole action chunk"),
    Metric("training/kl", "nat", "PPO: estimate of KL(old, new) over a whole action chunk"),
    Metric("training/clip_fraction", "1", "PPO: part of the decisions whose ratio was clipped"),
    Metric(
        "training/explained_variance", "1", "PPO: 1 is a critic that predicts every return, 0 one that knows nothing"
    ),
    Metric("rollout/decisions", "decisions", "RL: action chunks that the iteration learnt from"),
    Metric("rollout/return_mean", "reward", "RL: mean undiscounted return of its episodes"),
    Metric("rollout/success_once", "1", "RL: part of its episodes in which the task was solved at some step"),
    Metric("rollout/success_at_end", "1", "RL: part of its episodes that ended solved"),
    Metric("rollout/episode_steps", "steps", "RL: mean environment steps of its episodes"),
    Metric("rollout/staleness", "versions", "RL: mean of the trainer's version less the sampling version"),
    Metric("rollout/features_shipped", "1", "RL: part of its decisions that brought their prefix features along"),
    Metric("rollout/decision_bytes", "bytes", "RL: mean size of a decision in the lane, features or frames included"),
    Metric("rollout/dropped_stale", "trajectories", "RL: dropped so far for being too old"),
    Metric("rollout/dropped_invalid", "trajectories", "RL: dropped so far for NaN or infinity from the simulator"),
    Metric("evaluation/episodes", "episodes", "Episodes with an outcome, crashes aside"),
    Metric("evaluation/success_once", "1", "Part of them in which the task was solved at some step"),
    Metric("evaluation/success_at_end", "1", "Part of them that ended solved"),
    Metric("evaluation/return_mean", "reward", "Mean undiscounted return of those episodes"),
    Metric("evaluation/episode_steps", "steps", "Mean environment steps of those episodes"),
    Metric("evaluation/errors", "episodes", "Episodes lost to simulator faults; never counted as failures"),
)

KNOWN: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
"""By name."""


def check_name(name: str) -> None:
    """Refuse a metric name that is not of the form ``area/name``.

    Raises:
        ValueError: If it is not.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"metric {name!r}: not of the form area/name, in lower-case letters, digits and '_'. Rename it."
        )
