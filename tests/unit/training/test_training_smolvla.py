"""SmolVLA's module in slots: beside others as alone, its state token trained through the shared backbone."""

import copy
import pickle
from functools import cache

import numpy as np
import pytest
import torch
from training_world import (
    assert_same,
    backbone,
    batch,
    observation,
    parameters,
    policy,
    run,
    train_call,
    with_arrays,
)

from joynexus.errors import SpecError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import build_policy
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.specs.vla_modules import SmolVlaModuleSpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.types import ActionChunk, PredictRequest

SMOLVLA = SmolVlaModuleSpec(num_layers=2, max_state_dim=4, max_action_dim=5, num_sampling_steps=3)
NO_STORE = {"device_bytes": 0, "host_bytes": 0}
TENANTS = {"a": SMOLVLA, "b": "oft", "c": SMOLVLA, "d": "gaussian"}


@cache
def frozen(dtype: str) -> Backbone:
    if dtype == "float32":
        return backbone()
    return load_backbone(TINY_SMOLVLM.model_copy(update={"dtype": dtype}))


def train(dtype: str, *tenants: str) -> TrainingEngine:
    trainer = TrainingEngine(frozen(dtype), TrainingSpec(prefix_store=NO_STORE), backbone_name="tiny")
    for tenant in tenants:
        trainer.open_slot(tenant, policy(TENANTS[tenant]), seed=ord(tenant))
    for step in range(3):
        calls = [train_call(each, step, batch(1 + (step + ord(each)) % 4, 10 * ord(each) + step)) for each in tenants]
        run(trainer, *calls)
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_beside_others_equals_training_alone(dtype):
    before = frozen(dtype).checksum()
    together = train(dtype, *TENANTS)
    for tenant in ("a", "c"):
        alone = train(dtype, tenant)
        assert_same(parameters(together, tenant), parameters(alone, tenant))
        fresh = build_policy(policy(SMOLVLA), frozen(dtype), seed=ord(tenant), stats=None).module.state_dict()
        moved = {name: np.abs(each - fresh[name].numpy()).max() for name, each in parameters(alone, tenant).items()}
        # Of the state's four weights per output, the last is fed with padding.
        assert all(moved.values()), moved
        assert not np.array_equal(
            parameters(alone, tenant)["state_proj.weight"][:, 0], fresh["state_proj.weight"][:, 0]
        )
    assert frozen(dtype).checksum() == before


def test_acting_beside_others_equals_acting_alone():
    trained = train("float32", *TENANTS)
    requests = [
        PredictRequest(
            tenant=tenant, observation=observation(rows, np.random.default_rng(rows)), seeds=tuple(range(rows))
        )
        for rows, tenant in enumerate(TENANTS, start=1)
    ]

    def answers(*tenants: str) -> dict[str, ActionChunk]:
        engine = InferenceEngine(backbone(), InferenceSpec(prefix_store=NO_STORE), backbone_name="tiny")
        for tenant in tenants:
            engine.set_policy(trained.snapshot(tenant))
        asked = [each for each in requests if each.tenant in tenants]
        return dict(zip(tenants, engine.predict(asked), strict=True))

    together = answers(*TENANTS)
    for tenant in TENANTS:
        got, want = together[tenant], answers(tenant)[tenant]
        assert isinstance(got, ActionChunk)
        assert_same({"actions": got.actions}, {"actions": want.actions})


def test_padded_steps_and_padded_dimensions_do_not_dilute_the_loss():
    """10 steps, 6 of them padded; 2 dimensions of 5 are the robot's; every error that counts is 1."""
    ten = policy(SMOLVLA).model_copy(update={"action": policy().action.model_copy(update={"horizon": 10})})
    module = build_policy(ten, backbone(), seed=0, stats=None).module
    elements, valid = torch.full((1, 10, 5), 7.0), torch.zeros(1, 10, dtype=torch.bool)
    elements[:, :4, :2], valid[:, :4] = 1.0, True
    assert module.reduce(elements, valid).tolist() == [1.0]


def test_what_padded_steps_hold_changes_nothing():
    data = batch(3, 4)
    pad = np.zeros_like(data.action_is_pad)
    pad[:, 2:] = True
    spoilt = np.where(pad[..., None], np.float32(1e6), data.actions)
    ways = [with_arrays(data, action_is_pad=pad), with_arrays(data, action_is_pad=pad, actions=spoilt)]
    found = []
    for way in ways:
        trainer = TrainingEngine(backbone(), TrainingSpec(), backbone_name="tiny")
        trainer.open_slot("a", policy(SMOLVLA), seed=0)
        run(trainer, train_call("a", 0, way))
        found.append(parameters(trainer, "a"))
    assert_same(*found)


def test_the_backbone_is_no_part_of_a_module():
    module = build_policy(policy(SMOLVLA), backbone(), seed=0, stats=None).module
    assert module.frozen is backbone()
    assert not any("frozen" in name for name in (*module.state_dict(), *dict(module.named_modules())))
    assert all(each.requires_grad for each in module.parameters())
    assert copy.deepcopy(module).frozen is backbone()
    loaded = pickle.loads(pickle.dumps(module))
    with pytest.raises(SpecError, match="needs the backbone's layers and has none"):
        _ = loaded.frozen


def test_a_backbone_that_keeps_too_few_layers_is_refused():
    lite = load_backbone(LiteBackboneSpec())
    with pytest.raises(SpecError, match=r"'smolvla': it reads .* 2 layers, backbone 'tiny' \(lite\) keeps 0"):
        build_policy(policy(SMOLVLA), lite, seed=0, stats=None)
    one = policy(SMOLVLA.model_copy(update={"num_layers": 1}))
    with pytest.raises(SpecError, match="its expert has 1 layers, the backbone keeps 2"):
        build_policy(one, backbone(), seed=0, stats=None)
