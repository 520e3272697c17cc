"""Epochs over the same data, with and without keeping prefixes; and the way from rollout to trainer.

python -m benchmarks.core.prefix_reuse [--device cuda] [--quick] [--json OUT] [--page MD]
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.core import world
from benchmarks.core.experience import rollout_rows
from benchmarks.core.kv_expert import KvExpertSpec
from benchmarks.core.world import MIDDLE, Trainer
from benchmarks.harness import Benchmark, Measured, Options, Study, clock_for, measure_paired
from joynexus.models.backbone import Backbone
from joynexus.types import TrainingBatch

CONVENTIONAL = "isolated, conventional"
REUSE = "isolated, with our own reuse"
GROUPING = "shared, without reuse"
SHARED = "shared"
NOTES = (
    (
        "*isolated, conventional*: each tenant alone, every epoch encodes its prefixes again. *isolated, with our own "
        "reuse*: each tenant alone with joynexus' prefix store. *shared, without reuse*: group steps, no store. "
        "*shared*: as the product does it."
    ),
    (
        "Every round begins with empty stores and fresh modules, so the first epoch always encodes. Times are of whole "
        "training steps (hash, encode, loss, gradient, AdamW); ratios are medians of rounds."
    ),
)
Data = Mapping[str, Sequence[TrainingBatch]]
"""Micro-batches of each tenant."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    size: str
    tenants: int = 8
    epochs: Sequence[int]
    batch: int
    micro_batches: int
    rounds: int


@dataclass(kw_only=True)
class Side:
    """One way to train all tenants; anew in every round."""

    build: Callable[[], list[Trainer]]
    data: Data
    epochs: int
    trainers: list[Trainer] = field(default_factory=list[Trainer])

    def prepare(self) -> None:
        """Open fresh slots beside empty stores."""
        self.trainers = self.build()

    def train(self) -> None:
        """Make every step of every epoch."""
        for _ in range(self.epochs):
            for index in range(len(next(iter(self.data.values())))):
                for trainer in self.trainers:
                    trainer.step({tenant: self.data[tenant][index] for tenant in trainer.tenants})

    @property
    def encoded_per_sample(self) -> float:
        """Prefixes encoded for each row that was learnt from."""
        return sum(each.encoded for each in self.trainers) / sum(each.samples for each in self.trainers)


def plan_for(options: Options) -> Plan:
    """Choose sizes that take about 8 minutes, or with ``--quick`` one."""
    size = options.extra.get("backbone") or ("qwen3vl-2b" if options.device == "cuda" else "15M")
    if options.quick:
        return Plan(size=size, epochs=(1, 4), batch=1, micro_batches=1, rounds=3)
    return Plan(size=size, epochs=(1, 2, 4, 8), batch=2, micro_batches=2, rounds=5)


def measure(options: Options) -> Measured:
    """Measure epochs on data of each tenant's own, epochs on one dataset of all, and the way from the rollout."""
    torch.set_num_threads(options.threads)
    plan = plan_for(options)
    backbone = world.load(plan.size, MIDDLE, device=options.device, seed=options.seed)
    own = {
        tenant: [_batch(plan, options.seed, index, part) for part in range(plan.micro_batches)]
        for index, tenant in enumerate(world.names(plan.tenants))
    }
    same: Data = dict.fromkeys(own, own["tenant0"])
    epochs = [_epochs(plan, backbone, own, count, options, "each its own") for count in plan.epochs]
    epochs.append(_epochs(plan, backbone, same, 4, options, "one for all"))
    rollout = rollout_rows(
        backbone,
        tenants=plan.tenants,
        decisions=plan.batch * plan.micro_batches,
        rounds=plan.rounds,
        options=options,
    )
    four = next(row for row in epochs if row["epochs"] == 4 and row["data"] == "each its own")  # noqa: PLR2004
    carried = next(row for row in rollout if row["epochs"] == 4)  # noqa: PLR2004
    headline = {
        "step_ratio_8_tenants_4_epochs": float(four["over conventional"]),
        "step_ratio_8_tenants_4_epochs_over_reuse": float(four["over reuse"]),
        "step_ratio_8_tenants_4_epochs_same_data": float(epochs[-1]["over conventional"]),
        "rollout_ratio_4_epochs": float(carried["over conventional"]),
        "largest_difference": max(float(row["difference"]) for row in [*epochs, *rollout]),
    }
    return Measured(headline=headline, tables={"Epochs": epochs, "Rollout to trainer": rollout}, notes=NOTES)


