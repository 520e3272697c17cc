"""The collector, with fake environments in this process and a fake policy."""

import numpy as np
import pytest

from joynexus.envs.base import EpisodeStart
from joynexus.errors import InvalidBatchError
from joynexus.rollout.collector import Collector, EpisodeCrash
from joynexus.rollout.video import VideoSink
from joynexus.specs.environment import GymSpec
from joynexus.specs.tenant import ActionSpec
from joynexus.testing.fakes import COUNTER, FakePolicy, InProcessSession
from joynexus.types import ActionChunk, Trajectory, ViewSpec

BLIND = ViewSpec(cameras=(), image_size=(16, 16))


def starts(count):
    return [EpisodeStart(episode=index, seed=100 + index, initial_state=index) for index in range(count)]


def taking(count):
    remaining = iter(starts(count))
    return lambda: next(remaining, None)


def session_of(num_envs=1, crashes=frozenset(), *, render=False, max_episode_steps=None, **kwargs):
    spec = GymSpec(id=COUNTER, num_envs=num_envs, kwargs=kwargs, render=render, max_episode_steps=max_episode_steps)
    return InProcessSession(spec, BLIND, crashes=crashes)


def collector_of(session, policy, *, horizon=10, num_action_steps=4):
    action = ActionSpec(dim=1, horizon=horizon, num_action_steps=num_action_steps, normalization="identity")
    return Collector(session, policy, tenant="fake", action=action, seed=7, ids="w0/")


def test_c47_executes_the_first_steps_of_a_chunk_then_asks_again():
    session, policy = session_of(terminate_at=12), FakePolicy(horizon=10)
    (trajectory,) = collector_of(session, policy).collect(taking(1))
    assert session.executed == [(0, [0.0, 1.0, 2.0, 3.0])] * 3
    assert [request.observation.state[0, 0] for request in policy.requests] == [0.0, 4.0, 8.0]
    assert trajectory.actions.shape == (3, 10, 1)
    assert trajectory.actions[1, :, 0].tolist() == list(range(10))


def test_c48_an_episode_that_ends_within_a_chunk_is_finished():
    session = session_of(terminate_at=2)
    reports = list(collector_of(session, FakePolicy(horizon=4), horizon=4).evaluate(starts(1)))
    assert [(each.status, each.num_steps, each.success_once) for each in reports] == [("success", 2, True)]


def test_trajectory_is_whole_and_typed():
    session, policy = session_of(terminate_at=6), FakePolicy(horizon=10, has_value=True, version=3)
    (trajectory,) = collector_of(session, policy).collect(taking(1))
    assert isinstance(trajectory, Trajectory)
    assert trajectory.trajectory_id == "w0/e0a0"
    assert (trajectory.tenant, trajectory.episode, trajectory.seed, trajectory.initial_state) == ("fake", 0, 100, 0)
    assert trajectory.num_steps.tolist() == [4, 2]
    assert trajectory.rewards.tolist() == [0.0 + 1 + 2 + 3, 0.0 + 1]
    assert trajectory.log_prob.tolist() == [-0.5, -0.5]
    assert trajectory.values.tolist() == [0.0, 4.0]
    assert trajectory.policy_versions.tolist() == [3, 3]
    assert trajectory.trace["raw"].shape == (2, 1)
    assert trajectory.observation.state[:, 0].tolist() == [0.0, 4.0]
    assert (trajectory.terminated, trajectory.truncated, trajectory.final_value) == (True, False, 0.0)
    assert (trajectory.success_once, trajectory.success_at_end) == (True, True)
    assert len(policy.requests) == 2


def test_truncation_asks_for_the_value_of_the_final_observation():
    session, policy = session_of(max_episode_steps=6), FakePolicy(horizon=10, has_value=True)
    (trajectory,) = collector_of(session, policy).collect(taking(1))
    assert (trajectory.terminated, trajectory.truncated) == (False, True)
    assert trajectory.final_value == 6.0
    assert len(trajectory) == 2
    assert policy.requests[-1].observation.state[0].tolist() == [6.0, 1.0, 0.0, 100.0]


def test_a_policy_without_critic_gives_zeros_and_is_not_asked_again():
    session, policy = session_of(max_episode_steps=4), FakePolicy(horizon=10)
    (trajectory,) = collector_of(session, policy).collect(taking(1))
    assert trajectory.final_value == 0.0
    assert trajectory.values.tolist() == [0.0]
    assert trajectory.log_prob.dtype == np.float32
    assert trajectory.trace == {}
    assert len(policy.requests) == 1


def test_environments_share_one_call_and_keep_their_rows():
    session, policy = session_of(num_envs=3, terminate_at=8), FakePolicy(horizon=10)
    trajectories = list(collector_of(session, policy).collect(taking(3)))
    assert [len(request.observation) for request in policy.requests] == [3, 3]
    assert policy.requests[0].observation.state[:, 2].tolist() == [0.0, 1.0, 2.0]
    assert sorted(each.episode for each in trajectories) == [0, 1, 2]
    for each in trajectories:
        assert set(each.observation.state[:, 2].tolist()) == {float(each.initial_state)}


def test_a_final_value_and_a_decision_share_a_call():
    session, policy = session_of(num_envs=2, max_episode_steps=4), FakePolicy(horizon=10, has_value=True)
    trajectories = list(collector_of(session, policy).collect(taking(3)))
    assert [each.final_value for each in trajectories] == [4.0, 4.0, 4.0]
    assert [len(request.observation) for request in policy.requests] == [2, 2, 1, 1]


