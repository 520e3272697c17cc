"""Running a trace in one way: all tenants at once, or one after the other, sharing forwards or each with its own.

All ways run on one service, one after the other; when a tenant ends, its features leave the store.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.numpy

from joynexus.actors.records import ENDED
from joynexus.api import Service
from joynexus.observability.usage_counts import usage_growth
from joynexus.specs.tenant import TenantSpec
from joynexus.types import Array

POLL_S = 0.2
Usage = Mapping[str, Mapping[str, Any]]
"""A service's own account, by backbone and engine."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the trace."""

    name: str
    at_once: bool
    """All tenants at the same time, so that the cores are as busy; else one after the other."""
    reuses: bool = True
    """Whether prefix features are kept, shipped with trajectories and taken in place of frames."""
    groups: bool = True
    """Whether samples of several tenants may share a forward. Without, each tenant has a schema signature of its own,
    so that nothing of one's work serves another: each takes the device as long as it would alone."""
    ships: bool = True
    """Whether trajectories may bring their features."""

    def tenant(self, spec: TenantSpec, index: int) -> TenantSpec:
        """Return a tenant as it runs in this way.

        Args:
            spec: As it is when all is shared.
            index: Its place in the trace. Each but the first gets a prompt of its own, of as many tokens with their
                padding; the first keeps its prompt, so that its features, losses and parameters can be compared.
        """
        found = spec.model_dump(mode="json")
        found["policy"]["reuse_prefixes"] = self.reuses
        if not self.groups:
            found["policy"]["observation"]["prompt_template"] += "." * index
        for workload in found["workloads"]:
            if workload["type"] == "rl" and not self.ships:
                workload["rollout"]["ship_features"] = "never"
        return TenantSpec.model_validate(found)


SHARED = Way(name="shared", at_once=True)
ALONE = Way(name="isolated-with-our-reuse", at_once=True, groups=False)
CONVENTIONAL = Way(name="isolated-conventional", at_once=True, groups=False, reuses=False)
IN_TURN = Way(name="isolated-in-turn", at_once=False, groups=False)
"""As ``ALONE``, but one tenant after the other: for wall times."""
WITHOUT = (
    Way(name="shared-without-reuse", at_once=True, reuses=False),
    Way(name="shared-without-shipping", at_once=True, ships=False),
)
"""The product with one mechanism switched off; without groups it is ``ALONE``."""


@dataclass(frozen=True, kw_only=True)
class TenantOutcome:
    """What came of one tenant."""

    name: str
    wall_s: float
    """From its submission to its end."""
    running_s: float
    """Of it, from the moment when its simulators and its slot were ready."""
    losses: tuple[float, float] | None
    """First and last of its fine-tuning."""
    module: Mapping[str, Array]
    """Its exported parameters."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one way."""

    way: Way
    makespan_s: float
    """From the first submission to the last end."""
    usage: Mapping[str, Any]
    """The service's own account of its one backbone: ``training`` and ``inference``."""
    tenants: Mapping[str, TenantOutcome]

    @property
    def busy_s(self) -> float:
        """Seconds for which the engines were busy, all together."""
        return sum(float(engine["busy_seconds"]) for engine in self.usage.values())

    def busy_of(self, tenant: str) -> float:
        """Seconds charged to one tenant."""
        return sum(float(engine["device_seconds"].get(tenant, 0.0)) for engine in self.usage.values())

    @property
    def encoded(self) -> int:
        """Prefixes that went through the backbone."""
        return sum(int(engine["encoded"]) for engine in self.usage.values())


def run(way: Way, service: Service, tenants: Sequence[TenantSpec], told: Usage) -> tuple[Outcome, Usage]:
    """Run the trace on a service on which nothing else runs.

    Args:
        way: How.
        service: Where.
        tenants: As they are when all is shared.
        told: What the service has done before.

    Returns:
        What came of it, and what the service has done now.
    """
    began = time.monotonic()
    found: dict[str, TenantOutcome] = {}
    specs = [way.tenant(each, index) for index, each in enumerate(tenants)]
    for batch in [specs] if way.at_once else [[each] for each in specs]:
        found |= _run_batch(service, batch)
    makespan = time.monotonic() - began
    now: Usage = service.usage(fresh=True)
    ((name, after),) = now.items()
    usage = {engine: usage_growth([told[name][engine]], [counts]) for engine, counts in after.items()}
    return Outcome(way=way, makespan_s=makespan, usage=usage, tenants=found), now


def _run_batch(service: Service, tenants: Sequence[TenantSpec]) -> dict[str, TenantOutcome]:
    began = {each.tenant: time.monotonic() for each in tenants if service.submit(each)}
    running: dict[str, float] = {}
    ended: dict[str, float] = {}
    statuses: Mapping[str, Mapping[str, Any]] = {}
    while len(ended) < len(began):
        time.sleep(POLL_S)
        statuses, now = service.status(), time.monotonic()
        for name in began:
            if statuses[name]["status"] != "PENDING":
                running.setdefault(name, now)
            if statuses[name]["status"] in ENDED:
                ended.setdefault(name, now)
    failed = {name: statuses[name]["reason"] for name in began if statuses[name]["status"] != "COMPLETED"}
    if failed:
        raise RuntimeError(f"trace: tenants failed: {failed}")
    return {
        name: _outcome(name, statuses[name], wall_s=end - began[name], running_s=end - running[name])
        for name, end in ended.items()
    }


def _outcome(name: str, status: Mapping[str, Any], *, wall_s: float, running_s: float) -> TenantOutcome:
    results = [each["results"] for each in status["workloads"] if each["type"] == "sft"]
    losses = (float(results[0]["loss_first"]), float(results[0]["loss_last"])) if results else None
    module = cast("Any", safetensors.numpy).load_file(Path(status["folder"]) / "export" / "module.safetensors")
    return TenantOutcome(name=name, wall_s=wall_s, running_s=running_s, losses=losses, module=module)


def largest_difference(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return the largest difference between two modules' parameters; 0 if they are equal bit by bit."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1/n if one has everything.

    Reference:
        Jain, Chiu and Hawe 1984, DEC-TR-301.
    """
    return sum(values) ** 2 / (len(values) * sum(each**2 for each in values))
