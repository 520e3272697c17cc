"""gr00t and OFT tenants beside each other on one Qwen3-VL, and unlike heads, smolvla among them, in one forward."""

from functools import cache

import numpy as np
import pytest
from training_world import are_equal, batch, parameters, policy_stats, run, train_call

from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.specs.action_module import ActionModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.specs.vla_modules import Gr00tModuleSpec, SmolVlaModuleSpec
from joynexus.testing.tiny import TINY_HF, TINY_QWEN2_5_VL, TINY_QWEN3_VL, TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.types import ActionChunk, Array, PredictRequest

SPECS: dict[str, ActionModuleSpec] = {
    "gr00t": Gr00tModuleSpec(
        hidden_dim=24,
        num_heads=2,
        head_dim=8,
        num_layers=2,
        num_future_tokens=2,
        max_steps=8,
        repeated_diffusion_steps=2,
    ),
    "queries": OftModuleSpec(reads="queries", query_tail=4, hidden_dim=16, num_layers=2),
    "oft": OftModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=64),
    "gaussian": GaussianModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=64),
    "smolvla": SmolVlaModuleSpec(num_layers=2, max_state_dim=4, max_action_dim=4),
}
TEMPLATES = {"queries": "{instruction} {state} ####."}
BACKBONES = {"qwen3_vl": TINY_QWEN3_VL, "qwen2_5_vl": TINY_QWEN2_5_VL, "smolvlm": TINY_SMOLVLM, "hf": TINY_HF}
STEPS = 3


@cache
def shared(name: str, dtype: str = "float32") -> Backbone:
    return load_backbone(BACKBONES[name].model_copy(update={"dtype": dtype}))


def policy_of(tenant: str) -> PolicySpec:
    """The policy of a tenant, which is named after its module; ``NAME+lora`` has an adapter too."""
    module = tenant.removesuffix("+lora")
    return PolicySpec.model_validate(
        {
            "backbone": "tiny",
            "adapter": {"rank": 2, "targets": ["q_proj", "v_proj"]} if module != tenant else None,
            "observation": {
                "cameras": ["base"],
                "image_size": [16, 16],
                "state_dim": 3,
                "max_prompt_tokens": 36,
                "prompt_template": TEMPLATES.get(module, "{instruction}"),
                "state_bins": 16,
            },
            "action": {"dim": 2, "horizon": 4, "num_action_steps": 2, "normalization": "quantile"},
            "action_module": SPECS[module],
        }
    )


def engine_of(backbone: Backbone, *modules: str) -> TrainingEngine:
    trainer = TrainingEngine(backbone, TrainingSpec(), backbone_name="tiny")
    for module in modules:
        trainer.open_slot(module, policy_of(module), seed=3, stats=policy_stats(shift=len(module) / 10))
    return trainer


def train(backbone: Backbone, *modules: str) -> TrainingEngine:
    """Some steps of a tenant per module; what each sees does not depend on who else is there."""
    trainer = engine_of(backbone, *modules)
    for step in range(STEPS):
        run(trainer, *(train_call(each, step, batch(3, 100 * len(each) + step)) for each in modules))
    return trainer


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3_vl", "float32"), ("qwen3_vl", "bfloat16"), ("qwen2_5_vl", "float32"), ("hf", "float32")]
)
def test_each_equals_itself_alone_to_the_bit(name: str, dtype: str) -> None:
    backbone = shared(name, dtype)
    before = backbone.checksum()
    fresh = engine_of(backbone, "gr00t", "queries")
    together = train(backbone, "gr00t", "oft", "queries", "gaussian")
    for module in ("gr00t", "queries"):
        found, start = parameters(together, module), parameters(fresh, module)
        assert are_equal(found, parameters(train(backbone, module), module))
        still = [each for each in start if np.array_equal(start[each], found[each])]
        assert still == [], "training leaves a parameter as it was"
    assert backbone.checksum() == before


@pytest.mark.parametrize("name", ["qwen3_vl", "hf"])
def test_an_adapter_on_the_language_layers_trains_as_alone(name: str) -> None:
    backbone = shared(name)
    together = parameters(train(backbone, "gr00t", "gr00t+lora", "queries"), "gr00t+lora")
    alone = parameters(train(backbone, "gr00t+lora"), "gr00t+lora")
    assert are_equal(together, alone)
    changes = [each for path, each in together.items() if path.endswith("lora_B.weight")]
    assert len(changes) == 2 * len(backbone.adapter_layers()) // 7
    assert all(each.any() for each in changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_versions_act_beside_each_other_as_alone(dtype: str) -> None:
    backbone = shared("qwen3_vl", dtype)
    trained = train(backbone, "gr00t", "queries")
    observation = batch(2, 11).observation

    def act(*tenants: str) -> dict[str, Array]:
        engine = InferenceEngine(backbone, InferenceSpec(), backbone_name="tiny")
        for tenant in tenants:
            engine.set_policy(trained.snapshot(tenant))
        requests = [PredictRequest(tenant=each, observation=observation, seeds=(4, 5)) for each in tenants]
        answers = dict(zip(tenants, engine.predict(requests), strict=True))
        return {tenant: each.actions for tenant, each in answers.items() if isinstance(each, ActionChunk)}

    together = act("gr00t", "queries")
    assert together.keys() == {"gr00t", "queries"}
    for tenant, actions in together.items():
        assert actions.shape == (2, 4, 2)
        assert np.isfinite(actions).all()
        assert np.array_equal(actions, act(tenant)[tenant])


@pytest.mark.parametrize(
    ("name", "modules"),
    [("smolvlm", ("smolvla", "oft", "gr00t", "gaussian")), ("qwen3_vl", ("oft", "gr00t", "gaussian"))],
)
def test_unlike_heads_share_one_group_and_one_forward(name: str, modules: tuple[str, ...]) -> None:
    backbone, rows = shared(name), 1
    run(engine_of(backbone, "oft"), train_call("oft", 0, batch(len(modules) * rows, 1)))  # sizes are tried once
    trainer = engine_of(backbone, *modules)
    forwards = backbone.num_forwards
    results = run(trainer, *(train_call(each, 0, batch(rows, 20 + index)) for index, each in enumerate(modules)))
    assert len({result.group_id for result in results}) == 1
    assert [result.encoded for result in results] == [rows] * len(modules)
    assert backbone.num_forwards == forwards + 1
