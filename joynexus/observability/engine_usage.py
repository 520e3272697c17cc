"""What one engine did, and for whom: device-seconds, prefixes, groups. Counted since the engine was built."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MAX_GROUPS = 2048
"""Groups that are kept for the plot; beyond it every second one is left out, and so on."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group that went through the backbone together."""

    time_s: float
    """Unix time at its end."""
    tenants: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUsage:
    """The counts at one moment; tenants that left are still in them."""

    device_seconds: Mapping[str, float]
    """Charged to each tenant. They sum to ``busy_seconds``."""
    busy_seconds: float
    encoded: int
    """Prefixes that went through the backbone."""
    reused: int
    """Prefixes that did not have to."""
    num_groups: int
    mean_tenants: float
    """Tenants of a group."""
    mean_samples: float
    """Samples of a group."""
    groups: tuple[GroupRecord, ...]
    """From the first to the newest; evenly thinned out where there were more than can be kept."""


def device_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that tells how long a device has been busy.

    Args:
        device: Of the backbone.

    Returns:
        On a CPU the time of the calling thread, which other threads and processes can't inflate; elsewhere wall time
        at a point where the device has done all that it was given.
    """
    if device.type == "cpu":
        return time.thread_time

    def synchronised() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return synchronised


class EngineLedger:
    """Sums up what an engine's groups cost. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._busy = 0.0
        self._sums: Counter[str] = Counter()
        self._groups: list[GroupRecord] = []
        self._stride = 1

    def charge(self, seconds: Mapping[str, float], busy: float) -> None:
        """Book a group's time; what no tenant caused alone is split evenly among them.

        Args:
            seconds: Caused by each tenant of the group; without one nothing is booked.
            busy: Of the whole group.
        """
        rest = max(busy - sum(seconds.values()), 0.0) / max(len(seconds), 1)
        with self._lock:
            for tenant, own in seconds.items():
                self._seconds[tenant] = self._seconds.get(tenant, 0.0) + own + rest
                self._busy += own + rest

    def record_group(self, *, tenants: int, samples: int, encoded: int, reused: int) -> None:
        """Book a group's size."""
        with self._lock:
            sums = self._sums
            if sums["groups"] % self._stride == 0:
                self._groups.append(GroupRecord(time_s=time.time(), tenants=tenants, samples=samples))
            if len(self._groups) > MAX_GROUPS:
                self._groups, self._stride = self._groups[::2], 2 * self._stride
            sums.update(encoded=encoded, reused=reused, groups=1, tenants=tenants, samples=samples)

    def usage(self) -> EngineUsage:
        """Return the counts so far."""
        with self._lock:
            sums = self._sums
            groups = max(sums["groups"], 1)
            return EngineUsage(
                device_seconds=dict(self._seconds),
                busy_seconds=self._busy,
                encoded=sums["encoded"],
                reused=sums["reused"],
                num_groups=sums["groups"],
                mean_tenants=sums["tenants"] / groups,
                mean_samples=sums["samples"] / groups,
                groups=tuple(self._groups),
            )
