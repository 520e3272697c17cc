"""The PPO learner: which episodes, in which order, exactly once; and what it reports."""

import numpy as np
import pytest
from training_world import rl_item, rl_tenant, sft_item, trajectory

from joynexus.errors import InvalidBatchError
from joynexus.specs.algorithm import OptimizerSpec, ScheduleSpec
from joynexus.training.learners.experience import collect_decisions, epoch_order
from joynexus.training.learners.ppo import PpoLearner
from joynexus.training.learners.seen import SeenEpisodes
from joynexus.types import Array, TrainingResult


def answer(rows: int, **metrics: float) -> TrainingResult:
    named = {"loss": 1.0, "rows": float(rows), "kl": 0.1, "grad_norm": 1.0, **metrics}
    return TrainingResult(
        tenant="a",
        sequence=0,
        metrics=named,
        optimizer_steps=1,
        group_id=1,
        group_tenants=1,
        group_samples=rows,
        encoded=0,
        reused=rows,
        device_seconds=0.1,
    )


def iterate(learner: PpoLearner, **metrics: float) -> list[tuple[str, ...]]:
    """Run one iteration; the sample ids of its minibatches in order."""
    seen = []
    while (call := learner.next_call()) is not None:
        assert call.batch is not None
        assert call.loss is not None
        assert call.optimizer is not None
        seen.append(call.batch.sample_ids)
        boundary = learner.on_result(answer(len(call.batch), **metrics))
        if boundary.publish:
            assert boundary.checkpoint
            learner.version += 1
            break
    return seen


def test_an_iteration_is_epochs_of_shuffled_minibatches_over_whole_episodes() -> None:
    learner = PpoLearner(rl_tenant(episodes=3, num_epochs=2, minibatch_size=4), 0)
    assert learner.room() == 3
    for episode in range(3):
        assert learner.next_call() is None
        assert learner.offer(rl_item("a", episode)) == "ok"
    assert learner.room() == 0
    minibatches = iterate(learner)
    assert [len(each) for each in minibatches] == [4, 4, 1] * 2
    every = {f"0-{episode:06d}-0/{decision}" for episode in range(3) for decision in range(3)}
    first, second = ([name for each in half for name in each] for half in (minibatches[:3], minibatches[3:]))
    assert set(first) == set(second) == every
    assert len(first) == len(second) == 9
    assert first != second
    progress = learner.progress()
    assert (progress.iterations, progress.steps, progress.next_ordinal) == (1, 6, 3)


def test_nothing_is_asked_for_while_an_update_runs() -> None:
    learner = PpoLearner(rl_tenant(), 0)
    for episode in range(3):
        learner.offer(rl_item("a", episode))
    call = learner.next_call()
    assert call is not None
    assert call.batch is not None
    assert learner.room() == 0
    assert learner.next_call() is None
    assert learner.offer(rl_item("a", 3)) == "ok"  # leased before; it waits for the next update
    learner.on_result(answer(len(call.batch)))
    iterate(learner)
    assert learner.room() == 2


def test_the_order_of_arrival_changes_nothing() -> None:
    orders = [(0, 1, 2), (2, 0, 1)]
    found = []
    for order in orders:
        learner = PpoLearner(rl_tenant(), 0)
        for episode in order:
            learner.offer(rl_item("a", episode))
        found.append(iterate(learner))
    assert found[0] == found[1]


def test_a_restart_between_iterations_repeats_the_next_one_exactly() -> None:
    learner = PpoLearner(rl_tenant(seed=5), 0)
    for episode in range(6):
        learner.offer(rl_item("a", episode))
    iterate(learner)
    resumed = PpoLearner(rl_tenant(seed=5), 0)
    resumed.restore(learner.state())
    resumed.version = learner.version
    offered = [resumed.offer(rl_item("a", episode)) for episode in (5, 4, 3, 2, 1, 0)]
    assert offered == ["ok"] * 3 + ["duplicate"] * 3
    expected, repeated = iterate(learner), iterate(resumed)
    assert expected == repeated
    assert learner.progress() == resumed.progress()


