import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_world import (
    are_equal,
    assert_same,
    backbone,
    batch,
    drain,
    engine,
    forward_call,
    parameters,
    policy,
    run,
    step_call,
    train_call,
    trajectory,
    with_arrays,
)

from joynexus.errors import InvalidBatchError, NonFiniteError, SpecError, TenantFailedError
from joynexus.models.adapted_rows import AdaptedRows
from joynexus.models.adapters import adapting
from joynexus.models.policy import build_policy
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.specs.vla_modules import SmolVlaModuleSpec
from joynexus.training import adapted, group
from joynexus.training.engine import TrainingEngine
from joynexus.training.optimizer import gradient_norm
from joynexus.types import Loss, TrainingBatch, TrainingResult

SMOLVLA = SmolVlaModuleSpec(num_layers=2, max_state_dim=4, max_action_dim=5, num_sampling_steps=3)


def adapted_policy(module: Any = "oft", **adapter: Any) -> PolicySpec:
    return policy(module).model_copy(update={"adapter": AdapterSpec(**adapter)})


POLICIES = {
    "a": adapted_policy(),
    "b": adapted_policy("flow_matching", rank=4),
    "c": policy(),
    "d": adapted_policy("gaussian", targets=("q_proj", "up_proj")),
    "e": adapted_policy(SMOLVLA),
    "f": policy("flow_matching"),
}


def world(names: str, **changes: Any) -> TrainingEngine:
    trainer = engine(**changes)
    for name in names:
        trainer.open_slot(name, POLICIES[name], seed=ord(name))
    return trainer


def rows_of(name: str, step: int) -> Any:
    return batch(1 + (ord(name) + step) % 3, 100 * ord(name) + step)


def train(trainer: TrainingEngine, names: str, steps: range) -> list[dict[str, TrainingResult]]:
    """Train tenants in one group per step."""
    results = []
    for step in steps:
        futures = {name: trainer.submit(train_call(name, step, rows_of(name, step))) for name in names}
        drain(trainer)
        results.append({name: future.result(timeout=0) for name, future in futures.items()})
    return results


def test_a_mixed_group_trains_each_tenant_as_if_it_were_alone() -> None:
    together = world("abcdef")
    checksum = together.checksum()
    results = train(together, "abcdef", range(4))
    assert {each.group_tenants for each in results[0].values()} == {6}
    assert together.checksum() == checksum == backbone().checksum()
    for name, spec in POLICIES.items():
        alone = world(name)
        train(alone, name, range(4))
        assert_same(parameters(together, name), parameters(alone, name))
        before = parameters(world(name), name)
        moved = [key for key, each in parameters(together, name).items() if not np.array_equal(each, before[key])]
        assert any(key.startswith("adapter.") for key in moved) == (spec.adapter is not None)


def test_a_backward_reaches_the_adapter_through_the_prefix_and_through_the_modules_own_tokens() -> None:
    """Against one graph from the pixels to the loss, with SmolVLA's state token behind the prefix."""
    trainer, data = world("e"), without_padding(batch(3, 9))
    run(trainer, train_call("e", 0, rows_of("e", 0)), forward_call("e", 1, data))
    slot = trainer._slot("e")
    parts = slot.state.parts
    found = dict(slot.state.accumulated.gradient)
    rows = slot.row_maker(backbone()).prepare(data.observation).prefix
    generator = generator_before()
    with torch.enable_grad(), adapting(parts.adapter):
        answer = backbone()._encode_chunk((rows.images, rows.image_mask, rows.tokens, rows.token_mask))
        features = type(backbone().prefix(rows, "s"))(
            hidden=answer[0], pad=answer[1], keys=answer[2:4], values=answer[4:6], signature="s"
        )
        inputs = group._inputs(slot.state, data, features, generator)
        loss = parts.module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator).sum()
    named = parts.parameters()
    expected = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for (name, _), each in zip(named.items(), expected, strict=True):
        if each is not None:
            torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6)
    assert all(float(found[name].abs().max()) > 0.0 for name in found if ".v_proj.lora_A" in name)


def without_padding(data: TrainingBatch) -> TrainingBatch:
    return replace(data, action_is_pad=np.zeros_like(data.action_is_pad))


def generator_before() -> torch.Generator:
    """The generator as it was before the call that was made without a step."""
    fresh = world("e")
    run(fresh, train_call("e", 0, rows_of("e", 0)))
    return fresh._slot("e").state.generator


