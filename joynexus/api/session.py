"""One run of several tenants: from their specs to a folder with everything that came of it.

Shared: all tenants at once on one service (the running one, or one started for them). Isolated: each alone on a
service of its own, one after the other, for comparison.
"""

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import ray

from joynexus.actors import cluster
from joynexus.actors.lifeline import lifeline
from joynexus.api.service import Service
from joynexus.errors import JoyNexusError, ServiceError
from joynexus.observability.group_log import GroupColumns
from joynexus.observability.plot import GroupMark, plot_run
from joynexus.observability.report import EngineTimes, GroupCounts, ServiceReport, TenantReport, WorkloadReport
from joynexus.observability.sinks import read_metrics
from joynexus.observability.summary import SUMMARY_FILE, build_summary, write_summary
from joynexus.observability.usage_counts import usage_growth
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec


class Progress(Protocol):
    """Who is shown how a run goes."""

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def follow(self, service: Service, tenants: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Show the tenants' progress until all have ended, and return their final statuses."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What came of a run."""

    folder: Path
    service: ServiceReport
    tenants: tuple[TenantReport, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Tenants that did not complete, with the reason."""
        return {each.tenant: each.error or each.status for each in self.tenants if each.status != "COMPLETED"}

    def summary_json(self) -> str:
        """The content of ``summary.json``."""
        return json.dumps(build_summary(self.service, self.tenants), indent=2, allow_nan=False)


def run_shared(
    spec: ServiceSpec,
    tenants: Sequence[TenantSpec],
    *,
    named: bool,
    local: bool,
    output: Path | None,
    num_cpus: int | None,
    progress: Progress,
) -> RunOutcome:
    """Run all tenants on one service.

    Args:
        spec: The service to start where none runs.
        tenants: What to run.
        named: Whether the user named this service: another one that runs is then not taken.
        local: Start a service of this process's own, whatever runs.
        output: Folder of the run; None makes one under the service's root.
        num_cpus: Logical CPUs of a service of this process's own.
        progress: Who is shown how it goes.

    Raises:
        JoyNexusError: If the service can't be started, or refuses a tenant; none of them runs then.
    """
    service = None if local else _running(spec if named else None)
    if service is not None:
        progress.say(f"running on service {service.name!r}")
        return _run_on(service, tenants, _folder(output, service.root), progress)
    folder = _folder(output, spec.storage.root)
    progress.say(f"starting service {spec.service!r}: backbones {sorted(spec.backbones)}")
    with _own_service(spec, folder, num_cpus) as own:
        return _run_on(own, tenants, folder, progress)


def run_isolated(
    spec: ServiceSpec,
    tenants: Sequence[TenantSpec],
    *,
    output: Path | None,
    num_cpus: int | None,
    progress: Progress,
) -> RunOutcome:
    """Run each tenant alone on a service of its own, one after the other; see :func:`run_shared`."""
    folder = _folder(output, spec.storage.root)
    parts: list[RunOutcome] = []
    for tenant in tenants:
        progress.say(f"isolated: {tenant.tenant}")
        with _own_service(spec, folder / "isolated" / tenant.tenant, num_cpus) as own:
            parts.append(_run_on(own, [tenant], folder / "isolated" / tenant.tenant, progress))
    outcome = RunOutcome(
        folder=folder,
        service=_sum_services([each.service for each in parts]),
        tenants=tuple(tenant for each in parts for tenant in each.tenants),
    )
    write_summary(folder / SUMMARY_FILE, outcome.service, outcome.tenants)
    return outcome


def _folder(output: Path | None, root: Path) -> Path:
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return (output or root / name).resolve()


def _running(spec: ServiceSpec | None) -> Service | None:
    """Return the running service; None if there is no cluster, or none that may be taken runs on it."""
    if not cluster.connect_ray(service=spec.service if spec else "client"):
        return None
    try:
        return Service(cluster.find_service(spec.service if spec else None, is_shared=True))
    except ServiceError:
        if spec is None and "RAY_ADDRESS" not in os.environ:
            ray.shutdown()  # a Ray that merely happens to be here is left alone
        return None


@contextmanager
def _own_service(spec: ServiceSpec, root: Path, num_cpus: int | None) -> Generator[Service, None, None]:
    """A service for one run: started on the connected cluster or on a local Ray, and taken down afterwards.

    On a cluster it bears a name of its own, since another run may start one too, and it ends with this driver even
    where the driver has no time left to end it.
    """
    is_local = not ray.is_initialized()
    if is_local:
        cluster.start_local_ray(service=spec.service, num_cpus=num_cpus)
    else:
        spec = spec.model_copy(update={"service": f"{spec.service[:50]}-{uuid.uuid4().hex[:6]}"})
    try:
        with lifeline() as line:
            cluster.start_service(spec, root, lifeline=line)
            try:
                yield Service(spec.service)
            finally:
                cluster.stop_service(spec.service)
    finally:
        if is_local:
            ray.shutdown()


def _run_on(service: Service, tenants: Sequence[TenantSpec], folder: Path, progress: Progress) -> RunOutcome:
    started = time.monotonic()
    before = service.usage(fresh=True)
    submitted: list[str] = []
    with lifeline() as line:  # a driver that is killed can't stop its tenants: the Master then does
        try:
            for each in tenants:
                service.submit(each, folder=folder / "tenants" / each.tenant, lifeline=line)
                submitted.append(each.tenant)
            statuses = progress.follow(service, submitted)
        except BaseException:  # a refusal, Ctrl-C or the end of the job: what was submitted here is stopped here
            for name in submitted:
                service.request_stop(name)
            raise
    wall_s = time.monotonic() - started
    grown = _growth(tenants, before, service.usage(fresh=True))
    outcome = RunOutcome(
        folder=folder,
        service=_service_report(tenants, grown, wall_s),
        tenants=tuple(_tenant_report(name, status, grown) for name, status in statuses.items()),
    )
    write_summary(folder / SUMMARY_FILE, outcome.service, outcome.tenants)
    _plot(folder, outcome.tenants, service.groups())
    return outcome


def _plot(folder: Path, tenants: Sequence[TenantReport], engines: Mapping[str, Mapping[str, GroupColumns]]) -> None:
    metrics = {each.tenant: read_metrics(folder / "tenants" / each.tenant) for each in tenants}
    seconds = {each.tenant: each.device_seconds_by_kind for each in tenants if each.device_seconds_by_kind}
    groups = {
        kind: [
            GroupMark(time_s=float(time_s), num_tenants=int(tenants), num_samples=int(samples))
            for each in engines.values()
            for time_s, tenants, samples in zip(each[kind].time_s, each[kind].tenants, each[kind].samples, strict=True)
        ]
        for kind in ("training", "inference")
    }
    try:
        plot_run(folder / "run.png", metrics, groups, seconds)
    except (ImportError, ValueError, OSError) as error:
        raise JoyNexusError(f"{folder / 'run.png'}: the run is complete, but can't be drawn: {error}") from error


def _tenant_report(name: str, status: Mapping[str, Any], grown: Mapping[str, Mapping[str, Any]]) -> TenantReport:
    by_kind: Counter[str] = Counter()
    for each in grown.values():
        by_kind.update(each["by_kind"].get(name, {}))
    workloads = tuple(
        WorkloadReport.from_results(
            each["type"],
            each["status"],
            each["results"],
            error=status["reason"] if each["status"] == "FAILED" else None,
        )
        for each in status["workloads"]
    )
    return TenantReport(
        tenant=name,
        status=status["status"],
        policy_version=status["policy_version"],
        signature=status["signature"],
        device_seconds=sum(by_kind.values(), start=0.0),
        device_seconds_by_kind=dict(by_kind),
        prefixes={kind: each["prefixes"][name] for kind, each in grown.items() if name in each["prefixes"]},
        samples={kind: each["samples"][name] for kind, each in grown.items() if name in each["samples"]},
        workloads=workloads,
        error=status["reason"],
    )


def _growth(
    tenants: Sequence[TenantSpec], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return what training and inference added for a run, on the backbones that it used."""
    names = sorted({each.policy.backbone for each in tenants})
    return {
        kind: usage_growth([before[each][kind] for each in names], [after[each][kind] for each in names])
        for kind in ("training", "inference")
    }


def _service_report(
    tenants: Sequence[TenantSpec], grown: Mapping[str, Mapping[str, Any]], wall_s: float
) -> ServiceReport:
    training, inference = grown["training"], grown["inference"]
    return ServiceReport(
        backbone=", ".join(sorted({each.policy.backbone for each in tenants})),
        wall_s=wall_s,
        backbone_samples=training["encoded"] + inference["encoded"],
        training_samples=sum(training["samples"].values()),
        store_hits=training["reused"] + inference["reused"],
        store_misses=training["encoded"] + inference["encoded"],
        training=_groups(training),
        inference=_groups(inference),
        engines={kind: _times(each) for kind, each in grown.items()},
    )


def _times(usage: Mapping[str, Any]) -> EngineTimes:
    by_kind: Counter[str] = Counter()
    for each in usage["by_kind"].values():
        by_kind.update(each)
    return EngineTimes(
        busy_seconds=usage["busy_seconds"],
        wall_seconds=usage["wall_seconds"],
        capacity_seconds=usage["capacity_seconds"],
        idle=usage["idle"],
        by_kind=dict(by_kind),
    )


def _groups(usage: Mapping[str, Any]) -> GroupCounts:
    return GroupCounts(
        count=usage["num_groups"], mean_tenants=usage["mean_tenants"], mean_samples=usage["mean_samples"]
    )


def _sum_services(parts: Sequence[ServiceReport]) -> ServiceReport:
    def merged(groups: Sequence[GroupCounts]) -> GroupCounts:
        count = sum(each.count for each in groups)
        tenants = sum(each.count * each.mean_tenants for each in groups) / max(count, 1)
        samples = sum(each.count * each.mean_samples for each in groups) / max(count, 1)
        return GroupCounts(count=count, mean_tenants=tenants, mean_samples=samples)

    return ServiceReport(
        backbone=", ".join(sorted({each.backbone for each in parts})),
        wall_s=sum(each.wall_s for each in parts),
        backbone_samples=sum(each.backbone_samples for each in parts),
        training_samples=sum(each.training_samples for each in parts),
        store_hits=sum(each.store_hits for each in parts),
        store_misses=sum(each.store_misses for each in parts),
        training=merged([each.training for each in parts]),
        inference=merged([each.inference for each in parts]),
        engines={
            kind: sum((each.engines[kind] for each in parts if kind in each.engines), EngineTimes())
            for kind in ("training", "inference")
        },
    )
