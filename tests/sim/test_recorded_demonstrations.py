"""Demonstrations from the planner to a dataset, against the environment that a policy will act in."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from joynexus.data.demonstrations import generate_demonstrations
from joynexus.data.maniskill_h5 import ManiSkillH5Dataset
from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.session import VectorSession
from joynexus.errors import DatasetError, SpecError
from joynexus.specs.contract import check_sources
from joynexus.specs.data import ManiSkillH5Spec
from joynexus.specs.environment import ManiSkillSpec
from joynexus.types import Observation, ViewSpec

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

TASK = "PushCube-v1"
VIEW = ViewSpec(cameras=("base_camera",), image_size=(64, 64))
SEED = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demos")
    seen: list[tuple[int, int]] = []
    generate_demonstrations(
        TASK, folder, num_episodes=2, view=VIEW, seed=SEED, progress=lambda *counts: seen.append(counts)
    )
    assert seen[-1][0] == 2
    return folder


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Iterator[ManiSkillH5Dataset]:
    opened = ManiSkillH5Dataset.open(ManiSkillH5Spec(path=folder), VIEW)
    yield opened
    opened.close()


def test_a_recording_is_a_dataset_with_a_contract_and_statistics(dataset: ManiSkillH5Dataset):
    contract = dataset.contract
    assert (contract.control_mode, contract.gripper, contract.action_dim) == ("pd_ee_delta_pose", "open_positive", 7)
    assert contract.cameras == VIEW.cameras
    assert contract.image_size == VIEW.image_size
    assert [field.name for field in contract.state] == ["qpos", "tcp_pose"]
    assert dataset.num_frames > 80
    action = dataset.statistics().action
    assert action is not None
    assert np.abs(action.minimum).max() <= 1.0
    assert action.std[0] > 0.03  # it pushes forward
    images = dataset.read(range(0, dataset.num_frames, 10), 8).observation.images
    assert images.std() > 10.0


def test_a_recorded_episode_happens_again_in_the_environment(folder: Path, dataset: ManiSkillH5Dataset):
    """The same seed shows the same frames and state, and the recorded actions alone reach success."""
    info = json.loads((folder / f"{TASK}.json").read_text())["episodes"][0]
    length, middle = info["elapsed_steps"], 24
    recorded = dataset.read([0, middle], length)
    session = VectorSession(ManiSkillSpec(task=TASK, max_episode_steps=200, reward_mode="sparse"), VIEW)
    try:
        check_sources(dataset.contract, session.contract, cameras=VIEW.cameras, owner="test")
        session.begin_reset(0, EpisodeStart(episode=0, seed=info["episode_seed"], initial_state=0))
        _assert_same(session.wait()[0], recorded.observation.rows([0]))
        session.begin_step(0, recorded.actions[0, :middle])
        outcome = session.wait()[0]
        assert isinstance(outcome, ChunkOutcome)
        _assert_same(outcome.observation, recorded.observation.rows([1]))
        session.begin_step(0, recorded.actions[0, middle:length])
        outcome = session.wait()[0]
        assert isinstance(outcome, ChunkOutcome)
        assert outcome.success.any()
    finally:
        session.close()


def _assert_same(live: object, recorded: Observation) -> None:
    assert isinstance(live, Observation)
    np.testing.assert_allclose(live.state, recorded.state, atol=1e-4)
    assert live.instructions == recorded.instructions
    difference = np.abs(live.images.astype(np.int16) - recorded.images.astype(np.int16))
    assert difference.mean() < 0.5
    assert (difference > 16).mean() < 0.005


def test_a_finished_recording_is_kept_and_another_recipe_refused(folder: Path):
    path = folder / f"{TASK}.h5"
    before = path.stat().st_mtime_ns
    assert generate_demonstrations(TASK, folder, num_episodes=2, view=VIEW, seed=SEED) == path
    assert path.stat().st_mtime_ns == before
    with pytest.raises(DatasetError, match="another recipe"):
        generate_demonstrations(TASK, folder, num_episodes=3, view=VIEW, seed=SEED)
    assert sorted(each.name for each in folder.iterdir()) == [f"{TASK}.h5", f"{TASK}.json"]


def test_a_task_without_planner_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match=r"no planner for task 'PickCub-v1'\. Did you mean 'PickCube-v1'"):
        generate_demonstrations("PickCub-v1", tmp_path, num_episodes=1, view=VIEW)
    assert list(tmp_path.iterdir()) == []
