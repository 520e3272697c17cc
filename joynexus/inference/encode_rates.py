"""What encoding one row costs on this replica, for the rollouts that weigh it against shipping features."""

from collections.abc import Callable
from dataclasses import dataclass

WINDOW_ROWS = 32
"""Rows over which one mean is taken; the next one is averaged with those before."""


@dataclass(slots=True)
class _Window:
    """A tenant's mean, and where the present window began."""

    since_seconds: float = 0.0
    since_rows: int = 0
    mean: float = 0.0


class EncodeRates:
    """Moving mean of the device seconds per encoded row, by tenant: each sees prefixes of its own length."""

    def __init__(self, work: Callable[[str], tuple[float, int]]) -> None:
        """Start without a mean.

        Args:
            work: Tells of a tenant how many seconds were spent so far on encoding for it, and how many rows that were.
        """
        self._work = work
        self._windows: dict[str, _Window] = {}

    def seconds_per_row(self, tenant: str) -> float:
        """Return the mean; 0 where nothing was encoded for the tenant yet.

        Seconds are known a moment after their rows, which a window evens out; what the first rows took to warm up
        soon weighs little.
        """
        seconds, rows = self._work(tenant)
        window = self._windows.setdefault(tenant, _Window())
        new_rows = rows - window.since_rows
        if new_rows <= 0:
            return window.mean
        fresh = max(seconds - window.since_seconds, 0.0) / new_rows
        if new_rows < WINDOW_ROWS:
            return window.mean or fresh
        mean = (window.mean + fresh) / 2 if window.mean else fresh
        self._windows[tenant] = _Window(seconds, rows, mean)
        return mean

    def forget(self, tenant: str) -> None:
        """Drop a tenant's mean."""
        self._windows.pop(tenant, None)
