"""Which trajectories take their prefix features along, with fake environments and a fake policy."""

import numpy as np
import pytest

from joynexus.envs.base import EpisodeStart
from joynexus.rollout.collector import Collector
from joynexus.rollout.episode import EpisodeRecord
from joynexus.scheduling.shipping import MIN_PUTS, FeatureShipping
from joynexus.specs.environment import GymSpec
from joynexus.specs.tenant import ActionSpec
from joynexus.testing.fakes import COUNTER, FakePolicy, InProcessSession
from joynexus.types import ActionChunk, Observation, PrefixArrays, ViewSpec

SEEING = ViewSpec(cameras=("render",), image_size=(8, 8))
ACTION = ActionSpec(dim=1, horizon=10, num_action_steps=4, normalization="identity")
FRAME_BYTES = 8 * 8 * 3
FEATURE_BYTES = 5 * 4 + 1


def collect(policy, shipping, episodes=1, *, num_envs=1, **kwargs):
    spec = GymSpec(id=COUNTER, num_envs=num_envs, render=True, kwargs={"terminate_at": 12, **kwargs})
    session = InProcessSession(spec, SEEING)
    collector = Collector(session, policy, tenant="fake", action=ACTION, shipping=shipping)
    remaining = iter([EpisodeStart(episode=each, seed=each, initial_state=each) for each in range(episodes)])
    return collector.collect(lambda: next(remaining, None))


def policy(width=5, **changes):
    return FakePolicy(horizon=10, has_value=True, feature_width=width, **changes)


def always(max_bytes=1 << 20):
    return FeatureShipping("always", max_bytes=max_bytes)


def test_features_travel_in_place_of_frames():
    (plain,) = collect(policy(), None)
    (shipped,) = collect(policy(), always())
    assert plain.features is None
    assert plain.observation.has_frames
    assert not shipped.observation.has_frames
    assert shipped.features.arrays["hidden"][:, 0, 0].tolist() == [0.0, 4.0, 8.0]
    assert np.array_equal(shipped.observation.state, plain.observation.state)
    assert np.array_equal(shipped.observation.image_mask, plain.observation.image_mask)
    assert shipped.nbytes == plain.nbytes + 3 * (FEATURE_BYTES - FRAME_BYTES)


def test_each_row_of_a_shared_call_keeps_its_own_features():
    trajectories = list(collect(policy(), always(), 5, num_envs=3, is_repeatable=True))
    assert len(trajectories) == 5
    for each in trajectories:
        assert np.array_equal(each.features.arrays["hidden"][:, 0, 0], each.observation.state[:, 0])


@pytest.mark.parametrize("shipping", [None, FeatureShipping("never", max_bytes=1 << 20)])
def test_nothing_is_asked_for_where_nothing_is_shipped(shipping):
    asked = policy()
    (trajectory,) = collect(asked, shipping)
    assert not any(request.with_features for request in asked.requests)
    assert trajectory.observation.has_frames


def test_an_evaluation_asks_for_no_features():
    asked = policy()
    spec = GymSpec(id=COUNTER, render=True, kwargs={"terminate_at": 4})
    collector = Collector(InProcessSession(spec, SEEING), asked, tenant="fake", action=ACTION, shipping=always())
    list(collector.evaluate([EpisodeStart(episode=0, seed=0, initial_state=0)]))
    assert [request.with_features for request in asked.requests] == [False]


class Forgetful(FakePolicy):
    """Gives no features at the second decision."""

    def predict(self, request):
        answer = super().predict(request)
        self.feature_width = 0 if len(self.requests) == 1 else 5
        return answer


def test_an_episode_that_lacks_the_features_of_one_decision_ships_none_and_stops_asking():
    asked = Forgetful(horizon=10, feature_width=5)
    (trajectory,) = collect(asked, always())
    assert trajectory.features is None
    assert trajectory.observation.has_frames
    assert [request.with_features for request in asked.requests] == [True, True, False]


def test_a_policy_whose_features_change_their_width_ships_none():
    class Growing(FakePolicy):
        def predict(self, request):
            answer = super().predict(request)
            self.feature_width += 1
            return answer

    (trajectory,) = collect(Growing(horizon=10, feature_width=5), always())
    assert trajectory.features is None


def test_the_final_value_needs_no_features():
    asked = policy()
    (trajectory,) = collect(asked, always(), terminate_at=None, truncate_at=4)
    assert [request.with_features for request in asked.requests] == [True, False]
    assert len(trajectory.features) == len(trajectory) == 1


def test_features_that_are_too_large_leave_the_frames_where_they_are():
    asked, shipping = policy(1000), always(max_bytes=5000)
    trajectories = list(collect(asked, shipping, 4))
    assert all(each.features is None and each.observation.has_frames for each in trajectories)
    # 4 kB a decision: the second is one too many, the third is not asked for; after three episodes none is.
    assert [each.with_features for each in asked.requests] == [True, True, False] * 3 + [False] * 3
    assert shipping.reason == "too large"


def test_an_episode_keeps_its_own_rows_of_an_answer_only():
    chunk = ActionChunk(
        actions=np.zeros((3, 2, 1), dtype=np.float32),
        policy_version=0,
        features=PrefixArrays(
            arrays={"hidden": np.zeros((3, 1, 5), np.float32), "pad": np.zeros((3, 1), np.bool_)},
            dtype="float32",
            signature="fake",
        ),
    )
    episode = EpisodeRecord(EpisodeStart(episode=0, seed=0, initial_state=0))
    for _ in range(2):
        episode.observation = Observation(
            images=np.zeros((1, 1, 8, 8, 3), dtype=np.uint8),
            image_mask=np.ones((1, 1), dtype=np.bool_),
            state=np.zeros((1, 1), dtype=np.float32),
            instructions=("go",),
        )
        episode.decide(chunk, 1)
    assert (episode.feature_bytes, episode.frame_bytes) == (2 * FEATURE_BYTES, 2 * FRAME_BYTES)
    assert all(kept.features is None for kept, _ in episode._decisions)
    episode.drop_features()
    assert (episode.feature_bytes, episode.has_features, episode.features()) == (0, False, None)


def test_what_is_measured_decides_for_the_episodes_to_come():
    shipping = FeatureShipping("auto", max_bytes=1 << 20)
    slow = policy(100, prefix_seconds=1e-3)
    shipped = []
    for trajectory in collect(slow, shipping, 6):
        shipped.append(trajectory.features is not None)
        shipping.note_empty_call(1e-3)
        shipping.note_put(trajectory.nbytes, 1.0)
    assert shipped == [True] * (MIN_PUTS) + [False] * (6 - MIN_PUTS)
    assert shipping.rates.feature_bytes == 100 * 4 + 1
    assert shipping.rates.frame_bytes == FRAME_BYTES
    assert shipping.rates.encode_seconds == 1e-3
    assert shipping.reason == "dearer"
