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
    forward_call,
    observation,
    parameters,
    policy,
    run,
    step_call,
    train_call,
    with_arrays,
)

from joynexus.errors import SpecError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import build_policy, prepare_prefix
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.specs.vla_modules import SmolVlaModuleSpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.training.slot import Accumulated, TrainableState
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


def test_every_valid_step_counts_alike_however_the_rows_are_cut():
    """Rows of 4, 1 and 2 valid steps: as one batch, and as two that are accumulated."""
    data = batch(3, 4)
    pad = np.arange(4) >= np.array([[4], [1], [2]])
    whole = with_arrays(data, action_is_pad=pad)
    noise = np.random.default_rng(0)
    spec = policy(SMOLVLA)
    parts = build_policy(spec, backbone(), seed=0, stats=None)
    seen = prepare_prefix(backbone(), spec, whole.observation, parts.normalizer)
    prefix = backbone().prefix(seen, parts.signature)
    drawn = [torch.from_numpy(noise.standard_normal((3, 4, 5)).astype(np.float32)), torch.rand(3)]

    def gradient(*cuts: slice) -> dict[str, torch.Tensor]:
        accumulated = Accumulated()
        for cut in cuts:
            rows = torch.arange(3)[cut]
            valid = torch.from_numpy(~pad[cut])
            state, actions = (torch.from_numpy(each[cut]) for each in (whole.observation.state, whole.actions))
            elements = parts.module.loss_elements(prefix.pick(rows), state, actions, *(each[cut] for each in drawn))
            loss, weights = parts.module.reduce(elements, valid), parts.module.row_weights(valid)
            names, each = zip(*parts.module.named_parameters(), strict=True)
            found = torch.autograd.grad((loss * weights).sum(), each)
            accumulated = accumulated.plus(dict(zip(names, found, strict=True)), len(rows), float(weights.sum()))
        return accumulated.take_mean()

    once, twice = gradient(slice(0, 3)), gradient(slice(0, 1), slice(1, 3))
    elements = parts.module.loss_elements(
        prefix, torch.from_numpy(whole.observation.state), torch.from_numpy(whole.actions), *drawn
    )
    elements[..., :2][torch.from_numpy(~pad)].mean().backward()
    for name, each in parts.module.named_parameters():
        bound = 1e-5 * float(each.grad.abs().max())
        assert torch.allclose(once[name], each.grad, atol=bound)
        assert torch.allclose(twice[name], each.grad, atol=bound)


def test_an_engine_weighs_rows_by_their_valid_steps():
    data = batch(3, 4)
    pad = np.arange(4) >= np.array([[4], [1], [2]])
    trainers = [TrainingEngine(backbone(), TrainingSpec(), backbone_name="tiny") for _ in range(2)]
    metrics = []
    for trainer, call in zip(trainers, (forward_call, train_call), strict=True):
        trainer.open_slot("a", policy(SMOLVLA), seed=0)
        (result,) = run(trainer, call("a", 0, with_arrays(data, action_is_pad=pad)))
        metrics.append(result.metrics)
    assert trainers[0].status("a").accumulated_rows == 3
    run(trainers[0], step_call("a", 1))
    assert_same(parameters(trainers[0], "a"), parameters(trainers[1], "a"))
    spec = policy(SMOLVLA)
    parts = build_policy(spec, backbone(), seed=0, stats=None)
    seen = prepare_prefix(backbone(), spec, data.observation, parts.normalizer)
    generator = torch.Generator()
    generator.set_state(TrainableState(parts, seed=0).generator.get_state())
    valid = torch.from_numpy(~pad)
    actions = torch.where(valid[..., None], torch.from_numpy(data.actions), torch.zeros(()))
    rows = parts.module.loss(
        backbone().prefix(seen, "s"), torch.from_numpy(data.observation.state), actions, valid, generator
    )
    counts = torch.tensor([4.0, 1.0, 2.0])
    assert metrics[0]["loss"] == pytest.approx(float((rows.detach() * counts).sum() / 7), rel=1e-5)
    assert metrics[0]["loss"] == metrics[1]["loss"]


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
