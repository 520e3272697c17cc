"""From the answers of engines and learners to metrics by their full names."""

from collections.abc import Mapping

from joynexus.observability.metrics import KNOWN
from joynexus.types import TrainingResult, WorkloadProgress

_EVALUATION = {
    "episodes": "episodes",
    "errors": "errors",
    "success_rate": "success_once",
    "success_at_end_rate": "success_at_end",
    "mean_return": "return_mean",
    "mean_steps": "episode_steps",
}
"""Numbers of an evaluation that are metrics, with their names there."""


def result_metrics(result: TrainingResult) -> dict[str, float]:
    """Name everything that a training call answered with."""
    named = {f"training/{name}": float(value) for name, value in result.metrics.items()}
    return named | {
        "training/optimizer_steps": float(result.optimizer_steps),
        "training/group_id": float(result.group_id),
        "training/group_tenants": float(result.group_tenants),
        "training/group_samples": float(result.group_samples),
        "training/encoded": float(result.encoded),
        "training/reused": float(result.reused),
        "training/carried": float(result.carried),
        "training/device_seconds": result.device_seconds,
    }


def progress_metrics(progress: WorkloadProgress) -> dict[str, float]:
    """Name everything that a learner tells of itself: under ``rollout/`` what is known there, else ``training/``."""
    named = {_placed(name): float(value) for name, value in progress.metrics.items()}
    named["training/policy_version"] = float(progress.policy_version)
    if progress.kind == "rl":
        named["rollout/dropped_stale"] = float(progress.dropped_stale)
    return named


def evaluation_metrics(summary: Mapping[str, object]) -> dict[str, float]:
    """Name the numbers of an evaluation; those that it does not have are left out."""
    found = {name: summary.get(name) for name in _EVALUATION}
    return {
        f"evaluation/{_EVALUATION[name]}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float)
    }


def _placed(name: str) -> str:
    return f"rollout/{name}" if f"rollout/{name}" in KNOWN else f"training/{name}"
