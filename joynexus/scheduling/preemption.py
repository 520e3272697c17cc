"""When a batch that runs is interrupted for requests of others. Pure: no clock, no torch.

A tenant that keeps more requests waiting than a batch takes, a flood, keeps the device busy all the time. Whoever else
comes finds a forward running that has just begun, or is half through, and waits for it: on average for half of it,
though fairness then puts its request first. Without the flood it would have found the device free.

So a batch of nothing but floods gives way. At the next pause between two layers the engine puts it aside, runs the
requests of those who are owed more, and goes on. A batch that others are in goes through: without the flood the device
would be busy with them as well. Nobody gains a larger share by it: who interrupts pays for a whole forward, and
interrupts no more once it has had what is due to it.

An interruption is a forward that the flood does not share, so it has a price. Where tenants without a flood need a part
``p`` of the device, who comes finds it busy with that probability, and the 95th percentile of its latency is already
``2 - 0.05 / p`` forwards. A flood whose batches fairness keeps short (``STRETCH`` of the batcher) makes that about 2.3
forwards: from :data:`CROWD` on less than half as much again. So nobody interrupts there.
"""

import math

LEAST_GAIN = 0.1
"""Part of its own forward that a request must save by interrupting: less is not worth a forward that nobody shares."""
CROWD = 0.25
"""Part of the device that the other tenants without a flood need, from which on a tenant does not interrupt."""
MEMORY_S = 2.0
"""Time over which that part is averaged."""
LONGEST_WAIT = 0.25
"""Part of a forward of one row that a request may have to wait for a pause of a flood's batch. A longer batch has its
pauses further apart."""
_NEWEST = 0.3
"""Weight of the newest measurement in a moving mean."""
_LONGEST_GROWTH = 20.0
"""Memories after which numbers are made small again."""
_NOTHING_S = 1e-9


def is_worth_it(remaining_s: float, own_s: float) -> bool:
    """Tell whether a request gains enough by interrupting a batch.

    Args:
        remaining_s: Seconds that the batch still takes.
        own_s: Seconds of the request's own forward.
    """
    return remaining_s > LEAST_GAIN * own_s


class Pauses:
    """How far apart an engine's pauses are."""

    def __init__(self) -> None:
        self.longest = 1.0
        """Part of a run that lies between two pauses, at most; 1 where it has none, or none is known."""

    def measured(self, longest_s: float, run_s: float) -> None:
        """Learn from a run and its longest time between two pauses, its beginning and its end."""
        if run_s <= 0.0:
            return  # the clock has not moved
        latest = min(longest_s / run_s, 1.0)
        self.longest = latest if self.longest == 1.0 else (1.0 - _NEWEST) * self.longest + _NEWEST * latest

    def longest_flood(self, one_s: float) -> float:
        """Return how many seconds a flood's batch may take where a forward of one row takes ``one_s``."""
        return LONGEST_WAIT * one_s / self.longest


class Need:
    """Which part of the device tenants without a flood would need by themselves: a mean that fades.

    What is booked later is booked larger, which is the same as if all that was booked before had faded.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._total = 0.0
        self._origin = 0.0
        """When a second counts as one."""

    def note(self, tenant: str, seconds: float, now: float) -> None:
        """Book the device-seconds that a tenant's requests would have cost without the flood beside them."""
        if now - self._origin > _LONGEST_GROWTH * MEMORY_S:
            self._rebase(now)
        grown = seconds * math.exp((now - self._origin) / MEMORY_S)
        self._seconds[tenant] = self._seconds.get(tenant, 0.0) + grown
        self._total += grown

    def of_all(self, now: float) -> float:
        """Return the part of the device, from 0 on, that all of them need."""
        return self._part(self._total, now)

    def of_others(self, tenant: str, now: float) -> float:
        """Return the part that all but this tenant need."""
        return self._part(self._total - self._seconds.get(tenant, 0.0), now)

    def forget(self, tenant: str) -> None:
        """Drop a tenant; unknown ones are ignored."""
        self._total -= self._seconds.pop(tenant, 0.0)

    def _part(self, grown: float, now: float) -> float:
        return max(grown, 0.0) * math.exp((self._origin - now) / MEMORY_S) / MEMORY_S

    def _rebase(self, now: float) -> None:
        """Let a second count as one again, and forget what has faded away."""
        faded, self._origin = math.exp((self._origin - now) / MEMORY_S), now
        kept = {tenant: seconds * faded for tenant, seconds in self._seconds.items()}
        self._seconds = {tenant: seconds for tenant, seconds in kept.items() if seconds > _NOTHING_S}
        self._total = sum(self._seconds.values())
