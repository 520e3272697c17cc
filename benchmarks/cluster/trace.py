"""The four-tenant trace: one shared service against the same tenants run alone, on real Ray, Serve and simulators.

``python -m benchmarks.cluster.trace --json out.json`` takes LIBERO and ManiSkill, and some ten minutes; with
``--quick`` it takes a MuJoCo task, and a minute.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import joynexus
from benchmarks.cluster.trace_costs import for_simulation
from benchmarks.cluster.trace_run import (
    ALONE,
    CONVENTIONAL,
    IN_TURN,
    SHARED,
    WITHOUT,
    Outcome,
    Way,
    jain,
    largest_difference,
    run,
)
from benchmarks.cluster.trace_tenants import SFT, quick_trace, service_spec, whole_trace
from benchmarks.cluster.world import local_ray
from benchmarks.harness import Measured, Options, Row, Study
from benchmarks.simulation.check import check
from joynexus.api import Service
from joynexus.observability.latency import quantile_ms
from joynexus.specs.tenant import TenantSpec

QUESTION = (
    "How much accelerator time do four tenants take on one shared service, against the same four in isolation: "
    "*isolated, conventional* (each epoch and each update encodes its prefixes again, as single-tenant frameworks do) "
    "and *isolated, with our own reuse* (this project's engine, but each tenant alone)? And what does each mechanism "
    "give: the shared run with one of them switched off."
)


COMPARED = (SHARED, ALONE, CONVENTIONAL)
"""All ways of a quick run."""


def measure(options: Options) -> Measured:
    """Run the trace in every way, one after the other on one service."""
    with tempfile.TemporaryDirectory(prefix="joynexus-trace-") as name:
        tenants = quick_trace(Path(name), options.seed) if options.quick else whole_trace(options.seed)
        ways = COMPARED if options.quick else (*COMPARED, IN_TURN, *WITHOUT)
        with local_ray(service_spec(), num_cpus=4) as spec:
            found = _run_all(ways, joynexus.start(spec, root=spec.storage.root), tenants)
    measured = report(found, quick=options.quick)
    data = for_simulation(spec, tenants, found[SHARED.name], found[ALONE.name])
    tables = {**measured.tables, **check(data, "trace").tables}
    return dataclasses.replace(measured, tables=tables, data=data)


def _run_all(ways: Sequence[Way], service: Service, tenants: Sequence[TenantSpec]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    told = service.usage(fresh=True)
    for way in ways:
        outcome, told = run(way, service, tenants, told)
        print(f"{way.name}: busy {outcome.busy_s:.1f} s of {outcome.makespan_s:.0f} s", flush=True)
        found[way.name] = outcome
    return found


def report(found: Mapping[str, Outcome], *, quick: bool) -> Measured:
    """Turn what was run into headline, tables and notes."""
    shared, alone, conventional = (found[way.name] for way in (SHARED, ALONE, CONVENTIONAL))
    modules = [each.tenants[SFT].module for each in found.values()]
    losses = [each.tenants[SFT].losses or (0.0, 0.0) for each in found.values()]
    headline = {
        "busy_ratio_conventional": conventional.busy_s / shared.busy_s,
        "busy_ratio_reuse": alone.busy_s / shared.busy_s,
        "sft_parameter_difference": max(largest_difference(modules[0], each) for each in modules),
        "sft_loss_difference": max(abs(each[i] - losses[0][i]) for each in losses for i in (0, 1)),
    }
    if not quick:
        headline |= _wall_times(shared, found[IN_TURN.name])
    tables = {
        "Ways": [_way_row(each, shared) for each in found.values()],
        "Tenants": [_tenant_row(name, found) for name in shared.tenants],
        "Busy seconds by kind, shared": _kind_rows(shared.usage),
    }
    notes = [
        "Busy: CPU seconds of the engines' own work, training and inference together, without any waiting.",
        "A second of a core is worth less while simulators use its caches: isolated tenants run at the same time too.",
        "But each then has a prompt of its own: no forward holds two tenants' samples, and none serves another.",
        "All ways run on one service, one after the other; conventional tenants ask it not to reuse prefixes.",
        "Simulated: the product's queues on a virtual clock; costs are those of the isolated tenants with our reuse.",
    ]
    if quick:
        notes.append("Quick: a MuJoCo task and made-up demonstrations stand in for LIBERO, ManiSkill and its planner.")
    return Measured(headline=headline, tables=tables, notes=notes)


def _wall_times(shared: Outcome, in_turn: Outcome) -> dict[str, float]:
    """Compare wall times with those of one tenant after the other, each alone on the machine."""
    speeds = [in_turn.tenants[name].wall_s / each.wall_s for name, each in shared.tenants.items()]
    return {
        "makespan_ratio_in_turn": in_turn.makespan_s / shared.makespan_s,
        "busy_ratio_in_turn": in_turn.busy_s / shared.busy_s,
        "utilisation_shared": shared.busy_s / shared.makespan_s,
        "utilisation_in_turn": in_turn.busy_s / in_turn.makespan_s,
        "jain_index_of_speeds": jain(speeds),
    }


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
        "tenants_per_training_group": float(training["mean_tenants"]),
        "tenants_per_inference_group": float(inference["mean_tenants"]),
    }


def _tenant_row(name: str, found: Mapping[str, Outcome]) -> Row:
    row: dict[str, Any] = {
        "tenant": name,
        "encoded per sample trained on": _encoded_per_sample(found[SHARED.name], name),
    }
    for way in (SHARED, ALONE, CONVENTIONAL, IN_TURN):
        if way.name in found:
            outcome, short = found[way.name], way.name.removeprefix("isolated-")
            row |= {f"busy_s {short}": outcome.busy_of(name), f"wall_s {short}": outcome.tenants[name].wall_s}
            row |= {f"predict {key} {short}": value for key, value in _latency(outcome, name).items()}
    return row


def _encoded_per_sample(outcome: Outcome, tenant: str) -> float:
    """Return how often the trainer's backbone ran for a row that the tenant was trained on."""
    training = outcome.usage["training"]
    return training["prefixes"].get(tenant, {}).get("encoded", 0) / max(training["samples"].get(tenant, 0), 1)


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
