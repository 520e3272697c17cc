"""An optimizer step lets go of the summed gradient as it divides it, and keeps what waits if it is refused."""

import weakref

import pytest
import torch
from training_world import FAST, batch, engine, forward_call, policy, run, step_call, train_call

from joynexus.errors import NonFiniteError
from joynexus.training import runner
from joynexus.training.engine import TrainingEngine
from joynexus.training.optimizer import TenantOptimizer
from joynexus.training.slot import Accumulated, TrainingSlot


def slot_of(trainer: TrainingEngine, tenant: str) -> TrainingSlot:
    return trainer._table.get(tenant)


def test_the_sum_of_a_step_is_gone_when_its_mean_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    compute, step = runner.forward_backward, TenantOptimizer.step

    def watched(*args):
        computed = compute(*args)
        summed.extend(weakref.ref(each) for each in computed.gradient.values())
        return computed

    def counting(self, *args):
        alive.append(sum(each() is not None for each in summed))
        return step(self, *args)

    monkeypatch.setattr(runner, "forward_backward", watched)
    monkeypatch.setattr(TenantOptimizer, "step", counting)
    trainer = engine()
    trainer.open_slot("a", policy(), seed=1)
    run(trainer, train_call("a", 0, batch(3, 0)))
    assert len(summed) > 4
    assert alive == [0]


def test_a_refused_step_keeps_what_was_accumulated() -> None:
    """Two micro-batches wait; a third, with the step, overflows: the sum of the two is what the next step applies."""
    trainer = engine()
    trainer.open_slot("a", policy(), seed=1)
    run(trainer, forward_call("a", 0, batch(3, 0)), forward_call("a", 1, batch(2, 1)))
    slot = slot_of(trainer, "a")
    before = {name: each.clone() for name, each in slot.state.accumulated.gradient.items()}
    huge = Accumulated().plus({name: torch.full_like(each, 1e25) for name, each in before.items()}, 1, 1.0)
    with pytest.raises(NonFiniteError):
        slot.state.apply(slot.state.accumulated.plus(huge.gradient, 1, 1.0), FAST, None)
    assert slot.state.accumulated.rows == 5
    assert slot.state.accumulated.gradient.keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in slot.state.accumulated.gradient.items())
    (result,) = run(trainer, step_call("a", 2))
    assert result.metrics["accumulated_rows"] == 5


def test_a_refused_step_by_itself_keeps_the_gradient_too() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=1)
    run(trainer, forward_call("a", 0, batch(3, 0)))
    state = slot_of(trainer, "a").state
    kept = {name: torch.full_like(each, 1e25) for name, each in state.accumulated.gradient.items()}
    state.accumulated = Accumulated(gradient=kept, rows=3, weight=3.0)
    future = trainer.submit(step_call("a", 1))
    trainer.step()
    with pytest.raises(NonFiniteError):
        future.result(timeout=0)
    assert state.accumulated.gradient.keys() == kept.keys()
    assert len(kept) > 4