def test_neighbours_without_an_adapter_go_on_using_the_store() -> None:
    trainer = world("ac")
    for step in range(2):
        run(trainer, *(train_call(name, step, rows_of(name, 0)) for name in "ac"))
    usage = trainer.usage()
    rows = {name: len(rows_of(name, 0)) for name in "ac"}
    assert usage.prefixes["a"] == {"encoded": 2 * rows["a"], "reused": 0, "carried": 0}
    assert usage.prefixes["c"] == {"encoded": rows["c"], "reused": rows["c"], "carried": 0}
    assert len(trainer._store) == rows["c"]
    kinds = usage.by_kind["a"]
    assert min(kinds["prefix"], kinds["head_forward"], kinds["backward"], kinds["optimizer"]) > 0.0
    assert sum(kinds.values()) == pytest.approx(usage.device_seconds["a"])
    assert sum(usage.device_seconds.values()) == pytest.approx(usage.busy_seconds)


def test_features_are_refused() -> None:
    trainer = world("a")
    plain = world("c")
    run(plain, train_call("c", 0, rows_of("a", 0)))
    features = plain.hold(list(plain._slot("c").prefix_keys))
    with pytest.raises(InvalidBatchError, match="brings features, which an adapter makes those of one version"):
        trainer.submit(train_call("a", 0, rows_of("a", 0)), features=[each for each in features if each])


def spoil(trainer: TrainingEngine, tenant: str) -> None:
    for name, each in trainer._slot(tenant).state.parameters.items():
        if name.startswith("adapter."):
            each.data.fill_(float("nan"))


def test_not_a_number_in_one_adapter_fails_that_tenant_alone() -> None:
    trainer, alone = world("abc"), world("a")
    spoil(trainer, "b")
    futures = {name: trainer.submit(train_call(name, 0, rows_of(name, 0))) for name in "abc"}
    drain(trainer)
    assert isinstance(futures["b"].exception(), NonFiniteError)
    assert futures["a"].result(timeout=0).group_tenants == futures["c"].result(timeout=0).group_tenants == 3
    train(alone, "a", range(1))
    assert_same(parameters(trainer, "a"), parameters(alone, "a"))


def test_a_failure_without_neighbours_says_what_it_was() -> None:
    trainer = world("a")
    spoil(trainer, "a")
    future = trainer.submit(train_call("a", 0, rows_of("a", 0)))
    drain(trainer)
    assert isinstance(future.exception(), NonFiniteError)
    assert "rows are not finite" in str(future.exception())


def test_a_loss_that_reads_no_prefix_leaves_the_adapter_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = world("a")
    module = trainer._slot("a").state.parts.module

    def blind(prefix: Any, *_: Any) -> torch.Tensor:
        return module.leave.weight.square().sum().expand(len(prefix))

    monkeypatch.setattr(module, "loss", blind)
    run(trainer, forward_call("a", 0, rows_of("a", 0)))
    gradient = trainer._slot("a").state.accumulated.gradient
    assert {float(each.abs().max()) for name, each in gradient.items() if name.startswith("adapter.")} == {0.0}


def test_a_gradient_that_is_no_number_below_the_features_fails_that_tenant_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, alone = world("ab"), world("a")
    calls = iter([False, False, False, True])  # module of a, module of b, whole of a, whole of b

    def norm(gradient: Any) -> float:
        return float("nan") if next(calls) else gradient_norm(gradient)

    monkeypatch.setattr(adapted, "gradient_norm", norm)
    monkeypatch.setattr(group, "gradient_norm", norm)
    futures = {name: trainer.submit(train_call(name, 0, rows_of(name, 0))) for name in "ab"}
    drain(trainer)
    monkeypatch.undo()
    assert "adapter: the norm of the gradient is nan" in str(futures["b"].exception())
    train(alone, "a", range(1))
    assert_same(parameters(trainer, "a"), parameters(alone, "a"))


