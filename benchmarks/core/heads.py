"""Action modules of several tenants: one after the other, or as one stack of batched products.

    python -m benchmarks.core.heads [--device cuda] [--quick] [--json OUT] [--page MD]

Acting is the product's own code, with ``stack_heads`` ``never`` and ``auto``: the modules alone, and a whole predict
whose features are in the store. Training is a sketch, to tell what a stack would give there (docs/decisions/0017):
forward and backward as a stack, then each tenant's own clipping and fused AdamW on its slice of the stack.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.core import world
from benchmarks.core.world import BACKBONE, SHORT
from benchmarks.harness import Benchmark, Measured, Options, Row, Study, clock_for, measure_paired
from joynexus.inference.engine import InferenceEngine
from joynexus.inference.heads import HeadJob
from joynexus.inference.policies import ServedPolicy
from joynexus.inference.stacks import HeadStacks
from joynexus.models.action_module import ActionModule
from joynexus.models.backbone import Backbone
from joynexus.models.policy import build_policy, prepare_prefix
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.stacked import StackedModule
from joynexus.specs.action_module import ActionModuleSpec, FlowMatchingModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.service import InferenceSpec
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.training.optimizer import TenantOptimizer
from joynexus.types import ActionChunk, PolicySnapshot, PredictRequest

MODULES: dict[str, ActionModuleSpec] = {
    "oft, small": OftModuleSpec(hidden_dim=64, token_dim=8),
    "oft": OftModuleSpec(),
    "gaussian, small": GaussianModuleSpec(hidden_dim=64, token_dim=8),
    "gaussian": GaussianModuleSpec(),
    "flow_matching, small": FlowMatchingModuleSpec(hidden_dim=32, num_layers=1, num_heads=2),
    "flow_matching": FlowMatchingModuleSpec(),
}
TRAINED = ("oft, small", "oft", "gaussian")
LOOP, STACK = "loop", "stack"
OPTIMIZER = OptimizerSpec()
NOTES = (
    (
        "*same* tells whether the stack's numbers were those of the loop to the last bit; *acts stacked*, whether "
        "`auto` then used it. In *predict ratio* features are in the store: what else there is, is checks and copies."
    ),
    "Training with a stack is a sketch of the benchmark, not a part of the product.",
)


def measure(options: Options) -> Measured:
    """Measure acting and training."""
    torch.set_num_threads(options.threads)
    backbone = world.load("3M", SHORT, device=options.device, seed=options.seed)
    counts = (3, 8) if options.quick else (3, 4, 8, 16)
    modules = [name for name in MODULES if name != "flow_matching" or not options.quick]
    acting = [_act(name, count, backbone, options) for count in counts for name in modules]
    sizes = [(8, 4)] if options.quick else [(4, 4), (4, 32), (8, 4), (8, 32)]
    training = [_train(name, *size, backbone, options) for size in sizes for name in TRAINED]
    eight = {str(row["module"]): float(row["modules ratio"] or 0.0) for row in acting if row["tenants"] == 8}  # noqa: PLR2004
    return Measured(
        headline={
            "act_ratio_8_small_oft": eight["oft, small"],
            "act_ratio_8_oft": eight["oft"],
            "act_ratio_8_gaussian": eight["gaussian"],
            "train_ratio_8_oft": next(
                float(row["step ratio"] or 0.0) for row in reversed(training) if row["module"] == "oft"
            ),
            "largest_difference": max(float(row["difference"] or 0.0) for row in acting),
        },
        tables={"Acting, one row per tenant": acting, "Training": training},
        notes=NOTES,
    )


def _act(name: str, tenants: int, backbone: Backbone, options: Options) -> Row:
    """Compare the loop with the stack that ``auto`` takes, for one row of each tenant."""
    served = [_served(name, index, backbone, options.seed) for index in range(tenants)]
    features = _features(backbone, served[0], tenants, options.seed)
    state = torch.tensor(world.observation(SHORT, tenants, seed=options.seed).state, device=backbone.device)
    jobs = [
        HeadJob(
            served=each,
            prefix=features.slice(index, index + 1),
            state=state[index : index + 1],
            seeds=[index],
            deterministic=False,
        )
        for index, each in enumerate(served)
    ]
    loop, stack = HeadStacks("never"), HeadStacks("auto")
    pairs = list(zip(loop.act(jobs), stack.act(jobs), strict=True))
    difference = max(float((one.actions - other.actions).abs().max()) for one, other in pairs)
    with torch.no_grad():
        heads = measure_paired(
            {LOOP: lambda: loop.act(jobs), STACK: lambda: stack.act(jobs)},
            clock_for(options.device),
            rounds=7 if options.quick else 15,
            min_seconds=0.02,
            budget_s=1.0 if options.quick else 2.0,
        )
    whole = _predict(served, backbone, options)
    return {
        "module": name,
        "tenants": tenants,
        "parameters": sum(each.numel() for each in served[0].parts.module.parameters()),
        "loop ms": heads.typical(LOOP) * 1e3,
        "stack ms": heads.typical(STACK) * 1e3,
        "modules ratio": heads.ratio(LOOP, STACK).median,
        "predict ratio": whole.ratio(LOOP, STACK).median,
        "acts stacked": str(stack.num_stacked > 0),
        "same": str(difference == 0.0),
        "difference": difference,
    }


def _predict(served: Sequence[ServedPolicy], backbone: Backbone, options: Options) -> Any:  # noqa: ANN401
    requests = [
        PredictRequest(
            tenant=each.tenant, observation=world.observation(SHORT, 1, seed=options.seed + index), seeds=(index,)
        )
        for index, each in enumerate(served)
    ]

    def side(mode: str) -> Callable[[], object]:
        engine = InferenceEngine(backbone, InferenceSpec.model_validate({"stack_heads": mode}), backbone_name=BACKBONE)
        for each in served:
            parameters = {name: value.cpu().numpy() for name, value in each.parts.module.state_dict().items()}
            engine.set_policy(
                PolicySnapshot(
                    tenant=each.tenant, version=1, policy=each.policy, parameters=parameters, stats=None, seed=0
                )
            )

        def predict() -> None:
            answers = engine.predict(requests)
            assert all(isinstance(answer, ActionChunk) for answer in answers)

        return predict

    return measure_paired(
        {LOOP: side("never"), STACK: side("auto")},
        clock_for(options.device),
        rounds=5 if options.quick else 15,
        warmups=2,
        min_seconds=0.02,
        budget_s=1.0 if options.quick else 2.0,
    )


def _train(name: str, tenants: int, rows: int, backbone: Backbone, options: Options) -> Row:
    """Compare each tenant's own step with one whose forward and backward are a stack's."""
    served = [_served(name, index, backbone, options.seed) for index in range(tenants)]
    modules = [each.parts.module.requires_grad_() for each in served]
    features = _features(backbone, served[0], tenants * rows, options.seed)
    draw = np.random.default_rng(options.seed)
    state = torch.tensor(draw.standard_normal((tenants * rows, world.STATE_DIM)).astype(np.float32)).to(backbone.device)
    actions = torch.rand(tenants * rows, world.HORIZON, world.ACTION_DIM).to(backbone.device) - 0.5
    data = (features, state, actions)
    paired = measure_paired(
        {LOOP: _loop_step(modules, rows, data), STACK: _stack_step(modules, rows, data)},
        clock_for(options.device),
        rounds=5 if options.quick else 15,
        min_seconds=0.02,
        budget_s=1.0 if options.quick else 2.0,
    )
    return {
        "module": name,
        "tenants": tenants,
        "batch": rows,
        "loop ms": paired.typical(LOOP) * 1e3,
        "stack ms": paired.typical(STACK) * 1e3,
        "step ratio": paired.ratio(LOOP, STACK).median,
    }


Data = tuple[PrefixFeatures, Tensor, Tensor]


def _loop_step(modules: Sequence[ActionModule], rows: int, data: Data) -> Callable[[], None]:
    named = [dict(module.named_parameters()) for module in modules]
    optimizers = [TenantOptimizer(each) for each in named]
    generator = torch.Generator()

    def step() -> None:
        for index, module in enumerate(modules):
            at = slice(index * rows, (index + 1) * rows)
            own = (data[0].slice(at.start, at.stop), data[1][at], data[2][at])
            gradient = _gradient(module, own, named[index], generator)
            optimizers[index].step({name: each / rows for name, each in gradient.items()}, OPTIMIZER, OPTIMIZER.lr)

    return step


def _stack_step(modules: Sequence[ActionModule], rows: int, data: Data) -> Callable[[], None]:
    stack = StackedModule(modules[0], slots=len(modules), rows=rows)
    for slot, module in enumerate(modules):
        stack.load(slot, module)
    own = {name for name, _ in modules[0].named_parameters(recurse=False)}  # the supervised losses do not read them
    named = {name: each.requires_grad_() for name, each in stack.views.items() if name not in own}
    slices = [{name: nn.Parameter(each.detach()[slot]) for name, each in named.items()} for slot in range(stack.slots)]
    optimizers = [TenantOptimizer(each) for each in slices]
    generator = torch.Generator()

    def step() -> None:
        gradient = _gradient(stack.module, data, named, generator)
        for slot, optimizer in enumerate(optimizers):
            optimizer.step({name: each[slot] / rows for name, each in gradient.items()}, OPTIMIZER, OPTIMIZER.lr)

    return step


def _gradient(module: ActionModule, data: Data, named: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    prefix, state, actions = data
    valid = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
    loss = module.loss(prefix, state, actions, valid, generator).sum()
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}  # pyright: ignore[reportUnnecessaryComparison]


def _served(name: str, index: int, backbone: Backbone, seed: int) -> ServedPolicy:
    policy = world.policy(SHORT, MODULES[name])
    parts = build_policy(policy, backbone, seed=seed + index, stats=None)
    parts.module.requires_grad_(requires_grad=False).eval()
    return ServedPolicy(tenant=f"tenant{index}", version=1, policy=policy, parts=parts)


def _features(backbone: Backbone, served: ServedPolicy, rows: int, seed: int) -> PrefixFeatures:
    prefix = prepare_prefix(backbone, served.policy, world.observation(SHORT, rows, seed=seed), UNCHANGED)
    features = backbone.prefix(prefix.to(backbone.device), served.parts.signature)
    return replace(features, keys=(), values=())


def _draw(result: Benchmark, figure: Any) -> None:  # noqa: ANN401  # matplotlib's Figure
    axis = figure.subplots()
    rows = result.tables["Acting, one row per tenant"]
    for name in dict.fromkeys(str(row["module"]) for row in rows):
        own = [row for row in rows if row["module"] == name]
        axis.plot([row["tenants"] for row in own], [row["modules ratio"] for row in own], "o-", label=name)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xlabel("tenants")
    axis.set_ylabel("loop over stack")
    axis.legend()


STUDY = Study(
    name="core/heads",
    title="Action modules: loop or stack",
    question=(
        "Does it pay to let like action modules of several tenants run as one stack of batched matrix products, in "
        "place of one after the other, and do the numbers stay the same?"
    ),
    measure=measure,
    draw=_draw,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
