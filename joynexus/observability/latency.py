"""How long callers wait for their answers: histograms that several processes' can be added up to.

Buckets grow by a tenth, so that a quantile is right within 5 %, in a few dozen numbers whatever the count.
"""

import math
from collections.abc import Mapping

LEAST_S = 1e-4
"""Upper end of the first bucket."""
GROWTH = 1.1
Buckets = Mapping[str, int]
"""Answers by bucket; bucket ``i`` ends at ``LEAST_S * GROWTH ** i`` seconds. Names, so that it is plain JSON."""


class LatencyBook:
    """Latencies by tenant, since the process began. One thread."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def note(self, tenant: str, seconds: float) -> None:
        """Count one answer."""
        counts = self._counts.setdefault(tenant, {})
        name = bucket(seconds)
        counts[name] = counts.get(name, 0) + 1

    def counts(self) -> dict[str, dict[str, int]]:
        """Return a copy of all counts, by tenant."""
        return {tenant: dict(each) for tenant, each in self._counts.items()}


def bucket(seconds: float) -> str:
    """Return the bucket of a latency."""
    return str(max(math.ceil(math.log(max(seconds, LEAST_S) / LEAST_S, GROWTH) - 1e-9), 0))


def quantile_ms(counts: Buckets, share: float) -> float | None:
    """Return a quantile in milliseconds, right within 5 %; None if nothing was counted.

    Args:
        counts: Of one tenant.
        share: 0.5 for the median, 0.99 for the 99th percentile.
    """
    total = sum(counts.values())
    seen = 0
    for name in sorted(counts, key=int):
        seen += counts[name]
        if total and seen >= share * total:
            return 1000 * LEAST_S * GROWTH ** (int(name) - 0.5)
    return None