def _batch(plan: Plan, seed: int, tenant: int, part: int) -> TrainingBatch:
    return world.batch(MIDDLE, plan.batch, seed=seed + 1000 * tenant + part)


def _epochs(plan: Plan, backbone: Backbone, data: Data, epochs: int, options: Options, kind: str) -> dict[str, Any]:
    layers, heads, head_dim = backbone.kv_shape
    module = KvExpertSpec(kv_width=heads * head_dim, num_layers=min(layers, 4))
    policies = dict.fromkeys(data, world.policy(MIDDLE, module))
    single = world.without_dummies(backbone, plan.batch)
    seed = options.seed

    def together(*, is_reusing: bool) -> Callable[[], list[Trainer]]:
        return lambda: [Trainer(backbone, policies, is_reusing=is_reusing, seed=seed)]

    def apart(*, is_reusing: bool) -> Callable[[], list[Trainer]]:
        return lambda: world.isolated(single, policies, is_reusing=is_reusing, seed=seed)

    builds = {
        CONVENTIONAL: apart(is_reusing=False),
        REUSE: apart(is_reusing=True),
        GROUPING: together(is_reusing=False),
        SHARED: together(is_reusing=True),
    }
    sides = {name: Side(build=build, data=data, epochs=epochs) for name, build in builds.items()}
    paired = measure_paired(
        {name: side.train for name, side in sides.items()},
        clock_for(options.device),
        rounds=plan.rounds,
        prepare=lambda name: sides[name].prepare(),
    )
    row = {
        "data": kind,
        "epochs": epochs,
        **{f"{name}, s": paired.typical(name) for name in sides},
        "over conventional": paired.ratio(CONVENTIONAL, SHARED).median,
        "over reuse": paired.ratio(REUSE, SHARED).median,
        "by grouping alone": paired.ratio(CONVENTIONAL, GROUPING).median,
        "encoded per sample": sides[SHARED].encoded_per_sample,
        "difference": world.largest_difference(sides[SHARED].trainers[0], sides[CONVENTIONAL].trainers),
    }
    print(f"{kind}, {epochs} epochs: {row['over conventional']:.2f} times", file=sys.stderr, flush=True)
    return row


def _draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's Figure
    axes = figure.subplots(1, 2)
    rows = [row for row in result.tables["Epochs"] if row["data"] == "each its own"]
    for label in ("over conventional", "over reuse", "by grouping alone"):
        axes[0].plot([row["epochs"] for row in rows], [row[label] for row in rows], "o-", label=label)
    axes[0].set_xlabel("epochs")
    axes[0].set_ylabel("times faster")
    axes[0].set_title("8 tenants, whole training step, KV expert")
    rows = result.tables["Rollout to trainer"]
    for label in ("over conventional", "over reuse"):
        axes[1].plot([row["epochs"] for row in rows], [row[label] for row in rows], "o-", label=label)
    axes[1].set_xlabel("PPO epochs")
    axes[1].set_title("rollout and update, features carried")
    for axis in axes:
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.legend()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", choices=[*world.SIZES], help="in place of the device's own")


STUDY = Study(
    name="core/prefix_reuse",
    title="Prefix reuse",
    question=(
        "How much faster is a whole training step where no prefix is encoded twice: over epochs of supervised "
        "learning, and on the way from a rollout to the PPO epochs on it?"
    ),
    measure=measure,
    draw=_draw,
    add_options=_add_options,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
