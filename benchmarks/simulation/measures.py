"""Numbers that stand for many: percentiles and Jain's index."""

from collections.abc import Sequence


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least ``fraction`` of all are not above; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-fraction * len(ordered) // 1) - 1))]


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 where all have the same, 1/n where one has everything.

    Jain, Chiu and Hawe 1984, https://arxiv.org/abs/cs/9809099.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
