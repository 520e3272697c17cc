"""Neighbours can't change a tenant: not by their data, their faults, their number or their order."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from training_world import (
    SUPERVISED,
    are_equal,
    assert_same,
    backbone,
    batch,
    engine,
    forward_call,
    parameters,
    policy,
    run,
    step_call,
    train_call,
    with_arrays,
)

from joynexus.errors import NonFiniteError, TenantFailedError
from joynexus.models.action_module import ActionModule
from joynexus.training.engine import TrainingEngine
from joynexus.training.losses import LOSSES, LossFunction, LossInputs, LossRows
from joynexus.types import Array, Loss, TrainingBatch, TrainingCall

KINDS = ("gaussian", "oft", "flow_matching") * 2
TENANTS = tuple(f"tenant-{index}" for index in range(6))
STEPS = 20


def data(tenant: int, step: int) -> TrainingBatch:
    return batch(1 + (tenant + step) % 5, 10_000 * tenant + step)


def train(order: Sequence[int], *, steps: int = STEPS) -> TrainingEngine:
    trainer = engine()
    for tenant in order:
        trainer.open_slot(TENANTS[tenant], policy(KINDS[tenant]), seed=tenant)
    for step in range(steps):
        run(trainer, *(train_call(TENANTS[tenant], step, data(tenant, step)) for tenant in order))
    return trainer


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Array]]:
    return [parameters(train([tenant]), TENANTS[tenant]) for tenant in range(6)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 3, 1, 0, 2, 4)])
def test_six_tenants_together_equal_each_alone(alone: list[dict[str, Array]], order: Sequence[int]) -> None:
    together = train(order)
    for tenant in range(6):
        assert_same(parameters(together, TENANTS[tenant]), alone[tenant])
    assert together.usage().mean_tenants == 6.0


def test_neighbours_do_change_nothing_but_training_does(alone: list[dict[str, Array]]) -> None:
    fresh = train([0], steps=0)
    assert not are_equal(parameters(fresh, TENANTS[0]), alone[0])


def test_a_store_that_keeps_nothing_gives_the_same_numbers(alone: list[dict[str, Array]]) -> None:
    trainer = engine(prefix_store={"device_bytes": 0, "host_bytes": 0})
    trainer.open_slot(TENANTS[1], policy(KINDS[1]), seed=1)
    run(trainer, *(train_call(TENANTS[1], step, data(1, step)) for step in range(STEPS)))
    assert_same(parameters(trainer, TENANTS[1]), alone[1])


def everything(trainer: TrainingEngine, tenant: str) -> dict[str, Array]:
    """All that a slot holds."""
    state = trainer._slot(tenant).state
    found = {f"parameter/{name}": each.detach().numpy().copy() for name, each in state.parameters.items()}
    found |= {name: each.numpy().copy() for name, each in state.optimizer.tensors().items()}
    found |= {f"gradient/{name}": each.numpy().copy() for name, each in state.accumulated.gradient.items()}
    counters = [state.accumulated.rows, state.optimizer_steps, state.schedule_step]
    return found | {"generator": state.generator.get_state().numpy(), "counters": np.array(counters)}


def raising(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
    torch.rand(3, generator=inputs.generator)
    raise RuntimeError("a bug in the tenant's own loss")


@pytest.fixture
def broken_loss(monkeypatch: pytest.MonkeyPatch) -> Loss:
    monkeypatch.setitem(LOSSES, "broken", LossFunction(compute=raising))
    return Loss(name="broken")


def test_c10_nan_rows_and_a_raising_loss_fail_their_tenants_alone(
    alone: list[dict[str, Array]], broken_loss: Loss
) -> None:
    before = backbone().checksum()
    trainer = engine()
    for tenant in range(6):
        trainer.open_slot(TENANTS[tenant], policy(KINDS[tenant]), seed=tenant)
    for tenant in (2, 3):  # both have an optimizer state and an accumulated gradient to lose
        run(trainer, train_call(TENANTS[tenant], 0, data(tenant, 0)), forward_call(TENANTS[tenant], 1, data(tenant, 1)))
    kept = [everything(trainer, TENANTS[tenant]) for tenant in (2, 3)]
    poisoned = data(2, 2)
    poisoned.observation.state[0, 0] = np.nan
    healthy = [0, 1, 4, 5]
    futures = {}
    for step in range(STEPS):
        calls = {tenant: train_call(TENANTS[tenant], step, data(tenant, step)) for tenant in healthy}
        if step == 3:
            calls |= {
                2: train_call(TENANTS[2], 2, poisoned),
                3: train_call(TENANTS[3], 2, data(3, 2), loss=broken_loss),
            }
        futures |= {tenant: trainer.submit(call) for tenant, call in sorted(calls.items())}
        while trainer.has_work:
            trainer.step()
    with pytest.raises(NonFiniteError, match="state: 1 of"):
        futures[2].result(timeout=0)
    with pytest.raises(TenantFailedError, match=r"tenant-3.*RuntimeError: a bug in the tenant's own loss"):
        futures[3].result(timeout=0)
    for tenant in healthy:
        assert_same(parameters(trainer, TENANTS[tenant]), alone[tenant])
    for tenant, was in zip((2, 3), kept, strict=True):
        assert are_equal(everything(trainer, TENANTS[tenant]), was)
        assert run(trainer, step_call(TENANTS[tenant], 3))[0].optimizer_steps == 2
    assert backbone().checksum() == before


def infinite_gradient(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
    rows = module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator)
    return LossRows(loss=(rows - rows.detach()).sqrt())  # value 0, slope infinite


def huge_gradient(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
    rows = module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator)
    return LossRows(loss=(rows - rows.detach()) * 1e25)  # finite, but not its square


@pytest.mark.parametrize("compute", [infinite_gradient, huge_gradient])
def test_a_gradient_that_is_not_finite_is_refused_before_the_update(
    monkeypatch: pytest.MonkeyPatch, compute: object
) -> None:
    monkeypatch.setitem(LOSSES, "bad", LossFunction(compute=compute))  # type: ignore[arg-type]
    trainer = engine()
    trainer.open_slot("a", policy("flow_matching"), seed=0)
    run(trainer, train_call("a", 0, batch(3, 1)), forward_call("a", 1, batch(2, 2)))
    was = everything(trainer, "a")
    future = trainer.submit(train_call("a", 2, batch(2, 3), loss=Loss(name="bad")))
    trainer.step()
    with pytest.raises(NonFiniteError, match="gradient"):
        future.result(timeout=0)
    assert are_equal(everything(trainer, "a"), was)


def test_a_failing_joint_forward_fails_only_who_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    poison = batch(1, 99).observation.images[0]
    real = backbone().prefix

    def fragile(rows: object, signature: str) -> object:
        if any(torch.equal(image, torch.from_numpy(poison)) for image in rows.images):  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("no memory")
        return real(rows, signature)  # type: ignore[arg-type]

    solo = engine()
    solo.open_slot("a", policy(), seed=1)
    run(solo, train_call("a", 0, batch(2, 1)))
    monkeypatch.setattr(backbone(), "prefix", fragile)
    trainer = engine()
    for index, tenant in enumerate(("b", "a")):
        trainer.open_slot(tenant, policy(), seed=index)
    bad, good = trainer.submit(train_call("b", 0, batch(1, 99))), trainer.submit(train_call("a", 0, batch(2, 1)))
    trainer.step()
    with pytest.raises(TenantFailedError, match="OutOfMemoryError"):
        bad.result(timeout=0)
    assert good.result(timeout=0).encoded == 2
    assert_same(parameters(trainer, "a"), parameters(solo, "a"))


def test_a_module_that_writes_into_its_features_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def vandal(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
        rows = module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator)
        inputs.prefix.hidden.data.zero_()  # past autograd's own guard
        return LossRows(loss=rows)

    monkeypatch.setitem(LOSSES, "vandal", LossFunction(compute=vandal))
    solo = engine()
    solo.open_slot("a", policy(), seed=1)
    run(solo, *(train_call("a", step, batch(2, step)) for step in range(2)))
    trainer = engine()
    for index, tenant in enumerate(("vandal", "a")):
        trainer.open_slot(tenant, policy(), seed=index)
    for step in range(2):
        run(
            trainer,
            train_call("vandal", step, batch(2, step), loss=Loss(name="vandal")),
            train_call("a", step, batch(2, step)),
        )
    assert_same(parameters(trainer, "a"), parameters(solo, "a"))


def test_tenants_of_other_signatures_do_not_share_a_forward() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    trainer.open_slot("b", policy(tokens=11), seed=0)
    first, second = run(trainer, train_call("a", 0, batch(2, 1)), train_call("b", 0, batch(2, 2)))
    assert first.group_id != second.group_id
    assert first.group_tenants == second.group_tenants == 1
    assert trainer.tenants()["a"].signature != trainer.tenants()["b"].signature


def test_every_submission_order_of_three_gives_the_same(alone: list[dict[str, Array]]) -> None:
    del alone
    results = []
    for order in itertools.permutations(range(3)):
        trainer = train(order, steps=2)
        results.append([parameters(trainer, TENANTS[tenant]) for tenant in range(3)])
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert_same(mine, theirs)


def test_a_batch_only_of_masked_rows_is_no_step() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    was = parameters(trainer, "a")
    data = batch(2, 1, extras={"valid": np.zeros(2, dtype=np.bool_)})
    result = run(trainer, TrainingCall(tenant="a", sequence=0, batch=data, loss=SUPERVISED), step_call("a", 1))[1]
    assert (result.metrics["skipped"], result.optimizer_steps) == (1.0, 0)
    assert are_equal(parameters(trainer, "a"), was)
    assert with_arrays(data).extras == data.extras