def test_seeds_depend_on_episode_and_decision_alone():
    alone, beside = FakePolicy(horizon=10), FakePolicy(horizon=10)
    list(collector_of(session_of(num_envs=1, terminate_at=8), alone).collect(taking(2)))
    list(collector_of(session_of(num_envs=2, terminate_at=8), beside).collect(taking(2)))
    seeds_alone = [seed for request in alone.requests for seed in request.seeds]
    seeds_beside = [seed for request in beside.requests for seed in request.seeds]
    assert len(set(seeds_alone)) == 4
    assert set(seeds_alone) == set(seeds_beside)
    assert all(0 <= seed < 2**63 for seed in seeds_alone)


def test_c38_ten_episodes_on_two_environments_have_ten_initial_states():
    session = session_of(num_envs=2, terminate_at=3)
    reports = list(collector_of(session, FakePolicy(horizon=10)).evaluate(starts(10)))
    assert sorted(each.initial_state for each in reports) == list(range(10))
    assert sorted(each.initial_state for each in session.starts) == list(range(10))


def test_c36_every_episode_is_begun_once():
    session = session_of(terminate_at=4)
    trajectories = list(collector_of(session, FakePolicy(horizon=10)).collect(taking(4)))
    assert [each.initial_state for each in session.starts] == [0, 1, 2, 3]
    assert [each.observation.state[0, 1] for each in trajectories] == [1.0, 2.0, 3.0, 4.0]


def test_evaluation_acts_without_exploration_with_the_version_asked_for():
    policy = FakePolicy(horizon=10, version=5)
    collector = collector_of(session_of(terminate_at=3), policy)
    (newest,) = collector.evaluate(starts(1))
    (base,) = collector.evaluate(starts(1), version=0)
    assert (newest.policy_version, base.policy_version) == (5, 0)
    assert all(request.deterministic for request in policy.requests)
    assert [request.version for request in policy.requests] == [None, 0]


def test_success_once_is_not_success_at_end():
    session = session_of(terminate_at=None, fail_at=5)
    (report,) = collector_of(session, FakePolicy(horizon=10)).evaluate(starts(1))
    assert (report.status, report.success_once, report.num_steps) == ("failure", False, 5)


def test_a_crash_in_rollout_is_a_crash_and_the_others_go_on():
    session = session_of(num_envs=2, crashes=frozenset({(0, 1)}), terminate_at=8)
    outcomes = list(collector_of(session, FakePolicy(horizon=10)).collect(taking(4)))
    crashes = [each for each in outcomes if isinstance(each, EpisodeCrash)]
    assert [(each.start.episode, each.attempts) for each in crashes] == [(0, 1)]
    assert sorted(each.episode for each in outcomes if isinstance(each, Trajectory)) == [1, 2, 3]


def test_a_crash_in_evaluation_is_tried_again_once():
    session = session_of(crashes=frozenset({(0, 1)}), terminate_at=3)
    (report,) = collector_of(session, FakePolicy(horizon=10)).evaluate(starts(1))
    assert report.status == "success"
    assert report.num_steps == 3
    assert [each.episode for each in session.starts] == [0, 0]


def test_two_crashes_in_evaluation_are_reported_as_crash():
    session = session_of(crashes=frozenset({(0, 1), (0, 3)}), terminate_at=3)
    reports = list(collector_of(session, FakePolicy(horizon=10)).evaluate(starts(2)))
    assert [(each.episode, each.status) for each in reports] == [(0, "crash"), (1, "success")]
    assert "crash 3" in reports[0].error


def test_a_stop_gives_running_episodes_up():
    session = session_of(terminate_at=1000)
    asked = iter([False, False, False, True])
    assert list(collector_of(session, FakePolicy(horizon=10)).collect(taking(9), should_stop=lambda: next(asked))) == []
    assert len(session.starts) == 1


def test_c29_it_ends_when_the_episodes_run_out():
    trajectories = collector_of(session_of(num_envs=4, terminate_at=2), FakePolicy(horizon=10)).collect(taking(3))
    assert len(list(trajectories)) == 3


def test_results_come_before_the_next_start_is_asked_for():
    delivered = []
    remaining = iter(starts(3))

    def take_start():
        start = next(remaining, None)
        assert start is None or len(delivered) == start.episode
        return start

    for trajectory in collector_of(session_of(terminate_at=2), FakePolicy(horizon=10)).collect(take_start):
        delivered += [trajectory.episode]
    assert delivered == [0, 1, 2]


class DivergedPolicy:
    def predict(self, request):
        return ActionChunk(actions=np.full((1, 10, 1), np.nan, dtype=np.float32), policy_version=0)


def test_a_policy_that_diverged_is_not_a_crash():
    with pytest.raises(InvalidBatchError, match="NaN"):
        list(collector_of(session_of(), DivergedPolicy()).collect(taking(1)))


def test_videos_of_the_first_episodes(tmp_path):
    session = session_of(render=True, terminate_at=6)
    sink = VideoSink(tmp_path / "videos", first=1)
    reports = list(collector_of(session, FakePolicy(horizon=10)).evaluate(starts(2), video=sink))
    assert [bool(each.video) for each in reports] == [True, False]
    files = list((tmp_path / "videos").iterdir())
    assert [each.name for each in files] == ["episode_00000_success.mp4"]
    assert str(files[0]) == reports[0].video
