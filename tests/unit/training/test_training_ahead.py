"""Rows that another thread makes before their group: the same rows, never another tenant's or another time's."""

from concurrent.futures import Future, wait

import numpy as np
import pytest
from training_world import (
    are_equal,
    backbone,
    batch,
    drain,
    engine,
    parameters,
    policy,
    policy_stats,
    run,
    train_call,
    with_arrays,
)

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.models.policy import build_policy
from joynexus.training.ahead import Ahead, PreparedRows, Preparer, RowMaker
from joynexus.training.engine import TrainingEngine
from joynexus.types import TrainingBatch


def maker(*, shift: float = 0.0) -> RowMaker:
    parts = build_policy(policy(normalization="mean_std"), backbone(), seed=0, stats=policy_stats(shift=shift))
    return RowMaker(backbone=backbone(), policy=policy(), normalizer=parts.normalizer, signature=parts.signature)


def opened() -> TrainingEngine:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=1)
    return trainer


def nothing(*_: object) -> None:
    """As if there were no other thread."""


def wait_for(ready: Ahead | None) -> None:
    """Wait until the other thread is done: what it has not begun would be taken from it."""
    assert ready is not None
    wait([ready._future])  # pyright: ignore[reportPrivateUsage]


def test_made_ahead_or_not_the_parameters_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [batch(4, seed) for seed in range(3)]
    beside = opened()
    run(beside, *(train_call("a", index, each) for index, each in enumerate(data)))
    alone = opened()
    monkeypatch.setattr(Preparer, "begin", nothing)
    run(alone, *(train_call("a", index, each) for index, each in enumerate(data)))
    assert are_equal(parameters(beside, "a"), parameters(alone, "a"))


def test_rows_made_ahead_are_used_and_their_cpu_time_is_charged() -> None:
    trainer = opened()
    data = batch(4, 1)
    ready = trainer.prepare_ahead("a", data)
    assert ready is not None
    made: list[PreparedRows] = []

    class Noted(Ahead):
        def __init__(self) -> None: ...

        def take(self, maker: RowMaker) -> PreparedRows | None:
            wait_for(ready)
            rows = ready.take(maker)
            assert rows is not None
            made.append(rows)
            return rows

    trainer.submit(train_call("a", 0, data), ahead=Noted())
    drain(trainer)
    assert len(made) == 1
    assert made[0].cpu_s > 0
    assert trainer.usage().by_kind["a"]["copy"] >= made[0].cpu_s


def test_a_call_takes_the_rows_that_count_of_those_made_ahead() -> None:
    full = batch(4, 1)
    padded = full.action_is_pad.copy()
    padded[[0, 2]] = True
    data = with_arrays(full, action_is_pad=padded)
    begun, inline = opened(), opened()
    ready = begun.prepare_ahead("a", data)
    wait_for(ready)
    begun.submit(train_call("a", 0, data), ahead=ready)
    drain(begun)
    run(inline, train_call("a", 0, data.rows(np.array([1, 3]))))
    assert are_equal(parameters(begun, "a"), parameters(inline, "a"))


def test_statistics_that_changed_since_make_the_rows_anew() -> None:
    before, now = maker(), maker(shift=1.0)
    ready = Preparer().begin(before, batch(2, 1))
    wait_for(ready)
    assert ready is not None
    assert ready.take(now) is None
    assert ready.take(before) is not None


def test_what_was_not_begun_is_left_to_the_engine() -> None:
    waiting: Future[PreparedRows] = Future()
    assert Ahead(maker(), waiting).take(maker()) is None
    assert waiting.cancelled()


def test_rows_that_cannot_be_made_fail_their_call_alone() -> None:
    trainer = opened()
    trainer.open_slot("b", policy(), seed=2)
    wrong = with_arrays(batch(2, 1), instructions=("far too long an instruction for the bucket",) * 2)
    bad, good = trainer.submit(train_call("a", 0, wrong)), trainer.submit(train_call("b", 0, batch(2, 2)))
    drain(trainer)
    with pytest.raises(InvalidBatchError, match="max_prompt_tokens"):
        bad.result(timeout=0)
    assert good.result(timeout=0).encoded == 2


def test_a_state_that_is_not_finite_is_refused_as_before() -> None:
    trainer = opened()
    data = batch(2, 1)
    state = data.observation.state.copy()
    state[0, 0] = np.nan
    failed = trainer.submit(train_call("a", 0, with_arrays(data, state=state)))
    drain(trainer)
    with pytest.raises(NonFiniteError, match="state"):
        failed.result(timeout=0)


def test_rows_without_frames_are_not_made() -> None:
    data = batch(2, 1)
    light = TrainingBatch(
        observation=data.observation.without_frames(),
        actions=data.actions,
        action_is_pad=data.action_is_pad,
        sample_ids=data.sample_ids,
    )
    assert Preparer().begin(maker(), light) is None
    assert Preparer().begin(maker(), None) is None


class Gate(Ahead):
    """Rows that let the engine go on only when the next call's are made."""

    def __init__(self, rows: Ahead, following: Ahead) -> None:
        self._rows, self._following = rows, following

    def take(self, maker: RowMaker) -> PreparedRows | None:
        wait_for(self._following)
        return self._rows.take(maker)


def test_the_next_rows_are_made_while_the_engine_is_in_a_group() -> None:
    """The engine's thread stands still inside the first group until another thread has made the second one's rows."""
    trainer = opened()
    data = [batch(2, 1), batch(2, 2)]
    first, second = (trainer.prepare_ahead("a", each) for each in data)
    assert first is not None
    assert second is not None
    futures = [
        trainer.submit(train_call("a", 0, data[0]), ahead=Gate(first, second)),
        trainer.submit(train_call("a", 1, data[1]), ahead=second),
    ]
    drain(trainer)
    assert [future.result(timeout=0).encoded for future in futures] == [2, 2]