def test_a_module_that_raises_fails_its_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, alone = world("ab"), world("a")
    module = trainer._slot("b").state.parts.module

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(module, "loss", broken)
    futures = {name: trainer.submit(train_call(name, 0, rows_of(name, 0))) for name in "ab"}
    drain(trainer)
    assert isinstance(futures["b"].exception(), TenantFailedError)
    train(alone, "a", range(1))
    assert_same(parameters(trainer, "a"), parameters(alone, "a"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_a_joint_pass_fails_each_is_tried_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = world("abe")
    whole = getattr(AdaptedRows, "active" if where == "forward" else "backward")

    def alone_only(rows: AdaptedRows, *arguments: Any) -> Any:
        if len({id(each) for each in rows._rows}) > 1:
            raise RuntimeError("out of memory")
        return whole(rows, *arguments)

    monkeypatch.setattr(AdaptedRows, "active" if where == "forward" else "backward", alone_only)
    results = train(trainer, "abe", range(2))
    monkeypatch.undo()
    assert {each.group_tenants for each in results[0].values()} == {3}
    for name in "abe":
        alone = world(name)
        train(alone, name, range(2))
        assert_same(parameters(trainer, name), parameters(alone, name))


def test_large_groups_are_cut_into_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted, "CPU_TOKENS", 20)
    trainer = world("abde")
    train(trainer, "abde", range(2))
    monkeypatch.undo()
    other = world("abde")
    train(other, "abde", range(2))
    for name in "abde":
        assert_same(parameters(trainer, name), parameters(other, name))


def test_micro_batches_accumulate_to_their_union_and_masked_rows_do_not_count() -> None:
    one, two = world("a"), world("a")
    whole = batch(4, 7)
    run(one, train_call("a", 0, whole))
    run(
        two,
        forward_call("a", 0, whole.rows(np.array([0, 1]))),
        forward_call("a", 1, whole.rows(np.array([2, 3]))),
        step_call("a", 2),
    )
    first, second = parameters(one, "a"), parameters(two, "a")
    assert all(np.allclose(first[name], second[name], atol=1e-5) for name in first)
    before = parameters(two, "a")
    hidden = with_arrays(whole, extras={"valid": np.zeros(4, dtype=np.bool_)})
    (result,) = run(two, train_call("a", 3, hidden))
    assert result.metrics["skipped"] == 1.0
    assert are_equal(before, parameters(two, "a"))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    straight, first = world("ac"), world("ac")
    train(straight, "ac", range(4))
    train(first, "ac", range(2))
    first.save_state("a", tmp_path / "a")
    second = world("ac")
    second.load_state("a", tmp_path / "a")
    for step in (2, 3):
        run(second, train_call("a", step, rows_of("a", step)))
    assert_same(parameters(straight, "a"), parameters(second, "a"))
    assert any(name.startswith("adapter.") for name in parameters(second, "a"))


def test_version_0_comes_back_from_the_seed() -> None:
    trainer = world("a")
    before = parameters(trainer, "a")
    train(trainer, "a", range(2))
    base = trainer.base_snapshot("a").parameters
    assert are_equal(before, dict(base))
    assert not are_equal(before, parameters(trainer, "a"))
    assert trainer.status("a").num_parameters == sum(each.size for each in before.values())


def test_policy_gradients_reach_the_adapter() -> None:
    trainer = world("d")
    rng = np.random.default_rng(0)
    one = trajectory("d", 0)
    extras = {name: rng.standard_normal(3).astype(np.float32) for name in ("advantages", "returns", "old_value")}
    extras |= {"old_log_prob": np.full(3, -8.0, dtype=np.float32), "trace/pre_tanh": one.trace["pre_tanh"]}
    before = parameters(trainer, "d")
    run(trainer, train_call("d", 0, batch(3, 5, extras=extras), loss=Loss(name="ppo")))
    after = parameters(trainer, "d")
    assert any(not np.array_equal(before[name], after[name]) for name in after if ".lora_B." in name)


def test_an_adapter_learns_what_the_frozen_prefix_does_not_show() -> None:
    """A module that reads one number per token, on actions that depend on the frame."""
    module = policy().action_module.model_copy(update={"hidden_dim": 8, "token_dim": 1, "num_layers": 1})
    data = with_arrays(without_padding(batch(32, 3)), state=np.zeros((32, 3), dtype=np.float32))
    fast = OptimizerSpec(lr=1e-2, weight_decay=0.0)
    losses: dict[str, list[float]] = {}
    for name, spec in (("frozen", policy(module)), ("adapted", adapted_policy(module))):
        trainer = engine()
        trainer.open_slot("a", spec, seed=0)
        calls = (train_call("a", step, data, optimizer=fast) for step in range(30))
        losses[name] = [run(trainer, call)[0].metrics["loss"] for call in calls]
    assert losses["frozen"][0] == losses["adapted"][0]
    assert losses["adapted"][-1] < 0.85 * losses["frozen"][-1]


def test_targets_that_the_backbone_lacks_are_refused() -> None:
    trainer = engine()
    with pytest.raises(SpecError, match=r"adapter.targets: backbone 'smolvlm' has no layers \['qkv'\]. Use some of"):
        trainer.open_slot("a", adapted_policy(targets=("qkv",)), seed=0)
    assert trainer.tenants() == {}


def test_threads_do_not_see_each_others_adapters() -> None:
    parts = build_policy(POLICIES["a"], backbone(), seed=0, stats=None)
    for each in parts.parameters().values():
        each.data.fill_(0.5)
    rows = world("a")._slot("a").row_maker(backbone()).prepare(rows_of("a", 0).observation).prefix
    plain, found = backbone().prefix(rows, "s").hidden, []
    with adapting(parts.adapter):
        other = threading.Thread(target=lambda: found.append(backbone().prefix(rows, "s").hidden))
        other.start()
        other.join()
    assert torch.equal(plain, found[0])
