import json

import numpy as np
import pytest

from joynexus.data.normalization import (
    compute_stats,
    policy_stats_from_json,
    policy_stats_to_json,
    stats_digest,
    stats_from_json,
    stats_to_json,
)
from joynexus.errors import DatasetError
from joynexus.types import NormalizationStats, PolicyStats


def _frames(*columns: object) -> np.ndarray:
    return np.stack([np.asarray(each, dtype=np.float32) for each in columns], axis=1)


def _equal(one: NormalizationStats, other: NormalizationStats) -> bool:
    names = ("mean", "std", "minimum", "maximum", "q01", "q99")
    same = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return same and one.count == other.count


def test_c59_statistics_use_every_frame():
    stats = compute_stats(_frames(range(8)))
    assert stats.mean[0] == pytest.approx(3.5)
    assert stats.std[0] == pytest.approx(2.291, abs=5e-4)
    assert (stats.minimum[0], stats.maximum[0], stats.count) == (0.0, 7.0, 8)


def test_c61_quantiles_are_those_of_all_frames_together():
    episode_a, episode_b = np.zeros(100), np.arange(100)
    stats = compute_stats(_frames(np.concatenate([episode_a, episode_b])))
    assert stats.q99[0] == pytest.approx(97.01, abs=1e-4)
    assert stats.q01[0] == 0.0


def test_dimensions_are_kept_apart():
    stats = compute_stats(_frames([0, 1, 2, 3], [7, 7, 7, 7]))
    assert stats.mean.tolist() == [1.5, 7.0]
    assert stats.std[1] == 0.0


def test_sums_do_not_lose_small_steps_on_a_large_offset():
    values = np.float32(1e6) + np.arange(16, dtype=np.float32) / 16
    stats = compute_stats(np.tile(values, 5000)[:, None])
    assert stats.std[0] == pytest.approx(np.arange(16).std() / 16, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_frames_that_are_not_finite_are_refused_with_their_place(bad: float):
    frames = _frames(range(5), range(5))
    frames[3, 1] = bad
    with pytest.raises(DatasetError, match="frame 3, dimension 1"):
        compute_stats(frames)


def test_no_frames_are_refused():
    with pytest.raises(DatasetError, match="no frames"):
        compute_stats(np.zeros((0, 3), dtype=np.float32))


def test_json_brings_every_float_back_bit_for_bit():
    frames = np.random.Generator(np.random.PCG64(0)).standard_normal((50, 6)).astype(np.float32) * 1e-3
    stats = compute_stats(frames)
    assert _equal(stats, stats_from_json(json.loads(json.dumps(stats_to_json(stats)))))


def test_policy_statistics_survive_json_with_their_absent_part():
    stats = PolicyStats(state=None, action=compute_stats(_frames(range(4))), source="maniskill_h5 demos/x.h5")
    back = policy_stats_from_json(json.loads(json.dumps(policy_stats_to_json(stats))))
    assert back.state is None
    assert back.action is not None
    assert stats.action is not None
    assert _equal(back.action, stats.action)
    assert back.source == stats.source


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("mean", None, "mean"), ("std", ["a"], "std"), ("count", True, "count"), ("q01", [0.0, 1.0], "differ in length")],
)
def test_malformed_statistics_are_refused(field: str, value: object, message: str):
    encoded = stats_to_json(compute_stats(_frames(range(4))))
    encoded[field] = value  # type: ignore[assignment]
    with pytest.raises(DatasetError, match=message):
        stats_from_json(encoded)


def test_digest_names_the_numbers_and_not_where_they_came_from():
    action = compute_stats(_frames(range(4)))
    other = compute_stats(_frames(range(5)))
    digest = stats_digest(PolicyStats(state=None, action=action, source="here"))
    assert digest == stats_digest(PolicyStats(state=None, action=action, source="there"))
    assert digest != stats_digest(PolicyStats(state=None, action=other, source="here"))
    assert digest != stats_digest(PolicyStats(state=action, action=None, source="here"))
