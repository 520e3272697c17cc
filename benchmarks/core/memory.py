"""Resident bytes of 1 to 16 tenants who share a backbone, against as many trainers of their own.

    python -m benchmarks.core.memory [--device cuda] [--quick] [--json OUT] [--page MD]

On a CPU every count is the private memory of a fresh process, above what Python and the libraries take by themselves;
on a GPU it is what torch has allocated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.core import world
from benchmarks.core.gauge import Gauge
from benchmarks.core.world import MIDDLE, Trainer
from benchmarks.environment import ROOT
from benchmarks.harness import Benchmark, Measured, Options, Row, Study
from joynexus.specs.action_module import FlowMatchingModuleSpec
from joynexus.specs.tenant import PolicySpec

STEPS = 2
"""Training steps before memory is read: moments are in use, and gradients have come and gone."""
BATCH = 2
OPTIMIZER_COPIES = 2
"""Moments of AdamW per parameter."""
MIB = 2**20
NOTES = (
    (
        "*bound* is backbone + tenants x (module + AdamW's two moments); *overhead* is what is measured over that "
        "bound. *isolated* is one trainer with one tenant, measured, times the number of tenants; with the prefix "
        "store empty, *isolated, conventional* and *isolated, with our own reuse* take the same memory."
    ),
    (
        "The prefix store is switched off here: it has a byte budget of its own, divided among whoever shares it. "
        "*accounted* is what the engine reserves when it admits tenants: a slot at its peak: five numbers a parameter."
    ),
)


def measure(options: Options) -> Measured:
    """Measure each number of tenants in a fresh place."""
    counts = (1, 16) if options.quick else (1, 2, 4, 8, 16)
    found = {count: _resident(count, options) for count in counts}
    alone = found[1]["resident"]
    rows: list[Row] = []
    for count, each in found.items():
        bound = each["backbone"] + count * each["module"] * (1 + OPTIMIZER_COPIES)
        rows.append(
            {
                "tenants": count,
                "backbone MiB": each["backbone"] / MIB,
                "module MiB": each["module"] / MIB,
                "bound MiB": bound / MIB,
                "shared MiB": each["resident"] / MIB,
                "peak MiB": each["peak"] / MIB,
                "accounted MiB": each["accounted"] / MIB,
                "isolated MiB": count * alone / MIB,
                "overhead": each["resident"] / bound - 1,
                "isolated over shared": count * alone / each["resident"],
            }
        )
    last, difference = rows[-1], max(each["difference"] for each in found.values())
    return Measured(
        headline={
            "memory_overhead_16_tenants": 1 + float(last["overhead"] or 0.0),
            "memory_ratio_16_tenants": float(last["isolated over shared"] or 0.0),
            "largest_difference": difference,
        },
        tables={"Resident bytes": rows},
        notes=NOTES,
    )


def _resident(tenants: int, options: Options) -> dict[str, float]:
    if options.device == "cuda":
        return occupy(tenants, options)
    command = [sys.executable, "-m", "benchmarks.core.memory", "--worker", str(tenants), "--seed", str(options.seed)]
    if options.extra.get("backbone"):
        command += ["--backbone", str(options.extra["backbone"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"memory of {tenants} tenants: the worker ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def occupy(tenants: int, options: Options) -> dict[str, float]:
    """Train some tenants, and tell what is resident: bytes by name, and how far the first tenant is from itself alone.

    Args:
        tenants: How many share the backbone.
        options: Seed and device.
    """
    torch.set_num_threads(1)
    size = options.extra.get("backbone") or ("qwen3vl-2b" if options.device == "cuda" else "15M")
    gauge = Gauge(options.device, _warm_up)
    backbone = world.load(size, MIDDLE, device=options.device, seed=options.seed)
    width = 1024 if size == "qwen3vl-2b" else 256
    module = FlowMatchingModuleSpec(hidden_dim=width, num_heads=8)
    policies = dict.fromkeys(world.names(tenants), world.policy(MIDDLE, module))
    trainer = _trained(backbone, policies, options.seed)
    resident, peak = gauge.resident(), gauge.peak()
    statuses = trainer.engine.tenants().values()
    weights = sum(each.nbytes for each in (*backbone.parameters(), *backbone.buffers()))
    first = world.names(1)
    lone = _trained(world.without_dummies(backbone, BATCH), {name: policies[name] for name in first}, options.seed)
    return {
        "backbone": weights,
        "module": next(iter(statuses)).num_parameters * 4,
        "accounted": weights + sum(each.slot_bytes for each in statuses),
        "resident": resident,
        "peak": peak,
        "difference": world.largest_difference(trainer, [lone]),
    }


def _trained(backbone: Any, policies: Mapping[str, PolicySpec], seed: int) -> Trainer:  # noqa: ANN401
    trainer = Trainer(backbone, policies, is_reusing=False, seed=seed)
    for step in range(STEPS):
        trainer.step(
            {name: world.batch(MIDDLE, BATCH, seed=seed + 100 * index + step) for index, name in enumerate(policies)}
        )
    return trainer


def _warm_up() -> None:
    """Train a tiny world, so that libraries, thread pools and kernels are loaded before anything is counted."""
    tiny = world.load("qwen3vl-tiny", MIDDLE, device="cpu", seed=0)
    small = world.load("3M", MIDDLE, device="cpu", seed=0)
    for backbone in (tiny, small):
        _trained(backbone, {"tenant0": world.policy(MIDDLE, FlowMatchingModuleSpec())}, 0)


def _draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's Figure
    axis = figure.subplots()
    rows = result.tables["Resident bytes"]
    for label in ("isolated MiB", "shared MiB", "bound MiB"):
        axis.plot([row["tenants"] for row in rows], [row[label] for row in rows], "o-", label=label)
    axis.set_xlabel("tenants")
    axis.set_ylabel("MiB")
    axis.legend()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", choices=[*world.SIZES], help="in place of the device's own")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)


STUDY = Study(
    name="core/memory",
    title="Memory",
    question="How many bytes do 1 to 16 tenants take who share one backbone, against as many trainers of their own?",
    measure=measure,
    draw=_draw,
    add_options=_add_options,
)


def main() -> int:
    """Run the benchmark, or be one of its processes."""
    options = STUDY.parse(sys.argv[1:])
    if options.extra["worker"] is None:
        return STUDY.main()
    print(json.dumps(occupy(int(options.extra["worker"]), options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
