"""What evaluation reports. A crash of the infrastructure is never a failure of the policy."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from joynexus.types import EpisodeReport


class EvaluationSummary(TypedDict):
    """Numbers of one evaluation; rates and means are over the episodes that did not crash."""

    episodes: int
    """Episodes that ended by themselves or by the time limit."""
    successes: int
    errors: int
    """Episodes that crashed twice."""
    missing: int
    """Episodes that were asked for and never reported."""
    success_rate: float | None
    """Of success at any step; None without a finished episode."""
    success_at_end_rate: float | None
    mean_steps: float | None
    mean_return: float | None
    policy_versions: list[int]
    """Versions that acted; more than one means that the policy changed meanwhile."""
    status: Literal["COMPLETE", "INCOMPLETE"]
    """INCOMPLETE where an episode crashed or is missing: the rate is then over fewer episodes than asked for."""


def summarize(reports: Sequence[EpisodeReport], *, expected: int | None = None) -> EvaluationSummary:
    """Summarise the reports of one evaluation.

    Args:
        reports: One per episode.
        expected: Number of episodes that were asked for; None takes those that are there.
    """
    finished = [report for report in reports if report.status != "crash"]
    errors = len(reports) - len(finished)
    missing = max(0, (len(reports) if expected is None else expected) - len(reports))
    successes = sum(report.success_once for report in finished)
    return EvaluationSummary(
        episodes=len(finished),
        successes=successes,
        errors=errors,
        missing=missing,
        success_rate=_mean([float(report.success_once) for report in finished]),
        success_at_end_rate=_mean([float(report.success_at_end) for report in finished]),
        mean_steps=_mean([float(report.num_steps) for report in finished]),
        mean_return=_mean([report.episode_return for report in finished]),
        policy_versions=sorted({report.policy_version for report in finished}),
        status="INCOMPLETE" if errors or missing else "COMPLETE",
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
