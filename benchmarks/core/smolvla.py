"""Eight SmolVLA tenants on one SmolVLM backbone of the real size, random weights, in the memory of a laptop.

    python -m benchmarks.core.smolvla [--device cuda] [--quick] [--json OUT] [--page MD]

The backbone is SmolVLM2-500M cut to 16 layers, as SmolVLA cuts it, which leaves 0.30 B parameters; or the same with
wider MLPs, so that the 16 layers hold 0.50 B. Each tenant's expert has SmolVLA's own size, about 100 M parameters in
float32.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.core import world
from benchmarks.core.gauge import held
from benchmarks.core.world import Trainer
from benchmarks.environment import ROOT
from benchmarks.harness import Benchmark, Measured, Options, Row, Study, clock_for, measure_paired
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec
from joynexus.specs.vla_modules import SmolVlaModuleSpec
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec
from joynexus.training.optimizer import Moments
from joynexus.types import Observation, TrainingBatch

Case = tuple[int, str, str, Moments]
"""Tenants, size of the backbone, type of the backbone, type of the moments."""
GIB = 2**30
LAYERS = 16
STATE_DIM, ACTION_DIM, HORIZON, TOKENS = 8, 7, 50, 48
SIDE, QUICK_SIDE = 512, 256
"""Of a frame in pixels: SmolVLA's, and one with a quarter of its tokens."""
CONFIG: dict[str, Any] = {
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 960,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}
"""SmolVLM2-500M's, with the layers that SmolVLA keeps."""
WIDTHS = {"0.3 B": 2560, "0.5 B": 6912}
"""Of the layers' MLPs, for the backbone's number of parameters: SmolVLM2-500M's own, and one that makes up for the
layers that were cut. Keys, values and hidden states, which the experts read, are of one size."""
CASES: tuple[Case, ...] = (
    (1, "0.5 B", "bfloat16", "bfloat16"),
    (8, "0.5 B", "bfloat16", "bfloat16"),
    (8, "0.3 B", "bfloat16", "bfloat16"),
    (8, "0.5 B", "bfloat16", "float32"),
    (8, "0.5 B", "float32", "float32"),
)
QUICK_CASE: Case = (4, "0.5 B", "bfloat16", "bfloat16")
NOTES = (
    (
        "*0.3 B* is SmolVLM2-500M as SmolVLA cuts it; *0.5 B* has wider MLPs in its 16 layers. Random weights. A "
        "tenant's expert has 99.9 M parameters."
    ),
    (
        "*resident* and *peak* are of the whole process, Python and its libraries included, peak with all that a step "
        "takes for a moment. *isolated* is the process with one tenant, times the number of tenants."
    ),
    (
        "*step, grouped*: every tenant's rows go through the backbone in one forward, then each tenant's own part. "
        "*step, one by one*: the same calls, each in a group of its own, as on a trainer of its own. Prefixes are "
        "encoded in both, nothing is reused. CPU seconds on a CPU, CUDA events on a GPU; ratios are of one process."
    ),
    "The largest difference is between parameters of a tenant trained in the group and of the same tenant one by one.",
)


def measure(options: Options) -> Measured:
    """Measure each case in a fresh process."""
    found = {case: _in_process(case, options) for case in ((QUICK_CASE,) if options.quick else CASES)}
    alone, like = found.get(CASES[0]), CASES[0][1:]
    rows: list[Row] = [
        {
            "tenants": tenants,
            "parameters": size,
            "backbone": dtype,
            "moments": moments,
            "backbone GiB": each["backbone"] / GIB,
            "one module GiB": each["module"] / GIB,
            "resident GiB": each["resident"] / GIB,
            "peak GiB": each["peak"] / GIB,
            "isolated GiB": tenants * alone["resident"] / GIB if alone and (size, dtype, moments) == like else None,
            "step, grouped s": each["grouped"],
            "step, one by one s": each["one_by_one"],
            "one by one over grouped": each["ratio"],
        }
        for (tenants, size, dtype, moments), each in found.items()
    ]
    shown = QUICK_CASE if options.quick else CASES[1]
    told, tenants = found[shown], shown[0]
    return Measured(
        headline={
            f"peak_gib_{tenants}_tenants": told["peak"] / GIB,
            f"resident_gib_{tenants}_tenants": told["resident"] / GIB,
            f"step_ratio_{tenants}_tenants": told["ratio"],
            "largest_difference": told["difference"],
        },
        tables={"SmolVLA tenants on a SmolVLM of the real size": rows},
        notes=(
            *NOTES,
            *(
                [f"Quick: four tenants, and frames of {QUICK_SIDE} x {QUICK_SIDE} in place of {SIDE} x {SIDE}."]
                * options.quick
            ),
        ),
    )


