import numpy as np
import pytest

from joynexus.rollout.assignment import assign_episodes, episode_start
from joynexus.rollout.chunking import chunk_reward, chunk_success, executed_part, row_seed
from joynexus.rollout.report import summarize
from joynexus.types import EpisodeReport, broadcast_instructions


def report(episode, status):
    return EpisodeReport(
        episode=episode,
        seed=episode,
        initial_state=episode,
        status=status,
        success_once=status == "success",
        success_at_end=False,
        num_steps=10,
        episode_return=2.0,
        policy_version=1,
    )


def test_c44_crashes_are_not_failures():
    statuses = ["success"] * 6 + ["failure"] * 2 + ["crash"] * 2
    summary = summarize([report(index, status) for index, status in enumerate(statuses)])
    assert summary["success_rate"] == 0.75
    assert (summary["successes"], summary["episodes"], summary["errors"]) == (6, 8, 2)
    assert summary["status"] == "INCOMPLETE"


def test_a_complete_evaluation():
    summary = summarize([report(0, "success"), report(1, "failure")], expected=2)
    assert summary["status"] == "COMPLETE"
    assert (summary["success_rate"], summary["success_at_end_rate"]) == (0.5, 0.0)
    assert (summary["mean_steps"], summary["mean_return"], summary["policy_versions"]) == (10.0, 2.0, [1])


def test_episodes_that_never_came_make_it_incomplete():
    summary = summarize([report(0, "success")], expected=3)
    assert (summary["missing"], summary["status"]) == (2, "INCOMPLETE")


def test_nothing_finished_has_no_rate():
    summary = summarize([report(0, "crash")])
    assert summary["success_rate"] is None
    assert summary["status"] == "INCOMPLETE"


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 200])
def test_c39_episodes_are_distinct_whatever_the_number_of_workers(num_workers):
    dealt = assign_episodes(128, num_workers)
    assert len(dealt) == num_workers
    assert sorted(episode for worker in dealt for episode in worker) == list(range(128))
    begun = [episode_start(10_000, episode) for worker in dealt for episode in worker]
    assert {each.seed for each in begun} == set(range(10_000, 10_128))
    assert {each.initial_state for each in begun} == set(range(128))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_no_worker_is_an_error():
    with pytest.raises(ValueError, match="num_workers"):
        assign_episodes(1, 0)


def test_c47_the_first_actions_of_a_chunk_are_executed():
    chunk = np.arange(10, dtype=np.float32)[:, None]
    assert executed_part(chunk, 4)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_every_step_of_a_chunk_counts():
    assert chunk_reward(np.asarray([1.0, 2.0, 0.5], np.float32)) == 3.5
    assert chunk_success(np.asarray([False, True, False]), once=False) == (True, False)
    assert chunk_success(np.asarray([False, False]), once=True) == (True, False)


def test_row_seed_is_the_same_everywhere():
    known = row_seed(0, episode_seed=1, episode=2, decision=3)
    assert known == 8415226463665777121
    others = {row_seed(0, episode_seed=1, episode=2, decision=each) for each in range(100)}
    assert len(others) == 100


def test_c55_every_row_has_its_own_instruction():
    prompts = ["open", "close", "push", "pull"]
    assert broadcast_instructions(prompts, 4) == tuple(prompts)
    assert broadcast_instructions("open", 4) == ("open",) * 4
    with pytest.raises(ValueError, match="3 instructions for 4 rows"):
        broadcast_instructions(prompts[:3], 4)
