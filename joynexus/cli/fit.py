"""``joynexus fit``: what part of a tenant's demonstrations lies outside the statistics that its policy brings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joynexus.cli.light import AsJson, Files
from joynexus.specs.loading import load_tenants
from joynexus.specs.tenant import SftSpec, TenantSpec

if TYPE_CHECKING:
    from joynexus.data.fit_report import FitReport


def fit(files: Files, *, as_json: AsJson = False) -> None:
    """Compare each tenant's demonstrations with the statistics of its policy, before anything is trained.

    The statistics are those of the policy that it starts from (init_from) or, without one, of its first dataset.
    Reads all states and actions, and no images.
    """
    found = {tenant.tenant: _reports(tenant) for tenant in load_tenants(files)}
    if as_json:
        encoded: dict[str, Any] = {
            name: [None if each is None else each.to_json() for each in reports] for name, reports in found.items()
        }
        typer.echo(json.dumps(encoded, indent=2))
        return
    for name, reports in found.items():
        if not reports:
            typer.echo(f"{name}: has no sft workload, or normalises nothing.")
        for each in reports:
            lines = ["its statistics are those of this dataset."] if each is None else each.lines()
            typer.echo("\n".join(f"{name}: {line}" for line in lines))


def _reports(tenant: TenantSpec) -> "list[FitReport | None]":
    """Return a report per SFT workload; None where the statistics are the dataset's own."""
    from joynexus.data.fit_report import measure_fit
    from joynexus.data.normalization import read_policy_stats
    from joynexus.data.producer import open_dataset

    policy = tenant.policy
    if {policy.action.normalization, policy.state_normalization} == {"identity"}:
        return []
    start = policy.init_from
    stats = None if start is None else read_policy_stats(Path(start))
    reports: list[FitReport | None] = []
    for workload in tenant.workloads:
        if isinstance(workload, SftSpec):
            dataset = open_dataset(workload, policy, owner=tenant.tenant)
            try:
                stats = dataset.statistics() if stats is None else stats
                reports.append(measure_fit(dataset, stats, policy))
            finally:
                dataset.close()
    return reports
