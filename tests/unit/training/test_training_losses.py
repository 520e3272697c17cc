"""Losses against numbers worked out by hand, and masks that nothing leaks through."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from training_world import (
    ACTION_DIM,
    HORIZON,
    STATE_DIM,
    are_equal,
    backbone,
    batch,
    engine,
    parameters,
    policy,
    run,
    train_call,
    with_arrays,
)

from joynexus.errors import InvalidBatchError, UnknownComponentError
from joynexus.models.action_module import ActionModule, Decision, Evaluation, ModuleDims, masked_row_mean
from joynexus.models.policy import encode, prefix_keys, prepare_prefix
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import GaussianModuleSpec
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.training.losses import LOSSES, MAX_LOG_RATIO, LossInputs, find_loss
from joynexus.training.validation import counted_rows
from joynexus.types import Loss

PPO = {"clip_low": 0.2, "clip_high": 0.3, "value_coefficient": 0.5, "entropy_coefficient": 0.1}


class ScriptedModule(ActionModule):
    """Predicts 0 everywhere, with loss |error|; scores decisions with the numbers in its parameters."""

    def __init__(self, log_prob: Sequence[float] = (0.0,), value: Sequence[float] = (0.0,)) -> None:
        dims = ModuleDims(prefix_dim=2, state_dim=1, action_dim=1, horizon=10)
        super().__init__(GaussianModuleSpec(), dims)
        self.log_prob = torch.nn.Parameter(torch.tensor(log_prob))
        self.value = torch.nn.Parameter(torch.tensor(value))

    def reset_parameters(self, generator: torch.Generator) -> None:
        del generator

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        return masked_row_mean(actions.abs(), valid)

    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        raise AssertionError("not asked for")

    def evaluate(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], trace: Mapping[str, Tensor]) -> Evaluation:
        return Evaluation(log_prob=self.log_prob, entropy=torch.full_like(self.log_prob, 2.0), value=self.value)


def inputs(rows: int, **changes: Tensor) -> LossInputs:
    steps = changes.get("steps", torch.ones(rows, 10, dtype=torch.bool))
    return LossInputs(
        prefix=PrefixFeatures(
            hidden=torch.zeros(rows, 1, 2), pad=torch.zeros(rows, 1, dtype=torch.bool), signature="s"
        ),
        state=torch.zeros(rows, 1),
        actions=changes.get("actions", torch.ones(rows, 10, 1)),
        steps=steps,
        extras={name: value for name, value in changes.items() if name not in {"steps", "actions"}},
        generator=torch.Generator(),
    )


def test_c63_padded_steps_do_not_dilute_the_loss() -> None:
    steps = torch.tensor([[True] * 4 + [False] * 6])
    rows = LOSSES["supervised"].compute(ScriptedModule(), inputs(1, steps=steps), {})
    assert rows.loss.tolist() == [1.0]


@pytest.mark.parametrize("name", ["action_is_pad", "actions_is_pad", "mask", "is_pad"])
def test_c63_an_unknown_mask_is_refused(name: str) -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    data = batch(2, 1, extras={name: np.zeros((2, HORIZON), np.bool_)})
    with pytest.raises(InvalidBatchError, match=f"'{name}' is not read by this loss, which knows .'valid'."):
        trainer.submit(train_call("a", 0, data))


@pytest.mark.parametrize("module", ["gaussian", "oft", "flow_matching"])
def test_c10_nan_in_masked_places_leaks_into_nothing(module: str) -> None:
    clean = batch(3, 4)
    clean.action_is_pad[0, 2:] = True
    dirty_actions, dirty_state = clean.actions.copy(), clean.observation.state.copy()
    dirty_actions[0, 2:] = np.nan
    filler = batch(2, 77)
    filler.actions[:] = np.nan
    filler.observation.state[:] = np.inf
    dirty = with_arrays(clean, actions=dirty_actions, state=dirty_state)
    masked = type(dirty).concatenate([dirty, filler])
    masked = with_arrays(masked, extras={"valid": np.array([True] * 3 + [False] * 2)})
    results = []
    for data in (clean, dirty, masked):
        trainer = engine()
        trainer.open_slot("a", policy(module), seed=0)
        results.append((run(trainer, train_call("a", 0, data))[0].metrics, parameters(trainer, "a")))
    assert results[0][0]["loss"] == results[1][0]["loss"] == results[2][0]["loss"]
    assert math.isfinite(results[0][0]["loss"])
    assert results[2][0]["rows"] == 3
    assert are_equal(results[0][1], results[1][1])
    assert are_equal(results[0][1], results[2][1])


def test_rows_without_a_step_do_not_count_where_actions_are_supervised() -> None:
    data = batch(3, 1)
    data.action_is_pad[1] = True
    assert counted_rows(data, LOSSES["supervised"]).sample_ids == ("1/0", "1/2")
    assert len(counted_rows(data, LOSSES["ppo"])) == 3


def test_c09_two_names_two_losses_and_an_unknown_name_is_refused() -> None:
    weights = torch.tensor([0.5, 3.0])
    data = inputs(2, actions=torch.tensor([[[1.0]] * 10, [[2.0]] * 10]), weights=weights)
    module = ScriptedModule()
    assert LOSSES["supervised"].compute(module, data, {}).loss.tolist() == [1.0, 2.0]
    assert LOSSES["weighted"].compute(module, data, {}).loss.tolist() == [0.5, 6.0]
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    plain = run(trainer, train_call("a", 0, batch(2, 3)))[0].metrics["loss"]
    other = engine()
    other.open_slot("a", policy(), seed=0)
    half = batch(2, 3, extras={"weights": np.full(2, 0.5, np.float32)})
    result = run(other, train_call("a", 0, half, loss=Loss(name="weighted")))[0].metrics
    assert result["loss"] == pytest.approx(0.5 * plain, rel=1e-6)
    assert result["unweighted_loss"] == pytest.approx(plain, rel=1e-6)
    with pytest.raises(UnknownComponentError, match=r"'suprvised': unknown. Use one of \['ppo', 'supervised', 'wei"):
        trainer.submit(train_call("a", 1, batch(1, 1), loss=Loss(name="suprvised")))


def test_a_loss_with_other_parameters_is_refused() -> None:
    with pytest.raises(InvalidBatchError, match=r"unknown parameters \['clip'\].*clip_high"):
        find_loss(Loss(name="ppo", parameters={"clip": 0.1}))
    assert find_loss(Loss(name="ppo", parameters={"clip_low": 0.1}))[1] == {
        "clip_low": 0.1,
        "clip_high": 0.2,
        "value_coefficient": 0.5,
        "entropy_coefficient": 0.0,
    }


def test_a_loss_that_scores_traces_needs_them_and_a_module_that_can() -> None:
    trainer = engine()
    trainer.open_slot("oft", policy("oft"), seed=0)
    trainer.open_slot("gaussian", policy("gaussian"), seed=0)
    needed = {name: np.zeros(1, np.float32) for name in LOSSES["ppo"].extras}
    with pytest.raises(InvalidBatchError, match="'oft' does not give"):
        trainer.submit(train_call("oft", 0, batch(1, 1, extras=needed), loss=Loss(name="ppo")))
    with pytest.raises(InvalidBatchError, match=r"'trace/...' are missing"):
        trainer.submit(train_call("gaussian", 0, batch(1, 1, extras=needed), loss=Loss(name="ppo")))
    lacking = {name: value for name, value in needed.items() if name != "returns"}
    with pytest.raises(InvalidBatchError, match=r"extra 'returns' is missing"):
        trainer.submit(train_call("gaussian", 0, batch(1, 1, extras=lacking), loss=Loss(name="ppo")))


def ppo(log_prob: Sequence[float], advantages: Sequence[float], **changes: Sequence[float] | float) -> dict[str, list]:
    count = len(log_prob)
    value = changes.get("value", [0.0] * count)
    module = ScriptedModule(log_prob, value)  # type: ignore[arg-type]
    data = inputs(
        count,
        advantages=torch.tensor(advantages),
        returns=torch.tensor(changes.get("returns", [0.0] * count)),
        old_log_prob=torch.tensor(changes.get("old_log_prob", [0.0] * count)),
        old_value=torch.tensor(changes.get("old_value", [0.0] * count)),
    )
    clip = {"value_clip": changes["value_clip"]} if "value_clip" in changes else {}
    rows = LOSSES["ppo"].compute(module, data, {**PPO, **clip})  # type: ignore[dict-item]
    rows.loss.sum().backward()
    found = {name: each.tolist() for name, each in rows.metrics.items()}
    return found | {"loss": rows.loss.tolist(), "slope": module.log_prob.grad.tolist()}  # type: ignore[union-attr]


def test_ppo_at_the_old_policy_is_the_policy_gradient() -> None:
    found = ppo([0.0, 0.0], [2.0, -1.0])
    assert found["policy_loss"] == [-2.0, 1.0]
    assert found["slope"] == [-2.0, 1.0]
    assert found["kl"] == [0.0, 0.0]
    assert found["clip_fraction"] == [0.0, 0.0]
    assert found["loss"] == pytest.approx([-2.2, 0.8])  # entropy 2 with weight 0.1


def test_ppo_clips_each_side_by_its_own_bound() -> None:
    ratios = [1.5, 1.25, 0.5, 0.85, 1.5, 0.5]
    advantages = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    found = ppo([math.log(each) for each in ratios], advantages)
    assert found["policy_loss"] == pytest.approx([-1.3, -1.25, 0.8, 0.85, 1.5, -0.5])
    assert found["clip_fraction"] == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert [abs(each) > 0 for each in found["slope"]] == [False, True, False, True, True, True]
    assert found["kl"] == pytest.approx([each - 1 - math.log(each) for each in ratios], abs=1e-6)


def test_ppo_value_loss_takes_the_worse_of_clipped_and_not() -> None:
    free = ppo([0.0, 0.0], [0.0, 0.0], value=[1.0, 1.0], returns=[2.0, 1.0])
    assert free["value_loss"] == [0.5, 0.0]
    clipped = ppo(
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
        value=[1.0, 1.0, 0.1],
        returns=[2.0, 1.0, 2.0],
        old_value=[0.0, 0.0, 0.0],
        value_clip=0.2,
    )
    assert clipped["value_loss"] == pytest.approx([0.5 * 1.8**2, 0.5 * 0.8**2, 0.5 * 1.9**2])


def test_ppo_stays_finite_for_policies_far_apart() -> None:
    found = ppo([500.0, 500.0, -500.0], [1.0, -1.0, 1.0])
    assert all(math.isfinite(each) for values in found.values() for each in values)
    assert found["policy_loss"][1] == pytest.approx(math.exp(MAX_LOG_RATIO))


def test_c30_equal_advantages_make_no_step_in_the_policy_and_no_crash() -> None:
    found = ppo([0.1, -0.1], [0.0, 0.0])
    assert found["policy_loss"] == [0.0, 0.0]
    assert found["slope"] == [0.0, 0.0]


def test_ppo_learns_to_prefer_the_better_decision() -> None:
    trainer = engine()
    trainer.open_slot("a", policy("gaussian"), seed=0)
    rng = np.random.default_rng(0)
    data = batch(8, 1)
    chosen = rng.standard_normal((8, HORIZON, ACTION_DIM)).astype(np.float32)

    def score() -> torch.Tensor:
        slot = trainer._slot("a")
        prefix = prepare_prefix(backbone(), slot.policy, data.observation, UNCHANGED)
        features, _ = encode(backbone(), None, prefix, prefix_keys(prefix, slot.signature), slot.signature)
        state = torch.tensor(data.observation.state)
        assert state.shape == (8, STATE_DIM)
        trace = {"pre_tanh": torch.tensor(chosen)}
        return slot.state.parts.module.evaluate(features, state, trace).log_prob.detach()

    before = score()
    advantages = np.array([1.0, -1.0] * 4, np.float32)
    extras = {
        "advantages": advantages,
        "returns": np.zeros(8, np.float32),
        "old_log_prob": before.numpy(),
        "old_value": np.zeros(8, np.float32),
        "trace/pre_tanh": chosen,
    }
    data = batch(8, 1, extras=extras)
    results = run(trainer, *(train_call("a", step, data, loss=Loss(name="ppo")) for step in range(10)))
    moved = (score() - before).numpy()
    assert (moved[advantages > 0] > 0).all()
    assert moved[advantages < 0].mean() < moved[advantages > 0].mean()
    assert results[0].metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    assert {"policy_loss", "value_loss", "entropy", "kl", "clip_fraction"} <= set(results[0].metrics)