def test_shuffles_differ_by_seed_workload_iteration_and_epoch() -> None:
    base = {"seed": 0, "workload": 0, "iteration": 0, "epoch": 0}
    orders = [epoch_order(50, **base).tolist()]
    orders += [epoch_order(50, **{**base, name: 1}).tolist() for name in base]
    assert len({tuple(each) for each in orders}) == 5
    assert all(sorted(each) == list(range(50)) for each in orders)
    assert orders[0] == epoch_order(50, **base).tolist()


def test_too_old_episodes_are_stale_and_counted() -> None:
    learner = PpoLearner(rl_tenant(max_staleness=1), 0)
    learner.version = 3
    assert learner.oldest_useful() == 2
    assert learner.offer(rl_item("a", 0, version=1)) == "stale"
    assert learner.offer(rl_item("a", 1, version=2)) == "ok"
    assert learner.offer(rl_item("a", 0, version=3)) == "duplicate"  # the same episode is never taken again
    assert learner.progress().dropped_stale == 1
    assert learner.offer(rl_item("a", 5, workload=1, version=3)) == "stale"
    assert learner.progress().dropped_stale == 1  # of another workload: not too old, only not ours


def test_an_episode_that_grew_stale_while_it_waited_is_dropped() -> None:
    learner = PpoLearner(rl_tenant(max_staleness=0, episodes=2), 0)
    for episode in range(3):
        learner.offer(rl_item("a", episode))
    iterate(learner)
    assert learner.next_call() is None
    assert learner.progress().dropped_stale == 1
    assert learner.room() == 2
    assert learner.take_settled() == ["a/0/0-000000-0", "a/0/0-000001-0", "a/0/0-000002-0"]


def test_a_simulators_nan_costs_an_episode_not_the_run() -> None:
    learner = PpoLearner(rl_tenant(), 0)
    rewards = np.array([1.0, np.nan, 0.0], np.float32)
    assert learner.offer(rl_item("a", 0, rewards=rewards)) == "stale"
    assert learner.progress().metrics["dropped_invalid"] == 1.0
    assert learner.room() == 3
    short = rl_item("a", 1)
    short.payload.trace["pre_tanh"] = short.payload.trace["pre_tanh"][:2]
    with pytest.raises(InvalidBatchError, match=r"3 decisions, but lengths .'trace/pre_tanh': 2"):
        learner.offer(short)
    with pytest.raises(InvalidBatchError, match="is a TrainingBatch, algorithm 'ppo' needs a Trajectory"):
        learner.offer(sft_item("a", 0))


def test_no_episode_counts_twice_however_often_it_comes() -> None:
    learner = PpoLearner(rl_tenant(num_iterations=50, episodes=2, max_staleness=100), 0)
    rng = np.random.default_rng(0)
    counted: list[str] = []
    while not learner.progress().finished:
        for episode in rng.permutation(100)[:7]:
            learner.offer(rl_item("a", int(episode), item_id=f"try-{rng.integers(1 << 30)}"))
        counted += {name for minibatch in iterate(learner) for name in minibatch}
        if learner.progress().iterations % 7 == 3:  # a crash
            resumed = PpoLearner(rl_tenant(num_iterations=50, episodes=2, max_staleness=100), 0)
            resumed.restore(learner.state())
            resumed.version = learner.version
            learner = resumed
    assert len(counted) == len(set(counted)) == 100 * 3