def _in_process(case: Case, options: Options) -> dict[str, float]:
    if options.device == "cuda":
        return occupy(case, options)
    command = [sys.executable, "-m", "benchmarks.core.smolvla", "--worker", ",".join(map(str, case))]
    command += ["--seed", str(options.seed), "--threads", str(options.threads), *(["--quick"] * options.quick)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{case}: the worker ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def occupy(case: Case, options: Options) -> dict[str, float]:
    """Train some tenants together and one by one, and tell bytes and seconds by name."""
    tenants, size, dtype, moments = case
    torch.set_num_threads(options.threads)
    side = QUICK_SIDE if options.quick else SIDE
    backbone = load_backbone(_backbone_spec(size, dtype, side, options.seed), options.device)
    trainer = _trainer(backbone, tenants, moments, options.seed, side=side)
    batches = {name: _batch(side, options.seed + index) for index, name in enumerate(trainer.tenants)}
    if not options.quick:
        trainer.step(batches)  # kernels are loaded
    sides = {
        "grouped": lambda: trainer.step(batches),
        "one_by_one": lambda: [trainer.step({name: each}) for name, each in batches.items()],
    }
    paired = measure_paired(sides, clock_for(options.device), rounds=1 if options.quick else 3, warmups=0)
    resident, peak = held(options.device)
    module = next(iter(trainer.engine.tenants().values())).num_parameters * 4
    del trainer
    return {
        "backbone": sum(each.nbytes for each in (*backbone.parameters(), *backbone.buffers())),
        "module": module,
        "resident": resident,
        "peak": peak,
        "grouped": paired.typical("grouped"),
        "one_by_one": paired.typical("one_by_one"),
        "ratio": paired.ratio("one_by_one", "grouped").median,
        "difference": _difference(backbone, moments, options.seed) if tenants > 1 and not options.quick else 0.0,
    }


def _backbone_spec(size: str, dtype: str, side: int, seed: int) -> SmolVlmBackboneSpec:
    config = CONFIG | {
        "text_config": CONFIG["text_config"] | {"intermediate_size": WIDTHS[size]},
        "vision_config": CONFIG["vision_config"] | {"image_size": side},
    }
    return SmolVlmBackboneSpec.model_validate(
        {"init": "random", "config": config, "seed": seed, "dtype": dtype, "chunk_size": 8}
        | {"embedding_scale": "sqrt_dim", "rope_base": 10000.0}
    )


def _trainer(backbone: Backbone, tenants: int, moments: Moments, seed: int, *, side: int) -> Trainer:
    seen = ObservationSpec(cameras=("front",), image_size=(side, side), state_dim=STATE_DIM, max_prompt_tokens=TOKENS)
    policy = PolicySpec(
        backbone=world.BACKBONE,
        observation=seen,
        action=ActionSpec(dim=ACTION_DIM, horizon=HORIZON, num_action_steps=HORIZON, normalization="identity"),
        action_module=SmolVlaModuleSpec(num_layers=LAYERS),
    )
    policies = dict.fromkeys(world.names(tenants), policy)
    return Trainer(backbone, policies, is_reusing=False, seed=seed, moments=moments)


def _batch(side: int, seed: int) -> TrainingBatch:
    """Draw one row: the batch size at which sharing a forward matters most."""
    draw = np.random.default_rng(seed)
    return TrainingBatch(
        observation=Observation(
            images=draw.integers(0, 256, (1, 1, side, side, 3), dtype=np.uint8),
            image_mask=np.ones((1, 1), dtype=np.bool_),
            state=draw.standard_normal((1, STATE_DIM), dtype=np.float32),
            instructions=("push the cube",),
        ),
        actions=draw.uniform(-0.9, 0.9, (1, HORIZON, ACTION_DIM)).astype(np.float32),
        action_is_pad=np.zeros((1, HORIZON), dtype=np.bool_),
        sample_ids=(str(seed),),
    )


def _difference(backbone: Backbone, moments: Moments, seed: int) -> float:
    """Return how far the first of two tenants is, after a step together, from itself alone."""
    found: list[dict[str, Any]] = []
    for tenants in (2, 1):
        trainer = _trainer(backbone, tenants, moments, seed, side=SIDE)
        trainer.step({name: _batch(SIDE, seed + index) for index, name in enumerate(trainer.tenants)})
        found.append(trainer.parameters("tenant0"))
    return max(float(np.abs(found[0][name] - found[1][name]).max()) for name in found[0])


def _moments(name: str) -> Moments:
    return "bfloat16" if name == "bfloat16" else "float32"


def _draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's Figure
    rows: Sequence[Row] = next(iter(result.tables.values()))
    names = [f"{row['tenants']} x\n{row['parameters']}\n{row['backbone']}\nmoments {row['moments']}" for row in rows]
    left, right = figure.subplots(1, 2)
    left.bar(names, [float(row["peak GiB"] or 0) for row in rows], color="tab:blue", label="peak")
    left.bar(names, [float(row["resident GiB"] or 0) for row in rows], color="tab:cyan", width=0.5, label="resident")
    left.axhline(8, color="black", linestyle="--", linewidth=1)
    left.set(title="Memory of the whole process", ylabel="GiB")
    left.legend()
    for column, offset in (("step, grouped s", -0.2), ("step, one by one s", 0.2)):
        places = [index + offset for index in range(len(rows))]
        right.bar(places, [float(row[column] or 0) for row in rows], width=0.4, label=column.removesuffix(" s"))
    right.set_xticks(range(len(rows)), names)
    right.set(title="Training step of all tenants", ylabel="s")
    right.legend()
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=6)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", help=argparse.SUPPRESS)


STUDY = Study(
    name="core/smolvla",
    title="SmolVLA tenants on a SmolVLM of the real size",
    question="How much memory do eight SmolVLA tenants take on one random SmolVLM of 16 layers and 0.5 B parameters in "
    "bfloat16, and how long is their training step, grouped and one by one?",
    measure=measure,
    draw=_draw,
    add_options=_add_options,
)


def main() -> int:
    """Run the benchmark, or be one of its processes."""
    options = STUDY.parse(sys.argv[1:])
    worker = options.extra["worker"]
    if worker is None:
        return STUDY.main()
    tenants, size, dtype, moments = str(worker).split(",")
    print(json.dumps(occupy((int(tenants), size, dtype, _moments(moments)), options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
