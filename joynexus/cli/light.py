"""Commands that answer from the specs alone: ``validate``, ``plan``, ``schema``."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from joynexus.cli.outcome import BAD_INPUT, REFUSED, report
from joynexus.errors import AdmissionError, SpecError
from joynexus.scheduling.admission import ServiceState, admit
from joynexus.scheduling.plan import Bundle, TenantPlan, compile_plan
from joynexus.scheduling.sharing import Sharing, sharing
from joynexus.specs.base import Resources
from joynexus.specs.loading import load_files, load_service, load_tenants
from joynexus.specs.service import ServiceSpec, default_service
from joynexus.specs.tenant import TenantSpec

Files = Annotated[list[Path], typer.Argument(help="YAML files, each of one or more documents.")]
ServiceFile = Annotated[
    Path | None, typer.Option("--service", help="YAML of the service. Without it: one backbone, 'lite'.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

PIPE_WIDTH = 240
"""Columns of a table that goes to a file or a pipe, where nobody sees it wrap."""


class SpecName(StrEnum):
    """Which schema to print."""

    TENANT = "tenant"
    SERVICE = "service"


def validate(files: Files, *, service: ServiceFile = None, as_json: AsJson = False) -> None:
    """Check tenant and service files, and name everything that is wrong with them.

    With --service, also check that the tenants fit that service: backbone, image size, quotas.
    """
    loaded = load_files(files)
    errors: list[SpecError | AdmissionError] = [*loaded.errors]
    if service is not None:
        try:
            _, unfit = _compile(loaded.tenants, load_service(service))
            errors += unfit
        except SpecError as error:
            errors.append(error)
    lines = [line for error in errors for line in str(error).splitlines()]
    names = [spec.tenant for spec in loaded.tenants]
    services = {str(path): spec.service for path, spec in loaded.services.items()}
    if as_json:
        typer.echo(json.dumps({"valid": not lines, "tenants": names, "services": services, "errors": lines}, indent=2))
    else:
        for spec in loaded.tenants:
            workloads = ", ".join(each.type for each in spec.workloads) or "none (driven through the API)"
            module, backbone = spec.policy.action_module.type, spec.policy.backbone
            typer.echo(f"ok: tenant {spec.tenant!r}: {module} on backbone {backbone!r}, workloads: {workloads}")
        for path, name in services.items():
            typer.echo(f"ok: service {name!r} in {path}")
    _end(errors)


def plan(files: Files, *, service: ServiceFile = None, as_json: AsJson = False) -> None:
    """Show what each tenant needs, who shares forwards with whom, and whether the service can hold them all."""
    spec = default_service() if service is None else load_service(service)
    plans, errors = _compile(load_tenants(files), spec)
    state = ServiceState(service=spec)
    refused: dict[str, str] = {}
    for each in plans:
        try:
            admit(each, state)
            state = state.having(each)
        except AdmissionError as error:
            refused[each.tenant] = str(error)
            errors.append(error)
    shared = sharing(plans)
    if as_json:
        rows = [_as_json(each, share, refused.get(each.tenant)) for each, share in zip(plans, shared, strict=True)]
        typer.echo(json.dumps({"service": spec.service, "tenants": rows}, indent=2))
    elif plans:
        console().print(_table(plans, shared, refused))
    _end(errors)


def schema(which: Annotated[SpecName, typer.Argument(help="What to describe.")] = SpecName.TENANT) -> None:
    """Print the JSON Schema of tenant or service files, installed plugins included."""
    spec = TenantSpec if which is SpecName.TENANT else ServiceSpec
    typer.echo(json.dumps(spec.model_json_schema(), indent=2))


def console() -> Console:
    """Return a console for stdout that does not cut tables short where there is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPE_WIDTH)


def _compile(
    tenants: Sequence[TenantSpec], service: ServiceSpec
) -> tuple[list[TenantPlan], list[SpecError | AdmissionError]]:
    plans: list[TenantPlan] = []
    errors: list[SpecError | AdmissionError] = []
    for each in tenants:
        try:
            plans.append(compile_plan(each, service))
        except (SpecError, AdmissionError) as error:
            errors.append(error)
    return plans, errors


def _end(errors: Sequence[SpecError | AdmissionError]) -> None:
    """Report what went wrong; malformed input outranks a refusal, since it has to be corrected first."""
    for error in errors:
        report(error)
    if errors:
        raise typer.Exit(BAD_INPUT if any(isinstance(each, SpecError) for each in errors) else REFUSED)


def _as_json(each: TenantPlan, share: Sharing, refusal: str | None) -> dict[str, Any]:
    return {
        **each.model_dump(mode="json"),
        "signature": each.signature,
        "slot_bytes": each.memory.total,
        "shares_with": list(share.shares_with),
        "differs": {
            other: {name: list(pair) for name, pair in fields.items()} for other, fields in share.differs.items()
        },
        "admitted": refusal is None,
        "refusal": refusal,
    }


def _table(plans: Sequence[TenantPlan], shared: Sequence[Sharing], refused: Mapping[str, str]) -> Table:
    table = Table("tenant", "backbone", "signature", "shares with", "differs from", "actors", "slot memory", "admitted")
    if any(each.adapter for each in plans):
        table.add_column("adapter")
    for each, share in zip(plans, shared, strict=True):
        differs = [f"{other}: {_fields(fields)}" for other, fields in share.differs.items()]
        table.add_row(
            each.tenant,
            each.backbone,
            each.signature[:12],
            ", ".join(share.shares_with) or "-",
            "\n".join(differs) or "-",
            "\n".join(_actors(each)) or "-",
            _size(each.memory.total),
            "no" if each.tenant in refused else "yes",
            *([_adapter(each)] if table.columns[-1].header == "adapter" else []),
        )
    return table


def _adapter(each: TenantPlan) -> str:
    """Say what an adapter costs: memory, and the reuse of prefixes."""
    if each.adapter is None:
        return "-"
    memory = _size(each.adapter.module + each.adapter.activations)
    return f"{each.adapter.parameters} parameters, {memory} of the slot; no prefix is reused across updates"


def _fields(fields: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {mine} / {other}" for name, (mine, other) in fields.items())


def _actors(each: TenantPlan) -> list[str]:
    """Describe the bundles, equal ones together."""
    counts: dict[str, list[int]] = {}
    for position, bundles in enumerate((each.bundles, each.elastic)):
        for bundle in bundles:
            counts.setdefault(_bundle(bundle), [0, 0])[position] += 1
    return [f"{kept} x {what}" + (f" (up to {kept + more})" if more else "") for what, (kept, more) in counts.items()]


def _bundle(bundle: Bundle) -> str:
    return f"{bundle.role.partition(':')[0]} ({_resources(bundle.resources)})"


def _resources(needed: Resources) -> str:
    parts = [f"{needed.num_cpus:g} CPU"]
    parts += [f"{needed.num_gpus:g} GPU"] if needed.num_gpus else []
    parts += [_size(needed.memory_bytes)] if needed.memory_bytes else []
    return ", ".join(parts + [f"{amount:g} {name}" for name, amount in needed.custom.items()])


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"
