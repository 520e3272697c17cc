"""π0 and π0.5 tenants beside each other and beside others, on one PaliGemma."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from training_world import MODULES, are_equal, batch, parameters, policy_stats, run, train_call

from joynexus.errors import SpecError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import build_policy
from joynexus.specs.action_module import ActionModuleSpec, OftModuleSpec
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.specs.vla_modules import Pi0ModuleSpec, Pi05ModuleSpec
from joynexus.testing.tiny import TINY_PALIGEMMA, TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.types import ActionChunk, Array, PredictRequest

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_dim": 16, "mlp_dim": 32, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 8, "max_action_dim": 6, "num_sampling_steps": 3}
SPECS: dict[str, ActionModuleSpec] = {
    "pi0": Pi0ModuleSpec(max_state_dim=8, **SIZES),
    "pi05": Pi05ModuleSpec(**SIZES),
    "oft": OftModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=28),
    "flow_matching": MODULES["flow_matching"],
}
TEMPLATES = {"pi05": "{instruction}: {state}\n"}
STEPS = 5


@cache
def paligemma(dtype: str = "float32") -> Backbone:
    return load_backbone(TINY_PALIGEMMA.model_copy(update={"dtype": dtype}))


def policy_of(module: str) -> PolicySpec:
    return PolicySpec.model_validate(
        {
            "backbone": "paligemma",
            "observation": {
                "cameras": ["base"],
                "image_size": [16, 16],
                "state_dim": 3,
                "max_prompt_tokens": 24,
                "prompt_template": TEMPLATES.get(module, "{instruction}\n"),
                "state_bins": 16,
            },
            "action": {"dim": 2, "horizon": 4, "num_action_steps": 2, "normalization": "quantile"},
            "action_module": SPECS[module],
        }
    )


def train(modules: tuple[str, ...], dtype: str) -> TrainingEngine:
    """Five steps of a tenant per module; what each sees does not depend on who else is there."""
    trainer = TrainingEngine(paligemma(dtype), TrainingSpec(), backbone_name="paligemma")
    for module in modules:
        trainer.open_slot(module, policy_of(module), seed=3, stats=policy_stats(shift=len(module) / 10))
    for step in range(STEPS):
        run(trainer, *(train_call(each, step, batch(3, 100 * len(each) + step)) for each in modules))
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_equals_itself_alone_to_the_bit(dtype: str) -> None:
    before = paligemma(dtype).checksum()
    together = train(("pi0", "oft", "pi05", "flow_matching"), dtype)
    for module in ("pi0", "pi05"):
        alone = train((module,), dtype)
        assert are_equal(parameters(together, module), parameters(alone, module))
        fresh = build_policy(policy_of(module), paligemma(dtype), seed=3, stats=policy_stats())
        start = {name: each.numpy() for name, each in fresh.module.state_dict().items()}
        found = parameters(together, module)
        still = [name for name in start if np.array_equal(start[name], found[name])]
        assert still == [], "training leaves a parameter as it was"
    assert paligemma(dtype).checksum() == before


def test_those_with_the_same_prompt_share_one_forward() -> None:
    trainer = TrainingEngine(paligemma(), TrainingSpec(), backbone_name="paligemma")
    for module in SPECS:
        trainer.open_slot(module, policy_of(module), seed=1, stats=policy_stats())
    data = batch(3, 7)
    results = run(trainer, *(train_call(module, 0, data) for module in SPECS))
    groups = {module: result.group_id for module, result in zip(SPECS, results, strict=True)}
    assert groups["pi0"] == groups["oft"] == groups["flow_matching"] != groups["pi05"]
    assert sum(result.encoded for result in results) == 6, "three rows for three tenants, three more with the state"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_versions_act_beside_each_other_as_alone(dtype: str) -> None:
    trained = train(("pi0", "pi05"), dtype)
    observation = batch(2, 11).observation

    def act(*tenants: str) -> dict[str, Array]:
        engine = InferenceEngine(paligemma(dtype), InferenceSpec(), backbone_name="paligemma")
        for tenant in tenants:
            engine.set_policy(trained.snapshot(tenant))
        requests = [PredictRequest(tenant=each, observation=observation, seeds=(4, 5)) for each in tenants]
        answers = dict(zip(tenants, engine.predict(requests), strict=True))
        chunks = {tenant: each for tenant, each in answers.items() if isinstance(each, ActionChunk)}
        assert chunks.keys() == answers.keys()
        return {tenant: each.actions for tenant, each in chunks.items()}

    together = act("pi0", "pi05")
    for tenant, actions in together.items():
        assert actions.shape == (2, 4, 2)
        assert np.isfinite(actions).all()
        assert np.array_equal(actions, act(tenant)[tenant])


def test_the_state_reaches_pi05_through_the_prompt_alone() -> None:
    snapshot = train(("pi05",), "float32").snapshot("pi05")
    engine = InferenceEngine(paligemma(), InferenceSpec(), backbone_name="paligemma")
    engine.set_policy(snapshot)
    seen = batch(1, 11).observation
    moved = type(seen)(
        images=seen.images, image_mask=seen.image_mask, state=seen.state + 1, instructions=seen.instructions
    )
    requests = [PredictRequest(tenant="pi05", observation=each, seeds=(4,)) for each in (seen, moved, seen)]
    first, other, again = (each for each in engine.predict(requests) if isinstance(each, ActionChunk))
    assert np.array_equal(first.actions, again.actions)
    assert not np.allclose(first.actions, other.actions, atol=1e-5)


def test_a_backbone_with_other_layers_or_heads_is_refused_by_name() -> None:
    cut = load_backbone(TINY_PALIGEMMA.model_copy(update={"num_layers": 1}))
    with pytest.raises(SpecError, match=r"'pi0': it reads the keys and values of 2 layers, backbone 'paligemma'"):
        build_policy(policy_of("pi0"), cut, seed=0, stats=policy_stats())
    wide = policy_of("pi05").model_copy(update={"action_module": Pi05ModuleSpec(**SIZES | {"head_dim": 16})})
    with pytest.raises(SpecError, match=r"'pi05': .* are \(2, 2, 16, 4\), the backbone's are \(2, 2, 8, 4\)"):
        build_policy(wide, paligemma(), seed=0, stats=policy_stats())
    smolvlm = load_backbone(TINY_SMOLVLM)
    assert build_policy(policy_of("pi0"), smolvlm, seed=0, stats=policy_stats()).module.dims.kv_shape == (2, 2, 8)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        ({"state_dim": 0}, {}, r"action_module 'pi0' reads the state, observation\.state_dim is 0"),
        ({"state_dim": 9}, {}, r"observation\.state_dim is 9, action_module 'pi0' takes at most 8"),
        ({}, {"dim": 7}, r"action\.dim is 7, action_module 'pi0' takes at most 6"),
    ],
)
def test_widths_that_do_not_fit_are_refused_before_anything_is_built(
    observation: dict[str, Any], action: dict[str, Any], message: str
) -> None:
    spec = policy_of("pi0").model_dump()
    with pytest.raises(ValueError, match=message):
        PolicySpec.model_validate(
            {**spec, "observation": spec["observation"] | observation, "action": spec["action"] | action}
        )
