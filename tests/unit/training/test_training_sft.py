"""The SFT learner: strict order, exactly once, boundaries where they belong."""

import numpy as np
import pytest
from training_world import FAST, rl_item, sft_item, sft_tenant

from joynexus.errors import InvalidBatchError
from joynexus.training.learners.base import Boundary
from joynexus.training.learners.sft import AHEAD, SftLearner
from joynexus.types import TrainingBatch, TrainingResult


def result(loss: float = 1.0, *, stepped: bool = True) -> TrainingResult:
    metrics = {"loss": loss, "rows": 2.0} | ({"lr": 0.1, "grad_norm": 2.0} if stepped else {})
    return TrainingResult(
        tenant="a",
        sequence=0,
        metrics=metrics,
        optimizer_steps=1,
        group_id=1,
        group_tenants=1,
        group_samples=2,
        encoded=2,
        reused=0,
        device_seconds=0.1,
    )


def advance(learner: SftLearner, loss: float = 1.0) -> Boundary:
    call = learner.next_call()
    assert call is not None
    return learner.on_result(result(loss, stepped=call.optimizer is not None))


def test_micro_batches_are_taken_in_order_and_once() -> None:
    learner = SftLearner(sft_tenant(num_steps=4), 0)
    assert learner.offer(sft_item("a", 2)) == "ok"
    assert learner.next_call() is None
    assert learner.offer(sft_item("a", 0)) == "ok"
    assert learner.offer(sft_item("a", 0)) == "duplicate"
    call = learner.next_call()
    assert call is not None
    assert isinstance(call.batch, TrainingBatch)
    assert call.batch.sample_ids == ("1000/0", "1000/1")
    assert call.optimizer == FAST
    assert call.schedule_steps == 4
    assert learner.next_call() is None  # one call is under way
    learner.on_result(result())
    assert learner.offer(sft_item("a", 0)) == "duplicate"
    assert learner.next_call() is None  # 1 has not come
    assert learner.progress().next_ordinal == 1
    assert learner.offer(sft_item("a", 1)) == "ok"
    assert learner.progress().next_ordinal == 3
    for ordinal in (1, 2):
        call = learner.next_call()
        assert call is not None
        assert call.batch is not None
        assert call.batch.sample_ids[0] == f"{1000 + ordinal}/0"
        learner.on_result(result())


def test_items_of_other_workloads_or_past_the_end_are_stale() -> None:
    learner = SftLearner(sft_tenant(num_steps=2, gradient_accumulation=2), 0)
    assert learner.offer(sft_item("a", 0, workload=1)) == "stale"
    assert learner.offer(sft_item("a", 4)) == "stale"
    with pytest.raises(InvalidBatchError, match="is a Trajectory, workload 'sft' needs a TrainingBatch"):
        learner.offer(rl_item("a", 0))


def test_c78_the_optimizer_comes_with_the_last_micro_batch() -> None:
    learner = SftLearner(sft_tenant(num_steps=2, gradient_accumulation=4), 0)
    optimizers = []
    for ordinal in range(8):
        learner.offer(sft_item("a", ordinal))
        call = learner.next_call()
        assert call is not None
        optimizers.append(call.optimizer is not None)
        learner.on_result(result())
    assert optimizers == [False, False, False, True] * 2
    assert learner.progress().steps == 2


def test_boundaries_come_at_checkpoints_and_at_the_end() -> None:
    learner = SftLearner(sft_tenant(num_steps=5, checkpoint_every=2), 0)
    boundaries = []
    for ordinal in range(5):
        learner.offer(sft_item("a", ordinal))
        boundaries.append(advance(learner, loss=float(ordinal)))
        if boundaries[-1].checkpoint:
            settled = learner.take_settled()
            assert settled[-1] == f"a/0/{ordinal}"
            assert learner.take_settled() == []
    assert [each.publish for each in boundaries] == [False, True, False, True, True]
    assert [each.checkpoint for each in boundaries] == [False, True, False, True, True]
    progress = learner.progress()
    assert (progress.finished, progress.steps, progress.iterations, progress.target) == (True, 5, 5, 5)
    assert (progress.loss_first, progress.loss_last) == (0.0, 4.0)
    assert progress.metrics["lr"] == 0.1
    assert learner.room() == 0
    assert learner.offer(sft_item("a", 5)) == "stale"


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    learner = SftLearner(sft_tenant(num_steps=1, gradient_accumulation=2), 0)
    for ordinal, loss in enumerate((1.0, 2.0)):
        learner.offer(sft_item("a", ordinal))
        advance(learner, loss)
    assert learner.progress().loss_last == 1.5
    assert learner.progress().metrics["loss"] == 1.5


def test_room_keeps_a_few_ahead_and_never_starves() -> None:
    learner = SftLearner(sft_tenant(num_steps=100), 0)
    assert learner.room() == AHEAD + 1
    for ordinal in range(1, 20):
        learner.offer(sft_item("a", ordinal))
    assert learner.room() == 1  # the next one is still missing
    learner.offer(sft_item("a", 0))
    assert learner.room() == 0
    short = SftLearner(sft_tenant(num_steps=2), 0)
    assert short.room() == 2


def test_state_and_restore_go_on_behind_the_last_effect() -> None:
    learner = SftLearner(sft_tenant(num_steps=6), 0)
    for ordinal in range(4):
        learner.offer(sft_item("a", ordinal))
    advance(learner, 3.0)
    advance(learner, 2.0)
    resumed = SftLearner(sft_tenant(num_steps=6), 0)
    resumed.restore(learner.state())
    assert (resumed.progress().steps, resumed.progress().next_ordinal) == (2, 2)
    assert (resumed.progress().loss_first, resumed.progress().loss_last) == (3.0, 2.0)
    assert [resumed.offer(sft_item("a", ordinal)) for ordinal in range(4)] == ["duplicate", "duplicate", "ok", "ok"]
    with pytest.raises(TypeError, match="'next' is None"):
        SftLearner(sft_tenant(), 0).restore({"steps": 1})


def test_a_metric_that_is_not_finite_is_left_out_of_the_state() -> None:
    learner = SftLearner(sft_tenant(), 0)
    learner.offer(sft_item("a", 0))
    learner.next_call()
    odd = result()
    learner.on_result(TrainingResult(**{**{f: getattr(odd, f) for f in odd.__slots__}, "metrics": {"x": np.nan}}))
    assert learner.progress().metrics == {}
    assert learner.progress().loss_last is None
