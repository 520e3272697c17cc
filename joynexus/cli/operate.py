"""Commands for a running service: ``up``, ``status``, ``usage``, ``logs``, ``stop``, ``down``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from joynexus.cli.light import AsJson, ServiceFile, console
from joynexus.errors import ServiceError, TenantNotFoundError
from joynexus.specs.loading import load_service
from joynexus.specs.service import default_service

if TYPE_CHECKING:
    from joynexus.api.service import Service

Named = Annotated[str | None, typer.Option("--name", help="The service's name; needed where several run.")]


def connect_service(name: str | None) -> "Service":
    """Find the running service."""
    from joynexus.api.service import connect  # needs Ray

    return connect(name)


def up(
    *,
    service: ServiceFile = None,
    root: Annotated[Path | None, typer.Option(help="Folder of runs and state. Default: the spec's.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="Logical CPUs, where a Ray head is started.")] = None,
) -> None:
    """Start a service on the running Ray cluster; where there is none, start a Ray head on this machine first."""
    spec = default_service() if service is None else load_service(service)
    from joynexus.actors import cluster, head

    where = (root or spec.storage.root).resolve()
    if not cluster.connect_ray(service=spec.service):
        typer.echo("no Ray cluster here: starting a head on this machine", err=True)
        head.start_head(where, num_cpus=num_cpus)
        if not cluster.connect_ray(service=spec.service):
            raise ServiceError(f"the Ray head that was started does not answer. See {where / 'ray_head.log'}.")
    cluster.start_service(spec, where)
    typer.echo(f"service {spec.service!r} is up: backbones {sorted(spec.backbones)}, runs in {where}")


def down(*, name: Named = None) -> None:
    """Stop the service with all its tenants, and the Ray head if 'joynexus up' started it."""
    from joynexus.actors import head

    service = connect_service(name)
    root = service.root
    service.shut_down()
    typer.echo(f"service {service.name!r} is down")
    if head.stop_head(root):
        typer.echo("the Ray head that 'joynexus up' had started is down")


def status(*, name: Named = None, as_json: AsJson = False) -> None:
    """Show every tenant: state, progress, policy version, charge."""
    from joynexus.api.follow import progress_line

    found = connect_service(name).status()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table("tenant", "status", "progress", "version", "device s", "signature")
    for tenant, each in found.items():
        seconds, version = f"{each['device_seconds']:.1f}", str(each["policy_version"])
        table.add_row(tenant, each["status"], progress_line(each), version, seconds, each["signature"][:8])
    console().print(table)


def usage(*, name: Named = None, as_json: AsJson = False) -> None:
    """Show where every device-second and every prefix went: by tenant and kind, and why engines were idle."""
    from joynexus.cli.usage import engines_table, tenants_table

    found = connect_service(name).usage(fresh=True)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for backbone, engines in found.items():
        for kind, each in engines.items():
            console().print(tenants_table(f"{backbone}: {kind}", each))
    console().print(engines_table(found))


def logs(
    tenant: Annotated[str, typer.Argument(help="Tenant.")],
    *,
    name: Named = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Newest lines to show.")] = 50,
) -> None:
    """Show a tenant's newest log lines and, if it failed, why."""
    from joynexus.actors import names
    from joynexus.observability.logs import format_record, read_logs

    service = connect_service(name)
    state = state_of(service, tenant)
    for record in list(read_logs(service.root / names.LOGS / tenant))[-lines:]:
        typer.echo(format_record(record))
    if state["reason"]:
        typer.echo(state["reason"], err=True)


def stop(tenants: Annotated[list[str], typer.Argument(help="Tenants.")], *, name: Named = None) -> None:
    """Stop tenants, and wait until nothing of them is left."""
    service = connect_service(name)
    for tenant in tenants:
        typer.echo(f"{tenant}: {service.stop(tenant)}")


def state_of(service: "Service", tenant: str) -> dict[str, Any]:
    """Return the state of a tenant.

    Raises:
        TenantNotFoundError: Naming those that there are.
    """
    found = service.status()
    if tenant not in found:
        raise TenantNotFoundError(f"{tenant}: no such tenant. Known: {sorted(found)}.")
    return found[tenant]
