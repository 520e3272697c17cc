"""What the engine did, and for whom: device-seconds, prefixes, groups."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

MAX_GROUPS = 2048
"""Groups that are kept for the plot; beyond it every second one is left out, and so on."""


class GroupRecord(NamedTuple):
    """One group step with batch work."""

    time_s: float
    """Unix time at its end."""
    tenants: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUsage:
    """Counts since the engine was built; tenants that left are still in it."""

    device_seconds: Mapping[str, float]
    """Charged to each tenant. They sum to ``busy_seconds``."""
    busy_seconds: float
    """Of group steps."""
    encoded: int
    """Prefixes that went through the backbone."""
    reused: int
    """Prefixes that did not have to."""
    num_groups: int
    """Group steps that carried batch work."""
    mean_tenants: float
    """Tenants of such a group."""
    mean_samples: float
    """Samples of such a group."""
    groups: tuple[GroupRecord, ...]
    """Groups from the first to the newest; evenly thinned out where there were more than can be kept."""


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


class UsageLedger:
    """Sums up what group steps report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._busy = 0.0
        self._encoded = 0
        self._reused = 0
        self._num_groups = 0
        self._sum_tenants = 0
        self._sum_samples = 0
        self._groups: list[GroupRecord] = []
        self._stride = 1

    def charge(self, seconds: Mapping[str, float], busy: float) -> None:
        """Book a step's time; what no tenant caused alone is split evenly among them.

        Args:
            seconds: Caused by each tenant of the step.
            busy: Of the whole step.
        """
        rest = max(busy - sum(seconds.values()), 0.0) / max(len(seconds), 1)
        with self._lock:
            for tenant, own in seconds.items():
                self._seconds[tenant] = self._seconds.get(tenant, 0.0) + own + rest
            self._busy += busy if seconds else 0.0

    def record_group(self, *, tenants: int, samples: int, encoded: int, reused: int) -> None:
        """Book a group with batch work."""
        with self._lock:
            self._encoded += encoded
            self._reused += reused
            if self._num_groups % self._stride == 0:
                self._groups.append(GroupRecord(time_s=time.time(), tenants=tenants, samples=samples))
            if len(self._groups) > MAX_GROUPS:
                self._groups, self._stride = self._groups[::2], 2 * self._stride
            self._num_groups += 1
            self._sum_tenants += tenants
            self._sum_samples += samples

    def usage(self) -> EngineUsage:
        """Return the sums so far."""
        with self._lock:
            groups = max(self._num_groups, 1)
            return EngineUsage(
                device_seconds=dict(self._seconds),
                busy_seconds=self._busy,
                encoded=self._encoded,
                reused=self._reused,
                num_groups=self._num_groups,
                mean_tenants=self._sum_tenants / groups,
                mean_samples=self._sum_samples / groups,
                groups=tuple(self._groups),
            )
