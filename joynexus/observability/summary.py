"""The end of a run: ``summary.json`` for programs, a table for people."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from joynexus.observability.report import ServiceReport, TenantReport, WorkloadReport

SUMMARY_FILE = "summary.json"


def build_summary(service: ServiceReport, tenants: Sequence[TenantReport]) -> dict[str, Any]:
    """Put a run's reports together as ``summary.json`` holds them.

    Args:
        service: What the service did.
        tenants: In the order in which they are to be listed.

    Returns:
        JSON values: ``service`` and, by name, ``tenants``; NaN and infinity have become null.
    """
    summary = {"service": service.to_json(), "tenants": {each.tenant: each.to_json() for each in tenants}}
    return _finite(summary)


def read_summary(path: Path) -> tuple[ServiceReport, tuple[TenantReport, ...]]:
    """Read the reports of a ``summary.json``."""
    values = json.loads(path.read_text())
    tenants = tuple(TenantReport.from_json(name, each) for name, each in values["tenants"].items())
    return ServiceReport.from_json(values["service"]), tenants


def write_summary(path: Path, service: ServiceReport, tenants: Sequence[TenantReport]) -> None:
    """Write ``summary.json`` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(build_summary(service, tenants), indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


def summary_table(service: ServiceReport, tenants: Sequence[TenantReport]) -> Table:
    """Lay a run's reports out for a terminal: one row per workload, the service in the caption."""
    table = Table("tenant", "status", "version", "device s", "encoded", "workload", "done", "loss", "success", "notes")
    for tenant in tenants:
        seconds, encoded = f"{tenant.device_seconds:.1f}", _encoded(tenant)
        head = (tenant.tenant, tenant.status, str(tenant.policy_version), seconds, encoded)
        rows = [_workload_cells(each) for each in tenant.workloads] or [("-", "-", "-", "-", "")]
        for index, (*cells, note) in enumerate(rows):
            first = head if index == 0 else ("",) * len(head)
            notes = "; ".join(text for text in (tenant.error if index == 0 else None, note) if text)
            table.add_row(*first, *cells, notes)
    table.caption = (
        f"{service.backbone}: {service.wall_s:.1f} s, {service.training_samples} samples trained on, "
        f"{service.backbone_samples} prefixes encoded for training and acting, {service.store_hits} reused, "
        f"{service.training.mean_tenants:.1f} tenants per training batch, "
        f"{service.inference.mean_tenants:.1f} per inference batch"
        + "".join(f"\n{kind}: {times_line(each.to_json())}" for kind, each in service.engines.items())
    )
    return table


def times_line(times: Mapping[str, Any]) -> str:
    """Say in a line how engines spent their time.

    Args:
        times: ``busy_seconds``, ``utilisation`` and ``idle``, as engines' counts hold them.
    """
    used = times["utilisation"]
    busy = f"busy {times['busy_seconds']:.1f} s" + ("" if used is None else f" ({used:.0%} of its capacity)")
    idle = [f"{reason.replace('_', ' ')} {seconds:.1f} s" for reason, seconds in sorted(times["idle"].items())]
    return f"{busy}; idle: {', '.join(idle) or 'unknown'}"


def _encoded(tenant: TenantReport) -> str:
    """Prefixes that were encoded for a tenant's training and acting, of those that it needed."""
    needed = sum(sum(each.values()) for each in tenant.prefixes.values())
    return f"{sum(each['encoded'] for each in tenant.prefixes.values())} of {needed}" if needed else "-"


def _workload_cells(workload: WorkloadReport) -> tuple[str, str, str, str, str]:
    unit = {"sft": "steps", "rl": "iterations", "evaluation": "episodes"}.get(workload.type, "")
    losses = [each for each in (workload.loss_first, workload.loss_last) if each is not None]
    success = "-" if workload.success_once is None else f"{workload.success_once:.0%}"
    baseline = workload.details.get("baseline")
    if isinstance(baseline, dict) and baseline.get("success_once") is not None:  # pyright: ignore[reportUnknownMemberType]
        success += f" (untrained {baseline['success_once']:.0%})"
    return (
        f"{workload.type} {workload.status}",
        f"{workload.count} {unit}".strip(),
        " -> ".join(f"{each:.4g}" for each in losses) or "-",
        success,
        "; ".join(text for text in (workload.error, _fit_note(workload.details.get("fit"))) if text),
    )


def _fit_note(fit: Any) -> str:  # noqa: ANN401  # any JSON value
    """Say in short what part of the data lies outside the statistics that the policy brought."""
    found = cast("dict[str, Any]", fit) if isinstance(fit, dict) else {}
    parts = {name: found[name] for name in ("state", "action") if name in found}
    shares = [f"{name} {each['any_beyond_range']:.1%}" for name, each in parts.items()]
    return f"beyond the policy's [min, max]: {', '.join(shares)} of frames" if shares else ""


def _finite(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value
