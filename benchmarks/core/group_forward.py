"""Rows of many tenants through the frozen backbone at once, against each tenant alone in turn.

python -m benchmarks.core.group_forward [--device cuda] [--quick] [--json OUT] [--page MD]
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.core import world
from benchmarks.core.world import LONG, MIDDLE, SHORT, Scene, Trainer
from benchmarks.harness import Benchmark, Measured, Options, Row, Study, clock_for, measure_paired
from joynexus.models.backbone import Backbone
from joynexus.models.policy import prepare_prefix
from joynexus.models.prefix import PrefixBatch
from joynexus.testing.model_inputs import UNCHANGED

GROUPED, ALONE = "grouped", "alone"
SIGNATURE = "benchmark"
ROBOT = Scene(name="robot", cameras=2, side=256, text_tokens=32)
"""Two cameras of 256 pixels and an instruction, as GR00T sees them through Qwen3-VL: 160 tokens."""
WIDE = Scene(name="long", cameras=2, side=512, text_tokens=48)

NOTES = (
    (
        "*alone* runs each tenant's rows in turn, without dummies: isolated, conventional. All prefixes are new, so "
        "*isolated, with our own reuse* is the same here; see `prefix_reuse` for what reuse gives."
    ),
    (
        "*ratio* is time alone over time grouped, the median of rounds, with its quartiles; *difference* is the "
        "largest distance between a number grouped and alone (features, or parameters after the steps)."
    ),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration."""

    size: str
    """Backbone."""
    scene: Scene
    tenants: int
    batch: int
    head: str | None = None
    """Action module of a whole training step; None measures the forward stage alone."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    points: Sequence[Point]
    rounds: int
    budget_s: float
    """Measured seconds at which no further round is begun of a point that is not in the headline."""
    headline: dict[str, Point]
    """Name of a ratio, and where it is found."""


def plan_for(options: Options) -> Plan:
    """Choose the points: all of them, or with ``--quick`` those of the headline and their neighbours."""
    size = options.extra.get("backbone") or ("qwen3vl-2b" if options.device == "cuda" else "37M")
    if size.startswith("qwen3vl"):
        main, long = (ROBOT, WIDE) if size.endswith("2b") else (MIDDLE, LONG)
        headline = {"forward_ratio_8x1_qwen3vl": Point(size=size, scene=main, tenants=8, batch=1)}
        scenes, grid = (SHORT, main, long), size
    else:
        headline = {"forward_ratio_8x1_short_3M": Point(size="3M", scene=SHORT, tenants=8, batch=1)}
        scenes, grid = (SHORT, MIDDLE, LONG), "3M"
        main, long = SHORT, LONG
    headline["forward_ratio_8x1_short"] = Point(size=size, scene=SHORT, tenants=8, batch=1)
    middle = "15M" if size == "37M" else size  # long forwards of the largest would take most of the time
    headline["forward_ratio_8x1_long"] = Point(size=middle, scene=long, tenants=8, batch=1)
    headline["step_ratio_8x1"] = Point(size=size, scene=main, tenants=8, batch=1, head="oft")
    points = list(headline.values())
    points += _quick_grid(grid, scenes) if options.quick else _whole_grid(grid, scenes)
    chosen = sorted(dict.fromkeys(points), key=lambda each: (each.size, each.scene.length, each.scene.name))
    rounds, budget_s = (7, 1.5) if options.quick else (9, 4.0 if options.device == "cuda" else 8.0)
    return Plan(points=chosen, rounds=rounds, budget_s=budget_s, headline=headline)


def _whole_grid(size: str, scenes: Sequence[Scene]) -> Iterator[Point]:
    for scene in scenes:
        for tenants in (1, 2, 4, 8, 16):
            for rows in (1, 2, 4, 8):
                yield Point(size=size, scene=scene, tenants=tenants, batch=rows)
            if scene is not scenes[1]:
                for head in world.HEADS:
                    yield Point(size=size, scene=scene, tenants=tenants, batch=1, head=head)


def _quick_grid(size: str, scenes: Sequence[Scene]) -> Iterator[Point]:
    for tenants, rows in ((2, 1), (8, 1), (8, 4)):
        yield Point(size=size, scene=scenes[0], tenants=tenants, batch=rows)
    yield Point(size=size, scene=scenes[-1], tenants=8, batch=2)
    for head in world.HEADS:
        yield Point(size=size, scene=scenes[0], tenants=8, batch=1, head=head)


def measure(options: Options) -> Measured:
    """Measure every point of the plan."""
    torch.set_num_threads(options.threads)
    plan = plan_for(options)
    rows: dict[Point, dict[str, Any]] = {}
    loaded: tuple[object, Backbone] | None = None
    for point in plan.points:
        # One backbone at a time; SmolVLM's depends on the size of the frames.
        key = (point.size, point.scene.side if point.size in world.SMOLVLM else 0)
        if loaded is None or loaded[0] != key:
            loaded = None
            backbone = world.load(point.size, point.scene, device=options.device, seed=options.seed)
            loaded = (key, backbone)
        rows[point] = _measure_point(point, loaded[1], plan, options)
        print(_line(point, rows[point]), file=sys.stderr, flush=True)
    headline = {name: float(rows[point]["ratio"]) for name, point in plan.headline.items()}
    headline["largest_difference"] = max(float(each["difference"]) for each in rows.values())
    forward = [row for point, row in rows.items() if point.head is None]
    whole = [row for point, row in rows.items() if point.head is not None]
    return Measured(
        headline=headline,
        tables={"Forward stage": forward, "Whole step": whole},
        notes=NOTES,
    )


def _measure_point(point: Point, backbone: Backbone, plan: Plan, options: Options) -> dict[str, Any]:
    works = _forward if point.head is None else _step
    grouped, alone, difference = works(point, backbone, options.seed)
    paired = measure_paired(
        {GROUPED: grouped, ALONE: alone},
        clock_for(options.device),
        rounds=plan.rounds,
        budget_s=None if point in plan.headline.values() else plan.budget_s,
    )
    ratio, samples = paired.ratio(ALONE, GROUPED), point.tenants * point.batch
    return {
        "backbone": point.size,
        "tokens": point.scene.length,
        "head": point.head or "-",
        "tenants": point.tenants,
        "batch": point.batch,
        "alone_ms": paired.typical(ALONE) * 1e3,
        "grouped_ms": paired.typical(GROUPED) * 1e3,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "samples_per_s": samples / paired.typical(GROUPED),
        "difference": difference(),
    }


def _forward(
    point: Point, backbone: Backbone, seed: int
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], float]]:
    """The forward stage: join, encode, and give every tenant a copy of its rows, as the engine does."""
    policy = world.policy(point.scene, world.HEADS["oft"])
    parts: list[PrefixBatch] = []
    for tenant in range(point.tenants):
        seen = world.observation(point.scene, point.batch, seed=seed + tenant)
        parts.append(prepare_prefix(backbone, policy, seen, UNCHANGED).to(backbone.device))
    single = world.without_dummies(backbone, point.batch)

    def grouped() -> list[Tensor]:
        features = backbone.prefix(world.stacked(parts), SIGNATURE)
        if len(parts) == 1:
            return [features.hidden]
        starts = range(0, len(features), point.batch)
        return [features.slice(start, start + point.batch).map(Tensor.clone).hidden for start in starts]

    def alone() -> list[Tensor]:
        return [single.prefix(part, SIGNATURE).hidden for part in parts]

    return grouped, alone, lambda: world.tensor_difference(grouped(), alone())


def _step(
    point: Point, backbone: Backbone, seed: int
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], float]]:
    """A whole training step of every tenant: hash, encode, loss, gradient, AdamW."""
    assert point.head is not None
    policies = dict.fromkeys(world.names(point.tenants), world.policy(point.scene, world.HEADS[point.head]))
    data = {name: world.batch(point.scene, point.batch, seed=seed + index) for index, name in enumerate(policies)}
    shared = Trainer(backbone, policies, is_reusing=False, seed=seed)
    single = world.without_dummies(backbone, point.batch)
    trainers = world.isolated(single, policies, is_reusing=False, seed=seed)

    def alone() -> None:
        for trainer in trainers:
            (tenant,) = trainer.tenants
            trainer.step({tenant: data[tenant]})

    return lambda: shared.step(data), alone, lambda: world.largest_difference(shared, trainers)


def _line(point: Point, row: Row) -> str:
    return (
        f"{point.size} {point.scene.length} tokens, {point.tenants} x {point.batch}, {point.head or 'forward'}: "
        f"{row['ratio']:.2f} times"
    )


def _draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's Figure
    rows = result.tables["Forward stage"]
    sizes = list(dict.fromkeys((row["backbone"], row["tokens"]) for row in rows))
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, (size, tokens) in zip(axes, sizes, strict=True):
        own = [row for row in rows if (row["backbone"], row["tokens"]) == (size, tokens)]
        for batch in sorted({int(row["batch"] or 0) for row in own}):
            line = sorted((row for row in own if row["batch"] == batch), key=lambda row: int(row["tenants"] or 0))
            axis.plot([row["tenants"] for row in line], [row["ratio"] for row in line], "o-", label=f"batch {batch}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{size}, {tokens} tokens")
        axis.set_xlabel("tenants")
    axes[0].set_ylabel("time alone / time grouped")
    axes[-1].legend()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", choices=[*world.SIZES], help="of the headline, in place of the device's own")


STUDY = Study(
    name="core/group_forward",
    title="Group forward",
    question=(
        "How much faster is one forward of the shared backbone over the rows of many tenants than a forward for each "
        "tenant in turn; in the forward stage, and in a whole training step?"
    ),
    measure=measure,
    draw=_draw,
    add_options=_add_options,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
