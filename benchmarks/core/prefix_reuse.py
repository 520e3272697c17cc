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
from benchmarks.core.world import Scene, Trainer
from benchmarks.harness import Benchmark, Measured, Options, Study, clock_for, measure_paired
from joynexus.models.backbone import Backbone
from joynexus.types import TrainingBatch

CONVENTIONAL = "isolated, conventional"
REUSE = "isolated, with our own reuse"
GROUPING = "shared, without reuse"
SHARED = "shared"
OWN = "each its own"
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
ROBOT = Scene(name="robot", cameras=3, side=256, text_tokens=48)
"""Three cameras of 64 tokens and an instruction, as SmolVLA has them: 240 tokens."""
Data = Mapping[str, TrainingBatch]
"""What each tenant learns from, epoch after epoch."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    size: str
    """Backbone."""
    scene: Scene = ROBOT
    tenants: int = 8
    epochs: Sequence[int]
    batch: int
    rounds: int
    is_whole: bool
    """Whether one dataset for all, and grouping without the store, are measured as well."""


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
            for trainer in self.trainers:
                trainer.step({tenant: self.data[tenant] for tenant in trainer.tenants})

    @property
    def encoded_per_sample(self) -> float:
        """Prefixes encoded for each row that was learnt from."""
        return sum(each.encoded for each in self.trainers) / sum(each.samples for each in self.trainers)


def plan_for(options: Options) -> Plan:
    """Choose the points: about 8 minutes of them, or with ``--quick`` those of the headline."""
    size = options.extra.get("backbone") or ("qwen3vl-2b" if options.device == "cuda" else "37M")
    if options.quick:
        return Plan(size=size, epochs=(4,), batch=1, rounds=2, is_whole=False)
    return Plan(size=size, epochs=(1, 2, 4, 8), batch=2, rounds=3, is_whole=True)


def measure(options: Options) -> Measured:
    """Measure epochs on data of each tenant's own, epochs on one dataset of all, and the way from the rollout."""
    torch.set_num_threads(options.threads)
    plan = plan_for(options)
    backbone = world.load(plan.size, plan.scene, device=options.device, seed=options.seed)
    own = {
        tenant: world.batch(plan.scene, plan.batch, seed=options.seed + index)
        for index, tenant in enumerate(world.names(plan.tenants))
    }
    epochs = [epochs_row(plan, backbone, own, count, options) for count in plan.epochs]
    if plan.is_whole:
        epochs.append(epochs_row(plan, backbone, dict.fromkeys(own, own["tenant0"]), 4, options))
    rollout = rollout_rows(
        backbone,
        tenants=plan.tenants,
        decisions=plan.batch,
        rounds=plan.rounds if plan.is_whole else 1,
        options=options,
        epochs=(1, 4) if plan.is_whole else (4,),
    )
    four = next(row for row in epochs if row["epochs"] == 4 and row["data"] == OWN)  # noqa: PLR2004
    headline = {
        "step_ratio_8_tenants_4_epochs": float(four["over conventional"]),
        "step_ratio_8_tenants_4_epochs_over_reuse": float(four["over reuse"]),
        "rollout_ratio_4_epochs": float(rollout[-1]["over conventional"]),
        "largest_difference": max(float(row["difference"]) for row in [*epochs, *rollout]),
    }
    if plan.is_whole:
        headline["step_ratio_8_tenants_4_epochs_same_data"] = float(epochs[-1]["over conventional"])
    return Measured(headline=headline, tables={"Epochs": epochs, "Rollout to trainer": rollout}, notes=NOTES)


def epochs_row(plan: Plan, backbone: Backbone, data: Data, epochs: int, options: Options) -> dict[str, Any]:
    """Measure all sides over some epochs.

    Args:
        plan: Scene and rounds.
        backbone: Gives K/V.
        data: One micro-batch per tenant; the same one for all is one dataset for all.
        epochs: How often each is learnt from.
        options: Seed and device.

    Returns:
        A row of the table.
    """
    layers, heads, head_dim = backbone.kv_shape
    module = KvExpertSpec(kv_width=heads * head_dim, num_layers=min(layers, 4))
    policies = dict.fromkeys(data, world.policy(plan.scene, module))
    single, seed = world.without_dummies(backbone, plan.batch), options.seed
    builds: dict[str, Callable[[], list[Trainer]]] = {
        CONVENTIONAL: lambda: world.isolated(single, policies, is_reusing=False, seed=seed),
        REUSE: lambda: world.isolated(single, policies, is_reusing=True, seed=seed),
        SHARED: lambda: [Trainer(backbone, policies, is_reusing=True, seed=seed)],
    }
    if plan.is_whole:
        builds[GROUPING] = lambda: [Trainer(backbone, policies, is_reusing=False, seed=seed)]
    sides = {name: Side(build=build, data=data, epochs=epochs) for name, build in builds.items()}
    warm = Side(build=builds[SHARED], data=data, epochs=1)
    warm.prepare()
    warm.train()
    paired = measure_paired(
        {name: side.train for name, side in sides.items()},
        clock_for(options.device),
        rounds=plan.rounds,
        warmups=0,
        prepare=lambda name: sides[name].prepare(),
    )
    row: dict[str, Any] = {
        "data": OWN if len({id(each) for each in data.values()}) > 1 else "one for all",
        "epochs": epochs,
        **{f"{name}, s": paired.typical(name) for name in sides},
        "over conventional": paired.ratio(CONVENTIONAL, SHARED).median,
        "over reuse": paired.ratio(REUSE, SHARED).median,
        "by grouping alone": paired.ratio(CONVENTIONAL, GROUPING).median if plan.is_whole else None,
        "encoded per sample": sides[SHARED].encoded_per_sample,
        "difference": world.largest_difference(sides[SHARED].trainers[0], sides[CONVENTIONAL].trainers),
    }
    print(f"{row['data']}, {epochs} epochs: {row['over conventional']:.2f} times", file=sys.stderr, flush=True)
    return row


def _draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's Figure
    axes = figure.subplots(1, 2)
    rows = [row for row in result.tables["Epochs"] if row["data"] == OWN]
    for label in ("over conventional", "over reuse", "by grouping alone"):
        if rows[0][label] is not None:
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
