import json
from collections.abc import Sequence

import numpy as np
import pytest

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.fit_report import CHUNK, FitReport, measure_fit
from joynexus.data.normalization import compute_stats
from joynexus.specs.action_module import OftModuleSpec
from joynexus.specs.contract import InterfaceContract, StateField
from joynexus.specs.data import DatasetSpec
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec
from joynexus.types import Array, Observation, PolicyStats, TrainingBatch, ViewSpec


class FrameDataset(EpisodeDataset):
    """States and actions in memory; reading images is refused."""

    def __init__(self, states: Array, actions: Array, source: str = "new data"):
        self.states = np.asarray(states, dtype=np.float32)
        self.actions = np.asarray(actions, dtype=np.float32)
        self._source = source
        self.most_rows = 0

    @classmethod
    def open(cls, spec: DatasetSpec, view: ViewSpec) -> "FrameDataset":
        raise NotImplementedError

    @property
    def contract(self) -> InterfaceContract:
        width = self.states.shape[1]
        return InterfaceContract(
            source=self._source,
            cameras=(),
            image_size=None,
            state=(StateField(name="qpos", dim=width - 1), StateField(name="grip", dim=1)) if width else (),
            action_dim=self.actions.shape[1],
            control_mode="box",
            gripper="none",
        )

    @property
    def num_frames(self) -> int:
        return len(self.actions)

    def statistics(self) -> PolicyStats:
        state = compute_stats(self.states) if self.states.shape[1] else None
        return PolicyStats(state=state, action=compute_stats(self.actions), source=self._source)

    def read(self, indices: Sequence[int] | Array, horizon: int, *, with_frames: bool = True) -> TrainingBatch:
        assert not with_frames
        rows = np.asarray(indices)
        self.most_rows = max(self.most_rows, len(rows))
        return TrainingBatch(
            observation=Observation(
                images=np.zeros((len(rows), 0, 0, 0, 3), dtype=np.uint8),
                image_mask=np.ones((len(rows), 0), dtype=np.bool_),
                state=self.states[rows],
                instructions=("",) * len(rows),
            ),
            actions=np.repeat(self.actions[rows, None], horizon, axis=1),
            action_is_pad=np.zeros((len(rows), horizon), dtype=np.bool_),
            sample_ids=tuple(str(row) for row in rows),
        )

    def close(self) -> None:
        pass


def policy(state_dim: int = 3, action_dim: int = 2) -> PolicySpec:
    return PolicySpec(
        backbone="lite",
        observation=ObservationSpec(state_dim=state_dim, normalization="mean_std"),
        action=ActionSpec(dim=action_dim, horizon=4, num_action_steps=2, normalization="quantile"),
        action_module=OftModuleSpec(),
    )


def uniform(rows: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, width)).astype(np.float32)


def known() -> FrameDataset:
    """What the policy was trained on: all numbers in [-1, 1], the gripper always 0.5."""
    states = uniform(1000, 3)
    states[:2] = [[-1, -1, 0], [1, 1, 0]]
    states[:, 2] = 0.5
    actions = uniform(1000, 2, seed=1)
    actions[:2] = [[-1, -1], [1, 1]]
    return FrameDataset(states, actions, "old data")


def report(states: Array, actions: Array) -> FitReport:
    found = measure_fit(FrameDataset(states, actions), known().statistics(), policy())
    assert found is not None
    return found


def test_the_datasets_own_statistics_need_no_report():
    assert measure_fit(known(), known().statistics(), policy()) is None


def test_shares_and_worst_dimensions_are_counted():
    states, actions = uniform(100, 3, seed=2) * 0.5, uniform(100, 2, seed=3) * 0.5
    states[:, 2] = 0.5
    states[:10, 1] = 3.0  # 10 of 100, three times the range
    states[5:20, 0] = -1.5  # 15 of 100; 20 frames have one of them
    found = report(states, actions)
    state, action = found.parts
    assert (found.num_frames, found.dataset, found.statistics) == (100, "new data", "old data")
    assert (state.name, state.mode, action.mode) == ("state", "mean_std", "quantile")
    assert state.beyond_range == pytest.approx((0.15, 0.10, 0.0))
    assert state.any_beyond_range == pytest.approx(0.20)
    assert state.reach == pytest.approx((1.5, 3.0, 0.0))
    assert [state.labels[dim] for dim in state.worst()] == ["qpos[0]", "qpos[1]"]
    assert action.beyond_range == (0.0, 0.0)
    assert action.worst() == ()
    assert "state (mean_std): 20.0% of frames beyond [min, max]" in found.lines()[1]
    assert "worst: qpos[0] 15.0% and 15.0%, reaching 1.5 times the range; qpos[1] 10.0%" in found.lines()[1]
    assert "worst" not in found.lines()[2]


def test_the_limits_themselves_are_inside():
    state = report(np.array([[-1, 1, 0.5]] * 4), np.array([[1, -1]] * 4)).parts[0]
    assert state.any_beyond_range == 0.0
    assert state.any_beyond_quantiles == 1.0
    assert state.beyond_quantiles == (1.0, 1.0, 0.0)


def test_a_dimension_that_was_constant_and_moves_is_named():
    states = uniform(50, 3, seed=4) * 0.5
    states[:, 2] = 0.5
    states[:5, 2] = 0.6
    state = report(states, uniform(50, 2) * 0.5).parts[0]
    assert state.reach[2] == np.inf
    assert state.worst() == (2,)
    encoded = json.loads(json.dumps(state.to_json(), allow_nan=False))
    assert encoded["reach"]["grip"] is None
    assert encoded["worst"] == ["grip"]


def test_every_frame_counts_and_few_are_read_at_a_time():
    rows = CHUNK + 100
    states, actions = uniform(rows, 3, seed=5) * 0.5, uniform(rows, 2, seed=6) * 0.5
    states[:, 2] = 0.5
    states[-50:, 0] = 2.0
    dataset = FrameDataset(states, actions)
    found = measure_fit(dataset, known().statistics(), policy())
    assert found is not None
    assert found.parts[0].beyond_range[0] == pytest.approx(50 / rows)
    assert dataset.most_rows == CHUNK


def test_a_policy_without_state_reports_on_actions_alone():
    blind = FrameDataset(np.zeros((20, 0)), uniform(20, 2, seed=7) * 9)
    stats = PolicyStats(state=None, action=known().statistics().action, source="")
    found = measure_fit(blind, stats, policy(state_dim=0))
    assert found is not None
    assert [each.name for each in found.parts] == ["action"]
    assert found.statistics == "the policy"
    assert set(found.to_json()) == {"dataset", "statistics", "num_frames", "lines", "action"}
