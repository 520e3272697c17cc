"""The four-tenant trace: one shared service against the same tenants run alone, on real Ray, Serve and simulators.

python -m benchmarks.cluster.trace --json out.json          # LIBERO and ManiSkill, about half an hour
python -m benchmarks.cluster.trace --quick --json out.json  # MuJoCo tasks, about a minute
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.trace_run import (
    ALONE,
    CONVENTIONAL,
    SHARED,
    WITHOUT,
    Outcome,
    jain,
    largest_difference,
    run,
    serving,
    start_ray,
    stop_ray,
)
from benchmarks.cluster.trace_tenants import SFT, quick_trace, service_spec, whole_trace
from benchmarks.harness import Measured, Options, Row, Study
from joynexus.observability.latency import quantile_ms
from joynexus.specs.tenant import TenantSpec

QUESTION = (
    "How much accelerator time, and how much wall time, do four tenants take on one shared service, against the same "
    "four run alone one after the other: *isolated, conventional* (each epoch and each update encodes its prefixes "
    "again, as single-tenant frameworks do) and *isolated, with our own reuse* (this project's engine, but alone)? And "
    "what does each mechanism give: the shared run with one of them switched off."
)


def measure(options: Options) -> Measured:
    """Run the trace in every way."""
    with tempfile.TemporaryDirectory(prefix="joynexus-trace-") as name:
        folder = Path(name)
        tenants = quick_trace(folder, options.seed) if options.quick else whole_trace(options.seed)
        start_ray()
        try:
            found = _run_all(tenants, folder, quick=options.quick)
        finally:
            stop_ray()
    return report(found, quick=options.quick)


def _run_all(tenants: Sequence[TenantSpec], folder: Path, *, quick: bool) -> dict[str, Outcome]:
    """Run every way; those that need the same service share one, on which they run one after the other."""
    services = [[SHARED, ALONE], [CONVENTIONAL], *([] if quick else [[each] for each in WITHOUT])]
    found: dict[str, Outcome] = {}
    for ways in services:
        with serving(ways[0], service_spec(), folder) as service:
            for way in ways:
                outcome = found[way.name] = run(way, service, tenants)
                print(f"{way.name}: busy {outcome.busy_s:.1f} s of {outcome.makespan_s:.0f} s", flush=True)
    return found


def report(found: Mapping[str, Outcome], *, quick: bool) -> Measured:
    """Turn what was run into headline, tables and notes."""
    shared, alone, conventional = (found[way.name] for way in (SHARED, ALONE, CONVENTIONAL))
    slowdown = {name: each.wall_s / alone.tenants[name].wall_s for name, each in shared.tenants.items()}
    modules = [each.tenants[SFT].module for each in found.values()]
    losses = [each.tenants[SFT].losses or (0.0, 0.0) for each in found.values()]
    headline = {
        "busy_ratio_conventional": conventional.busy_s / shared.busy_s,
        "busy_ratio_reuse": alone.busy_s / shared.busy_s,
        "makespan_ratio_conventional": conventional.makespan_s / shared.makespan_s,
        "makespan_ratio_reuse": alone.makespan_s / shared.makespan_s,
        "utilisation_shared": shared.busy_s / shared.makespan_s,
        "utilisation_isolated": alone.busy_s / alone.makespan_s,
        "jain_index_of_speeds": jain([1 / each for each in slowdown.values()]),
        "sft_parameter_difference": max(largest_difference(modules[0], each) for each in modules),
        "sft_loss_difference": max(abs(each[i] - losses[0][i]) for each in losses for i in (0, 1)),
    }
    tables = {
        "Ways": [_way_row(each, shared) for each in found.values()],
        "Tenants": [_tenant_row(name, shared, alone, conventional) for name in shared.tenants],
        "Busy seconds by kind, shared": _kind_rows(shared.usage),
    }
    notes = [
        "Busy: CPU seconds of the engines' own work, training and inference together, without any waiting.",
        "A tenant's slowdown is its wall time beside the others over that alone; four tenants share two cores.",
    ]
    if quick:
        notes.append("Quick: MuJoCo tasks and made-up demonstrations stand in for LIBERO, ManiSkill and its planner.")
    return Measured(headline=headline, tables=tables, notes=notes)


def _way_row(outcome: Outcome, shared: Outcome) -> Row:
    training, inference = outcome.usage["training"], outcome.usage["inference"]
    return {
        "way": outcome.way.name,
        "busy_s": outcome.busy_s,
        "busy_over_shared": outcome.busy_s / shared.busy_s,
        "training_busy_s": float(training["busy_seconds"]),
        "inference_busy_s": float(inference["busy_seconds"]),
        "encoded": outcome.encoded,
        "makespan_s": outcome.makespan_s,
        "utilisation": outcome.busy_s / outcome.makespan_s,
        "tenants_per_training_group": float(training["mean_tenants"]),
        "tenants_per_inference_group": float(inference["mean_tenants"]),
    }


def _tenant_row(name: str, shared: Outcome, alone: Outcome, conventional: Outcome) -> Row:
    return {
        "tenant": name,
        "busy_s_shared": shared.busy_of(name),
        "busy_s_alone": alone.busy_of(name),
        "busy_s_conventional": conventional.busy_of(name),
        "wall_s_shared": shared.tenants[name].wall_s,
        "wall_s_alone": alone.tenants[name].wall_s,
        **{f"predict_{key}_shared": value for key, value in _latency(shared, name).items()},
        **{f"predict_{key}_alone": value for key, value in _latency(alone, name).items()},
    }


def _latency(outcome: Outcome, tenant: str) -> dict[str, float | None]:
    """Return the quantiles of a tenant's predictions in the replica, from arrival to answer."""
    waits = outcome.usage["inference"]["latency"].get(tenant, {})
    return {"p50_ms": quantile_ms(waits, 0.5), "p99_ms": quantile_ms(waits, 0.99)}


def _kind_rows(usage: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for engine, counts in usage.items():
        for tenant, kinds in counts.get("by_kind", {}).items():
            rows.append({"engine": engine, "tenant": tenant, **{kind: float(each) for kind, each in kinds.items()}})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, 0.0) for name in columns} for row in rows]


def draw(result: Any, figure: Any) -> None:  # noqa: ANN401  # matplotlib's
    """Draw busy seconds and wall time of each way."""
    rows: Sequence[Row] = result.tables["Ways"]
    names = [str(row["way"]).replace("-", "\n") for row in rows]
    left, right = figure.subplots(1, 2)
    bottom = [0.0] * len(rows)
    for column, label in (("training_busy_s", "training"), ("inference_busy_s", "inference")):
        heights = [float(row[column] or 0) for row in rows]
        left.bar(names, heights, bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    left.set(title="Accelerator busy seconds", ylabel="s")
    left.legend()
    right.bar(names, [float(row["makespan_s"] or 0) for row in rows], color="tab:gray")
    right.set(title="Wall time of all four", ylabel="s")
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=7)


STUDY = Study(
    name="cluster/trace",
    title="Four tenants: one shared service against each alone",
    question=QUESTION,
    measure=measure,
    draw=draw,
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
