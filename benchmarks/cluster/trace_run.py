"""Running a trace in one way: all tenants at once on one service, or one after the other, each alone."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import safetensors.numpy
from ray import serve

import joynexus
from benchmarks.cluster.trace_tenants import NO_STORE
from joynexus.actors import cluster
from joynexus.actors.records import ENDED
from joynexus.api import Service
from joynexus.observability.usage_counts import usage_growth
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec
from joynexus.types import Array

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the trace."""

    name: str
    at_once: bool
    """All tenants at the same time, so that the cores are as busy; else one after the other."""
    reuses: bool = True
    """Whether prefix features are kept, shipped with trajectories and taken in place of frames."""
    groups: bool = True
    """Whether samples of several tenants may share a forward. Without, nothing of one tenant's work serves another:
    each takes the device as long as it would alone."""
    ships: bool = True
    """Whether trajectories may bring their features."""

    def service(self, spec: ServiceSpec) -> ServiceSpec:
        """Return the service that runs it."""
        training, inference = spec.training, spec.inference
        if not self.reuses:
            training = training.model_copy(update={"prefix_store": NO_STORE, "light_epochs": False})
        if not self.groups:
            training = training.model_copy(update={"max_group_samples": 1})
            inference = inference.model_copy(update={"max_batch_size": 1})
        changes = {"service": self.name, "training": training, "inference": inference}
        return ServiceSpec.model_validate(spec.model_copy(update=changes).model_dump())

    def tenant(self, spec: TenantSpec) -> TenantSpec:
        """Return a tenant as it runs in this way."""
        if self.reuses and self.ships:
            return spec
        found = spec.model_dump(mode="json")
        for workload in found["workloads"]:
            if workload["type"] == "rl":
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


def start(way: Way, spec: ServiceSpec, folder: Path) -> Service:
    """Start a service for a way on the running Ray."""
    return joynexus.start(way.service(spec), root=folder / way.name)


@contextmanager
def serving(way: Way, spec: ServiceSpec, folder: Path) -> Generator[Service]:
    """Start a service, and end it."""
    try:
        yield start(way, spec, folder)
    finally:
        cluster.stop_service(way.name)


def run(way: Way, service: Service, tenants: Sequence[TenantSpec]) -> Outcome:
    """Run the trace on a service on which nothing else runs."""
    before = service.usage(fresh=True)
    began = time.monotonic()
    found: dict[str, TenantOutcome] = {}
    for batch in [tenants] if way.at_once else [[each] for each in tenants]:
        found |= _run_batch(service, [way.tenant(each) for each in batch])
    makespan = time.monotonic() - began
    ((name, after),) = service.usage(fresh=True).items()
    usage = {engine: usage_growth([before[name][engine]], [counts]) for engine, counts in after.items()}
    return Outcome(way=way, makespan_s=makespan, usage=usage, tenants=found)


def _run_batch(service: Service, tenants: Sequence[TenantSpec]) -> dict[str, TenantOutcome]:
    began = {each.tenant: time.monotonic() for each in tenants if service.submit(each)}
    ended: dict[str, float] = {}
    statuses: Mapping[str, Mapping[str, Any]] = {}
    while len(ended) < len(began):
        time.sleep(POLL_S)
        statuses = service.status()
        for name in began:
            if name not in ended and statuses[name]["status"] in ENDED:
                ended[name] = time.monotonic()
    failed = {name: statuses[name]["reason"] for name in began if statuses[name]["status"] != "COMPLETED"}
    if failed:
        raise RuntimeError(f"trace: tenants failed: {failed}")
    return {name: _outcome(name, statuses[name], ended[name] - began[name]) for name in began}


def _outcome(name: str, status: Mapping[str, Any], wall_s: float) -> TenantOutcome:
    results = [each["results"] for each in status["workloads"] if each["type"] == "sft"]
    losses = (float(results[0]["loss_first"]), float(results[0]["loss_last"])) if results else None
    module = cast("Any", safetensors.numpy).load_file(Path(status["folder"]) / "export" / "module.safetensors")
    return TenantOutcome(name=name, wall_s=wall_s, losses=losses, module=module)


def largest_difference(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return the largest difference between two modules' parameters; 0 if they are equal bit by bit."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1/n if one has everything.

    Reference:
        Jain, Chiu and Hawe 1984, DEC-TR-301.
    """
    return sum(values) ** 2 / (len(values) * sum(each**2 for each in values))


def start_ray() -> None:
    """Start a Ray of this process's own, and Serve on it, for services that may be started side by side."""
    cluster.start_local_ray(service="trace", num_cpus=4)
    serve.start(proxy_location="Disabled")


def stop_ray() -> None:
    """End it."""
    ray.shutdown()
