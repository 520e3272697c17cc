"""How many environment workers a tenant should have now. Pure: the caller measures, and brings the clock.

The lane between workers and trainer tells which side is slower: empty with a hungry trainer, and workers are too few;
full for a while, and they are too many. One worker at a time, with a rest in between, so that a change shows its
effect before the next one: a worker takes seconds to start.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRule:
    """When to grow and when to shrink."""

    low_fill: float = 0.25
    """A lane filled less than this may be starving; fraction of its capacity."""
    high_fill: float = 0.9
    """A lane filled at least this much holds its workers back."""
    grow_after_s: float = 2.0
    """Hunger of the trainer before a worker is added."""
    shrink_after_s: float = 30.0
    """How long the lane has to stay full before a worker is taken away."""
    rest_s: float = 10.0
    """Between two changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLoad:
    """What is measured of one tenant."""

    workers: int
    """Workers that run or are being started."""
    lane_depth: int
    """Items that wait."""
    lane_capacity: int
    trainer_hungry_s: float
    """How long the trainer has waited for this tenant's data; 0 while it computes."""
    lane_full_s: float
    """How long the lane has been filled to ``high_fill``; 0 if it is not."""
    since_change_s: float
    """Since the number of workers was last changed."""


def desired_workers(load: RolloutLoad, *, minimum: int, maximum: int, rule: ScalingRule | None = None) -> int:
    """Decide how many workers there should be.

    Args:
        load: The measurements.
        minimum: Workers that are always kept; fewer are topped up at once.
        maximum: Workers at most; more are taken away at once.
        rule: Thresholds; None takes the defaults.

    Returns:
        The number, at most one away from the present one unless that is out of bounds.
    """
    rule = rule or ScalingRule()
    bounded = max(minimum, min(maximum, load.workers))
    if bounded != load.workers or load.since_change_s < rule.rest_s:
        return bounded
    fill = load.lane_depth / max(1, load.lane_capacity)
    if fill < rule.low_fill and load.trainer_hungry_s >= rule.grow_after_s:
        return min(maximum, load.workers + 1)
    if fill >= rule.high_fill and load.lane_full_s >= rule.shrink_after_s:
        return max(minimum, load.workers - 1)
    return load.workers