def test_what_was_seen_is_bounded_and_never_forgotten() -> None:
    seen = SeenEpisodes(capacity=3)
    for episode in (5, 1, 9, 7, 3):
        seen.add(episode)
    assert [episode in seen for episode in (1, 3, 5, 7, 9)] == [True] * 5
    assert 4 not in seen
    assert 8 not in seen
    assert 10 not in seen
    assert 2 in seen  # below the oldest that is remembered: too old to be of use
    assert seen.next_unseen == 10
    assert len(seen.state()["episodes"]) == 3
    again = SeenEpisodes(capacity=3)
    again.restore(seen.state())
    assert again.state() == seen.state()


def test_metrics_of_an_iteration() -> None:
    learner = PpoLearner(rl_tenant(episodes=2, minibatch_size=2, num_epochs=1, num_iterations=1), 0)
    learner.version = 1
    learner.offer(rl_item("a", 0, version=0, rewards=np.array([1.0, 2.0, 3.0], np.float32)))
    learner.offer(rl_item("a", 1, version=1, rewards=np.array([0.0, 0.0, 4.0], np.float32)))
    for kl in (0.1, 0.2, 0.6):
        call = learner.next_call()
        assert call is not None
        assert call.batch is not None
        learner.on_result(answer(len(call.batch), kl=kl, loss=10 * kl))
    progress = learner.progress()
    assert progress.finished
    assert progress.metrics["return_mean"] == 5.0
    assert progress.metrics["success_once"] == progress.metrics["success_at_end"] == 0.5
    assert progress.metrics["decisions"] == 6
    assert progress.metrics["episode_steps"] == 6
    assert progress.metrics["staleness"] == 0.5
    assert progress.metrics["kl"] == pytest.approx(0.3)
    assert progress.loss_first == progress.loss_last == pytest.approx(3.0)
    assert "explained_variance" in progress.metrics
    assert learner.offer(rl_item("a", 2, version=1)) == "stale"
    assert learner.next_call() is None
    assert learner.room() == 0


def test_c30_equal_rewards_are_an_ordinary_iteration() -> None:
    learner = PpoLearner(rl_tenant(episodes=4), 0)
    same = {"rewards": np.ones(2, np.float32), "values": np.zeros(2, np.float32), "length": 2}
    for episode in range(4):
        learner.offer(rl_item("a", episode, terminated=True, truncated=False, final_value=0.0, **same))
    call = learner.next_call()
    assert call is not None
    assert call.batch is not None
    assert np.isfinite(call.batch.extras["advantages"]).all()
    learner.on_result(answer(4))
    iterate(learner)
    assert learner.progress().iterations == 1


def test_advantages_are_normalised_over_the_iteration_and_returns_are_not() -> None:
    episodes = [trajectory("a", episode) for episode in range(3)]
    plain = collect_decisions(episodes, discount=0.9, gae_lambda=0.8, is_normalized=False).batch.extras
    scaled = collect_decisions(episodes, discount=0.9, gae_lambda=0.8, is_normalized=True).batch.extras
    advantages: Array = scaled["advantages"]
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std()) == pytest.approx(1.0, abs=1e-4)
    assert np.array_equal(plain["returns"], scaled["returns"])
    assert np.allclose(plain["returns"], plain["advantages"] + plain["old_value"])
    assert {"old_log_prob", "trace/pre_tanh"} <= set(scaled)


def test_the_schedule_ends_with_the_last_iteration() -> None:
    linear = OptimizerSpec(lr=1.0, schedule=ScheduleSpec(type="linear"))
    learner = PpoLearner(rl_tenant(optimizer=linear, num_iterations=3, episodes=2, num_epochs=1, minibatch_size=2), 0)
    ends = []
    for iteration in range(3):
        for episode in (2 * iteration, 2 * iteration + 1):
            learner.offer(rl_item("a", episode, version=iteration, length=3 + iteration))
        call = learner.next_call()
        assert call is not None
        assert call.batch is not None
        ends.append(call.schedule_steps)
        learner.on_result(answer(len(call.batch)))
        iterate(learner)
    assert ends == [9, 3 + 2 * 4, 7 + 5]
    assert learner.progress().steps == 12
