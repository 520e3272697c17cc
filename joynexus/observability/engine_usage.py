"""What one engine did, and for whom: device-seconds, prefixes, groups. Counted since the engine was built."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from joynexus.observability.group_log import GroupLog
from joynexus.observability.idle_clock import IdleClock

Kind = Literal["prefix", "head_forward", "backward", "optimizer", "copy", "other"]
KINDS: tuple[Kind, ...] = ("prefix", "head_forward", "backward", "optimizer", "copy", "other")
"""The backbone's forward; a module's loss or act; its gradient; its update; rows checked and named, and features taken
from a store or a call; all else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCount:
    """Rows of one tenant, and where their prefix features came from."""

    samples: int = 0
    """Rows that were trained on, or acted for."""
    encoded: int = 0
    """Prefixes that went through the backbone because of this tenant."""
    reused: int = 0
    """Prefixes that were in the store, or that another row of the group had encoded."""
    carried: int = 0
    """Prefixes whose features came with the rows, or were resident with the tenant's data."""

    def prefixes(self) -> dict[str, int]:
        """Return where features came from, by name."""
        return {"encoded": self.encoded, "reused": self.reused, "carried": self.carried}

    def __add__(self, other: "RowCount") -> "RowCount":
        return RowCount(
            samples=self.samples + other.samples,
            encoded=self.encoded + other.encoded,
            reused=self.reused + other.reused,
            carried=self.carried + other.carried,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUsage:
    """The counts at one moment; tenants that left are still in them. Sums only: groups are asked for apart."""

    device_seconds: Mapping[str, float]
    """Charged to each tenant. They sum to ``busy_seconds``."""
    by_kind: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """The same by tenant and kind: see ``KINDS``. A tenant's kinds sum to its device-seconds."""
    busy_seconds: float
    """CUDA events on a GPU; on a CPU the CPU time of the engine's threads."""
    idle: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wall seconds in which the loop that drives the engine gave it nothing, by reason."""
    wall_seconds: float = 0.0
    """For so long that loop was watched: idle and working."""
    capacity_seconds: float = 0.0
    """``wall_seconds`` times the device's cores (a GPU is one): busy seconds can't be more."""
    samples: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows of each tenant that were trained on, or acted for."""
    prefixes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """By tenant: how many were ``encoded``, ``reused`` and ``carried``; see :class:`RowCount`."""
    latency: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """By tenant: answers by how long their callers waited in the replica; see :mod:`joynexus.observability.latency`."""
    encoded: int
    """Prefixes that went through the backbone."""
    reused: int
    """Prefixes that did not have to."""
    carried: int = 0
    """Prefixes whose features came with their rows."""
    num_groups: int
    mean_tenants: float
    """Tenants of a group."""
    mean_samples: float
    """Samples of a group."""


class EngineLedger:
    """Sums up what an engine's groups cost. Thread-safe."""

    def __init__(self, *, num_cores: int = 1) -> None:
        """Start at nothing.

        Args:
            num_cores: How many seconds of the device fit into one second of the wall clock.
        """
        self._lock = threading.Lock()
        self._num_cores = num_cores
        self._seconds: dict[str, dict[str, float]] = {}
        self._rows: dict[str, RowCount] = {}
        self._tenants = 0
        self.groups = GroupLog()
        self.idle = IdleClock()

    def charge(self, tenant: str, kind: Kind, seconds: float) -> None:
        """Book device time of a tenant."""
        self.charge_all({(tenant, kind): seconds})

    def charge_all(self, charges: Mapping[tuple[str, Kind], float]) -> None:
        """Book device time of several tenants at once."""
        with self._lock:
            for (tenant, kind), seconds in charges.items():
                kinds = self._seconds.setdefault(tenant, {})
                kinds[kind] = kinds.get(kind, 0.0) + seconds

    def record_group(self, rows: Mapping[str, RowCount]) -> None:
        """Book a group: its tenants' rows, and where their features came from."""
        with self._lock:
            for tenant, count in rows.items():
                self._rows[tenant] = self._rows.get(tenant, RowCount()) + count
            self._tenants += len(rows)
            self.groups.append(tenants=len(rows), samples=sum(each.samples for each in rows.values()))

    def work(self, tenant: str) -> tuple[RowCount, float, float]:
        """Return a tenant's rows so far, the seconds of encoding for it, and all its seconds."""
        with self._lock:
            kinds = self._seconds.get(tenant, {})
            return self._rows.get(tenant, RowCount()), kinds.get("prefix", 0.0), sum(kinds.values(), start=0.0)

    def prefix_work(self, tenant: str) -> tuple[float, int]:
        """Return the seconds that encoding for a tenant took so far, and the rows that were encoded."""
        with self._lock:
            seconds = self._seconds.get(tenant, {}).get("prefix", 0.0)
            return seconds, self._rows.get(tenant, RowCount()).encoded

    def usage(self) -> EngineUsage:
        """Return the counts so far."""
        times = self.idle.times()
        with self._lock:
            by_kind = {tenant: dict(kinds) for tenant, kinds in self._seconds.items()}
            seconds = {tenant: sum(kinds.values(), start=0.0) for tenant, kinds in by_kind.items()}
            total = sum(self._rows.values(), RowCount())
            groups = self.groups.next_ordinal
            return EngineUsage(
                device_seconds=seconds,
                by_kind=by_kind,
                busy_seconds=sum(seconds.values(), start=0.0),
                idle={str(reason): seconds for reason, seconds in times.idle.items()},
                wall_seconds=times.wall_seconds,
                capacity_seconds=times.wall_seconds * self._num_cores,
                samples={tenant: each.samples for tenant, each in self._rows.items()},
                prefixes={tenant: each.prefixes() for tenant, each in self._rows.items()},
                encoded=total.encoded,
                reused=total.reused,
                carried=total.carried,
                num_groups=groups,
                mean_tenants=self._tenants / max(groups, 1),
                mean_samples=total.samples / max(groups, 1),
            )
