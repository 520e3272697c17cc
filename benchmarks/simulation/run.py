"""A simulation of the shared service from 2 to 1000 tenants, against each tenant alone.

python -m benchmarks.simulation.run --json out.json                  # an 8-GPU node, assumed costs
python -m benchmarks.simulation.run --quick                          # up to 200 tenants
python -m benchmarks.simulation.run --costs measured.json            # costs that were measured
python -m benchmarks.simulation.run --check trace.json               # predicted against measured busy seconds
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Measured, Options, Row, Study
from benchmarks.simulation.check import check_trace
from benchmarks.simulation.costs import GPU_NODE, DeviceCosts
from benchmarks.simulation.fit import load_costs
from benchmarks.simulation.growth import Point, cost_row, delay_row, fairness_row, run_point, switches

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
QUICK_COUNTS = (2, 8, 32, 100, 200)
SWITCHED = 64
"""Tenants of the table of mechanisms."""
QUICK_SWITCHED = 32
QUESTION = (
    "A simulation, not a measurement: how do GPU-hours, waits and fairness grow from 2 to 1000 tenants on a node of up "
    "to 8 GPUs? The product's own TrainingQueue, GroupBatcher, GroupChooser, FairShare and admission run on a virtual "
    "clock; devices only take the seconds of a cost model. Compared with *isolated, conventional* (each tenant holds a "
    "whole GPU from its start to its end and encodes every epoch's prefixes again) and *isolated, with our own reuse*."
)
ASSUMED = (
    (
        "GPU-hours: the GPUs that are held, busy or not. The shared service holds all its GPUs from the first arrival "
        "to the last end: one for every 32 tenants, at most 8. Busy: device-seconds."
    ),
    (
        "Tenants: half SFT (100 to 300 steps; about 4 on a dataset), a third PPO (3 to 5 updates of 8 episodes, 4 "
        "epochs), the rest evaluates; drawn with a seed, arriving 0.5 s apart on average. A chunk of a simulator takes "
        "0.15 to 0.6 s. Runs are of minutes, to be simulated in seconds."
    ),
    (
        "A GPU holds 48 tenants; further ones wait for a slot. Slowdown: wall time, the wait for a slot included, over "
        "that alone on a whole GPU with our reuse. 'Same GPUs' and 'taking turns': conventional, as many GPUs as the "
        "service, first come, first served."
    ),
    "Trainer and replica of a GPU share it evenly while both want it.",
    "Each run of cluster/trace compares its busy seconds with those that this simulation makes of it: see its page.",
    (
        "What sharing gives beyond our own reuse is of three kinds, and the table of mechanisms tells them apart: GPUs "
        "that are not held idle (GPU-hours), datasets that tenants have in common, and fuller forwards (both: busy)."
    ),
    (
        "Weighted service: device-seconds by weight of tenants that always have more to train, weights 3 : 1 : 1, "
        "calls of 16, 32 and 64 rows, as many beside each other as on one GPU of the point."
    ),
    (
        "Left out: faults, checkpoints, publications, networks, the control plane's time, reading data, differences "
        "between a tenant's own samples, and what is learnt. Data come faster than they are used, simulators of one "
        "worker step together, and a store's tiers cost the same."
    ),
)


def measure(options: Options) -> Measured:
    """Simulate every point, or check a trace."""
    if options.extra.get("check") is not None:
        return check_trace(Path(options.extra["check"]))
    given = options.extra.get("costs")
    costs = GPU_NODE if given is None else load_costs(Path(given))
    counts = QUICK_COUNTS if options.quick else COUNTS
    points = [run_point(count, options.seed, costs) for count in counts]
    fairness = [fairness_row(point, costs) for point in points]
    mechanisms = switches(QUICK_SWITCHED if options.quick else SWITCHED, options.seed, costs)
    return Measured(
        headline=headline(points, fairness),
        tables={
            "Simulated cost": [cost_row(point) for point in points],
            "Simulated waits": [delay_row(point) for point in points],
            "Simulated fairness": fairness,
            "Simulated: one mechanism switched off": mechanisms,
            "Simulated: what a GPU costs": cost_table(costs),
        },
        notes=(*ASSUMED, f"Costs: {costs.name}: {costs.source}."),
    )


def headline(points: Sequence[Point], fairness: Sequence[Row]) -> dict[str, float]:
    """Name the few numbers, each as simulated, for the fewest, a middle and the largest number of tenants."""
    found: dict[str, float] = {}
    for point, fair in zip(points, fairness, strict=True):
        count = len(point.tenants)
        if count not in (8, len(points[-1].tenants)):
            continue
        cost, delay = cost_row(point), delay_row(point)
        picked = {
            "gpu_hours_ratio_conventional": cost["gpu_hours_ratio_conventional"],
            "gpu_hours_ratio_reuse": cost["gpu_hours_ratio_reuse"],
            "busy_ratio_conventional": cost["busy_ratio_conventional"],
            "busy_ratio_reuse": cost["busy_ratio_reuse"],
            "utilisation": cost["utilisation_shared"],
            "makespan_ratio_same_gpus": cost["makespan_ratio_same_gpus"],
            "predict_wait_p99_ms": delay["predict_wait_p99_ms"],
            "group_wait_p99_ms": delay["group_wait_p99_ms"],
            "jain_weighted_service": fair["jain_weighted_service"],
            "worst_slowdown": fair["worst_slowdown"],
        }
        found |= {f"simulated_{name}_{count}_tenants": float(value or 0) for name, value in picked.items()}
    return found


def cost_table(costs: DeviceCosts) -> list[Row]:
    """Show what the cost model says of some common sizes."""
    return [
        {
            "rows": count,
            "encode_ms": 1e3 * costs.encode_s(count),
            "encode_unpadded_ms": 1e3 * costs.unpadded().encode_s(count),
            "train_one_tenant_ms": 1e3 * costs.train_s(count),
            "act_one_tenant_ms": 1e3 * costs.act_s(count),
        }
        for count in (1, 3, 16, 33, 64)
    ]


def draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's
    """Draw GPU-hours, waits and fairness over the number of tenants."""
    if "Simulated cost" not in result.tables:
        return
    figure.suptitle("Simulation: one shared service on up to 8 GPUs", fontsize=11)
    panels = figure.subplots(1, 3)
    lines = (
        (
            "Simulated cost",
            "isolated over shared",
            ("gpu_hours_ratio_conventional", "gpu_hours_ratio_reuse", "busy_ratio_conventional", "busy_ratio_reuse"),
        ),
        (
            "Simulated waits",
            "queueing delay, ms",
            ("predict_wait_p50_ms", "predict_wait_p99_ms", "group_wait_p50_ms", "group_wait_p99_ms"),
        ),
        ("Simulated fairness", "Jain's index", ("jain_weighted_service", "jain_of_speeds")),
    )
    for axes, (table, label, columns) in zip(panels, lines, strict=True):
        rows = result.tables[table]
        for column in columns:
            axes.plot([row["tenants"] for row in rows], [row[column] for row in rows], "o-", label=column, markersize=3)
        axes.set(xscale="log", xlabel="tenants (simulated)", ylabel=label)
        axes.legend(fontsize=7)
    panels[0].axhline(1.0, color="gray", linestyle="--", linewidth=1)
    panels[0].set_ylim(bottom=0)
    panels[1].set_yscale("symlog", linthresh=1.0)
    panels[1].set_ylim(bottom=0)
    panels[2].set_ylim(0, 1.05)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this simulation's own options."""
    parser.add_argument("--costs", metavar="FILE", help="JSON with measured costs; else those assumed for a GPU node")
    parser.add_argument("--check", metavar="TRACE", help="JSON of a trace: predicted against measured busy seconds")


STUDY = Study(
    name="simulation/run",
    title="Simulation: how sharing grows from 2 to 1000 tenants",
    question=QUESTION,
    measure=measure,
    draw=draw,
    devices=("cpu",),
    add_options=add_options,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
