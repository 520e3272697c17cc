"""What a run reports: plain values that a driver collects, that cross processes and that go to ``summary.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

Status = Literal["PENDING", "RUNNING", "COMPLETED", "INCOMPLETE", "FAILED", "STOPPED"]
"""INCOMPLETE: an evaluation in which episodes were lost to simulator faults."""

_SAME = {"success_rate": "success_once", "success_at_end_rate": "success_at_end", "mean_return": "return_mean"}
"""What an evaluation calls its rates, and what a report does."""
_COUNTS = {"sft": "steps", "rl": "iterations", "evaluation": "episodes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadReport:
    """How one workload went."""

    type: str
    """``sft``, ``rl`` or ``evaluation``."""
    status: Status
    count: int = 0
    """Steps (SFT), iterations (RL) or episodes (evaluation) done."""
    loss_first: float | None = None
    loss_last: float | None = None
    success_once: float | None = None
    """Part of the episodes, crashes aside."""
    success_at_end: float | None = None
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else there is to say, as JSON values: ``return_mean``, ``baseline``, ``crashes``, ``report``."""

    def to_json(self) -> dict[str, Any]:
        """Write the fields that this type of workload has, then the details."""
        values: dict[str, Any] = {
            "type": self.type,
            "status": self.status,
            _COUNTS.get(self.type, "count"): self.count,
        }
        optional = ("loss_first", "loss_last", "success_once", "success_at_end", "error")
        values |= {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        return {**values, **{name: value for name, value in self.details.items() if name not in values}}

    @classmethod
    def from_results(
        cls, workload: str, status: Status, results: Mapping[str, Any], *, error: str | None = None
    ) -> "WorkloadReport":
        """Make a report of what a workload's learner or evaluation says of itself.

        Args:
            workload: ``sft``, ``rl`` or ``evaluation``.
            status: How it ended, or that it runs; an evaluation that calls itself incomplete is INCOMPLETE.
            results: Values by plain name; ``baseline`` may hold those of the untrained policy.
            error: Why it failed.
        """
        values = _renamed(results)
        if status == "COMPLETED" and values.pop("status", None) == "INCOMPLETE":
            status = "INCOMPLETE"
        values.pop("status", None)
        if isinstance(values.get("baseline"), Mapping):
            values["baseline"] = _renamed(values["baseline"])
        optional = {"error": error} if error is not None else {}
        return cls.from_json({**values, **optional, "type": workload, "status": status})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "WorkloadReport":
        """Read what ``to_json`` wrote."""
        rest = dict(values)
        count = rest.pop(_COUNTS.get(rest["type"], "count"), 0)
        known = {name: rest.pop(name) for name in cls.__dataclass_fields__ if name in rest and name != "details"}
        return cls(**known, count=count, details=rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantReport:
    """How one tenant's life went."""

    tenant: str
    status: Status
    policy_version: int = 0
    """Newest published."""
    signature: str = ""
    device_seconds: float = 0.0
    """Charged, training and inference together."""
    device_seconds_by_kind: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same seconds by what the device did: see :data:`joynexus.observability.engine_usage.KINDS`."""
    prefixes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """For ``training`` and ``inference``: how many were ``encoded``, ``reused`` and ``carried``."""
    samples: Mapping[str, int] = field(default_factory=dict[str, int])
    """For ``training`` and ``inference``: rows that were trained on, or acted for."""
    workloads: tuple[WorkloadReport, ...] = ()
    error: str | None = None
    """Why it failed: ``ErrorClass: message``."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else there is to say, as JSON values: ``export``, ``folder``."""

    def to_json(self) -> dict[str, Any]:
        """Write everything but the name, which is the key of the entry."""
        values: dict[str, Any] = {
            "status": self.status,
            "policy_version": self.policy_version,
            "signature": self.signature,
            "device_seconds": self.device_seconds,
            "workloads": [each.to_json() for each in self.workloads],
        }
        counted = ("device_seconds_by_kind", "prefixes", "samples")
        values |= {name: getattr(self, name) for name in counted if getattr(self, name)}
        if self.error is not None:
            values["error"] = self.error
        return {**values, **{name: value for name, value in self.details.items() if name not in values}}

    @classmethod
    def from_json(cls, tenant: str, values: Mapping[str, Any]) -> "TenantReport":
        """Read what ``to_json`` wrote."""
        rest = dict(values)
        workloads = tuple(WorkloadReport.from_json(each) for each in rest.pop("workloads", []))
        known = {name: rest.pop(name) for name in cls.__dataclass_fields__ if name in rest and name != "details"}
        return cls(tenant=tenant, **known, workloads=workloads, details=rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """How full the group batches were."""

    count: int = 0
    mean_tenants: float = 0.0
    mean_samples: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Write all fields."""
        return {"count": self.count, "mean_tenants": self.mean_tenants, "mean_samples": self.mean_samples}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTimes:
    """How the engines of one kind spent their time: the trainers, or the replicas."""

    busy_seconds: float = 0.0
    """Of the device: CUDA events on a GPU, CPU time of the engine's threads on a CPU."""
    wall_seconds: float = 0.0
    """For so long their loops were watched, one after the other."""
    capacity_seconds: float = 0.0
    """The same times their cores."""
    idle: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wall seconds by reason."""
    by_kind: Mapping[str, float] = field(default_factory=dict[str, float])
    """Busy seconds by what the device did."""

    @property
    def utilisation(self) -> float | None:
        """Part of the capacity that was used; None where nothing was watched."""
        return self.busy_seconds / self.capacity_seconds if self.capacity_seconds > 0 else None

    def __add__(self, other: "EngineTimes") -> "EngineTimes":
        return EngineTimes(
            busy_seconds=self.busy_seconds + other.busy_seconds,
            wall_seconds=self.wall_seconds + other.wall_seconds,
            capacity_seconds=self.capacity_seconds + other.capacity_seconds,
            idle=_summed(self.idle, other.idle),
            by_kind=_summed(self.by_kind, other.by_kind),
        )

    def to_json(self) -> dict[str, Any]:
        """Write all fields, and the utilisation."""
        return {
            "busy_seconds": self.busy_seconds,
            "wall_seconds": self.wall_seconds,
            "capacity_seconds": self.capacity_seconds,
            "utilisation": self.utilisation,
            "idle": dict(self.idle),
            "by_kind": dict(self.by_kind),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "EngineTimes":
        """Read what ``to_json`` wrote."""
        return cls(**{name: value for name, value in values.items() if name != "utilisation"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceReport:
    """What the service did for all tenants together."""

    backbone: str
    """Name of the resident backbone; several are joined by commas."""
    wall_s: float = 0.0
    backbone_samples: int = 0
    """Prefixes that were really encoded, in training and inference."""
    training_samples: int = 0
    """Samples that were trained on; fewer encoded ones are what the prefix store saved."""
    store_hits: int = 0
    store_misses: int = 0
    training: GroupCounts = GroupCounts()
    inference: GroupCounts = GroupCounts()
    engines: Mapping[str, EngineTimes] = field(default_factory=dict[str, EngineTimes])
    """Of ``training`` and ``inference``."""

    @property
    def idle(self) -> dict[str, float]:
        """Wall seconds of all engines by the reason why they were idle."""
        return _summed(*(each.idle for each in self.engines.values()))

    def to_json(self) -> dict[str, Any]:
        """Write the nested form of ``summary.json``."""
        times = {"idle": self.idle, "engines": {kind: each.to_json() for kind, each in self.engines.items()}}
        return {
            "backbone": self.backbone,
            "wall_s": self.wall_s,
            "backbone_samples": self.backbone_samples,
            "training_samples": self.training_samples,
            "prefix_store": {"hits": self.store_hits, "misses": self.store_misses},
            "group_batches": {"training": self.training.to_json(), "inference": self.inference.to_json()},
            **(times if self.engines else {}),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ServiceReport":
        """Read what ``to_json`` wrote."""
        groups, store = values["group_batches"], values["prefix_store"]
        return cls(
            backbone=values["backbone"],
            wall_s=values["wall_s"],
            backbone_samples=values["backbone_samples"],
            training_samples=values["training_samples"],
            store_hits=store["hits"],
            store_misses=store["misses"],
            training=GroupCounts(**groups["training"]),
            inference=GroupCounts(**groups["inference"]),
            engines={kind: EngineTimes.from_json(each) for kind, each in values.get("engines", {}).items()},
        )


def _summed(*parts: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(each.get(name, 0.0) for each in parts) for name in dict.fromkeys(chain(*parts))}


def _renamed(results: Mapping[str, Any]) -> dict[str, Any]:
    return {_SAME.get(name, name): value for name, value in results.items()}
