"""AdamW with moments in bfloat16: half the bytes, float32's arithmetic, and a bound on what the rounding costs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from training_world import are_equal, batch, engine, largest_difference, parameters, policy, run, train_call

from joynexus.specs.algorithm import OptimizerSpec
from joynexus.training.optimizer import TenantOptimizer

SPEC = OptimizerSpec(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=None)


def optimizers() -> tuple[nn.Parameter, TenantOptimizer, nn.Parameter, TenantOptimizer]:
    start = torch.linspace(-1.0, 1.0, 64)
    exact, short = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    return exact, TenantOptimizer({"w": exact}), short, TenantOptimizer({"w": short}, moments="bfloat16")


def test_the_first_step_is_that_of_float32() -> None:
    exact, one, short, other = optimizers()
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(0))
    one.step({"w": gradient.clone()}, SPEC, 1e-2)
    other.step({"w": gradient.clone()}, SPEC, 1e-2)
    torch.testing.assert_close(short, exact, rtol=1e-6, atol=1e-7)


def test_the_second_moment_stays_within_the_stated_bound() -> None:
    _, one, _, other = optimizers()
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        gradient = torch.randn(64, generator=generator) * 0.1
        one.step({"w": gradient.clone()}, SPEC, 1e-3)
        other.step({"w": gradient.clone()}, SPEC, 1e-3)
    exact, short = (each.tensors()["exp_avg_sq/w"].float() for each in (one, other))
    assert other.tensors()["exp_avg_sq/w"].dtype == torch.bfloat16
    assert float(((short - exact).abs() / exact).max()) <= 2**-9 / (1 - SPEC.betas[1])


def test_both_come_to_the_same_minimum() -> None:
    exact, one, short, other = optimizers()
    target = torch.randn(64, generator=torch.Generator().manual_seed(2))
    spec = SPEC.model_copy(update={"weight_decay": 0.0})
    for step in range(300):
        lr = 5e-2 * (1 - step / 300)
        for weight, optimizer in ((exact, one), (short, other)):
            optimizer.step({"w": 2 * (weight.detach() - target)}, spec, lr)
    assert float((exact.detach() - target).abs().max()) < 1e-2
    assert float((short.detach() - target).abs().max()) < 1e-2


def test_a_slot_takes_16_bytes_a_parameter_in_place_of_20() -> None:
    full, half = engine(), engine(moments="bfloat16")
    for trainer in (full, half):
        trainer.open_slot("a", policy(), seed=1)
    count = full.status("a").num_parameters
    assert full.status("a").slot_bytes == 20 * count
    assert half.status("a").slot_bytes == 16 * count


def test_training_beside_others_equals_training_alone() -> None:
    alone, beside = engine(moments="bfloat16"), engine(moments="bfloat16")
    alone.open_slot("a", policy(), seed=1)
    for name, seed in (("b", 2), ("a", 1)):
        beside.open_slot(name, policy(), seed=seed)
    for step in range(3):
        run(alone, train_call("a", step, batch(3, step)))
        run(beside, train_call("b", step, batch(4, 50 + step)), train_call("a", step, batch(3, step)))
    assert largest_difference(parameters(alone, "a"), parameters(beside, "a")) <= 1e-6


@pytest.mark.parametrize("resumed_with", ["bfloat16", "float32"])
def test_a_resumed_slot_goes_on(tmp_path: Path, resumed_with: str) -> None:
    first, second = engine(moments="bfloat16"), engine(moments=resumed_with)
    for trainer in (first, second):
        trainer.open_slot("a", policy(), seed=1)
    run(first, *(train_call("a", step, batch(3, step)) for step in range(2)))
    second.load_state("a", first.save_state("a", tmp_path / "state"))
    for trainer in (first, second):
        run(trainer, train_call("a", 2, batch(3, 2)))
    if resumed_with == "bfloat16":
        assert are_equal(parameters(first, "a"), parameters(second, "a"))
    else:
        assert largest_difference(parameters(first, "a"), parameters(second, "a")) < 1e-3
        assert np.isfinite(next(iter(parameters(second, "a").values()))).all()
