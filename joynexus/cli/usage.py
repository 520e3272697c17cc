"""How the usage of a service is shown: a table of tenants for each kind of engine, and one of engines."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from joynexus.observability.latency import quantile_ms
from joynexus.observability.summary import times_line

KINDS = ("prefix", "head_forward", "backward", "optimizer", "copy", "other")
REASONS = ("no_data", "waiting_for_group", "copying", "control")
SOURCES = ("encoded", "reused", "carried")


def tenants_table(title: str, counts: Mapping[str, Any]) -> Table:
    """Lay out who used how much: device-seconds by kind, samples, and where prefixes came from.

    Args:
        title: Of the table.
        counts: Of trainers or of replicas, as the service tells them.
    """
    table = Table("tenant", title=title)
    columns = ("device s", "share", *(each.replace("_", " ") for each in KINDS), "samples", *SOURCES)
    waits = (("p50 ms", 0.5), ("p99 ms", 0.99)) if counts["latency"] else ()
    columns = (*columns, *(name for name, _ in waits))
    for name in columns:
        table.add_column(name, justify="right")
    busy = counts["busy_seconds"] or 1.0
    tenants = sorted({*counts["device_seconds"], *counts["samples"]})
    for tenant in tenants:
        seconds, kinds = counts["device_seconds"].get(tenant, 0.0), counts["by_kind"].get(tenant, {})
        prefixes = counts["prefixes"].get(tenant, {})
        table.add_row(
            tenant,
            f"{seconds:.2f}",
            f"{100 * seconds / busy:.1f} %",
            *(f"{kinds.get(kind, 0.0):.2f}" for kind in KINDS),
            str(counts["samples"].get(tenant, 0)),
            *(str(prefixes.get(source, 0)) for source in SOURCES),
            *(_shown(quantile_ms(counts["latency"].get(tenant, {}), share)) for _, share in waits),
        )
    table.caption = (
        f"{counts['encoded']} prefixes encoded, {counts['reused']} reused, {counts['carried']} carried; "
        f"{counts['num_groups']} groups of {counts['mean_tenants']:.2f} tenants and {counts['mean_samples']:.1f} "
        f"samples\n{times_line(counts)}"
    )
    return table


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"


def engines_table(usage: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Lay out how each engine spent its time, and why it was idle.

    Args:
        usage: By backbone and kind of engine, as the service tells it.
    """
    table = Table("engine", title="engines")
    for name in ("busy s", "wall s", "utilisation", *(f"idle: {each.replace('_', ' ')}" for each in REASONS)):
        table.add_column(name, justify="right")
    for engines in usage.values():
        for counts in engines.values():
            for each in counts["engines"]:
                used = each["utilisation"]
                table.add_row(
                    each["name"],
                    f"{each['busy_seconds']:.1f}",
                    f"{each['wall_seconds']:.1f}",
                    "-" if used is None else f"{used:.0%}",
                    *(f"{each['idle'].get(reason, 0.0):.1f}" for reason in REASONS),
                )
    return table
