"""ManiSkill on the real simulator. What needs no camera runs in this process, where shapes and types are checked."""

from pathlib import Path

import numpy as np
import pytest

from joynexus.envs.base import EpisodeStart
from joynexus.envs.maniskill import ManiSkillEnvironment
from joynexus.envs.session import VectorSession
from joynexus.errors import AssetsMissingError, ContractError, SpecError
from joynexus.rollout.collector import Collector
from joynexus.rollout.video import VideoSink
from joynexus.specs.environment import ManiSkillSpec
from joynexus.specs.tenant import ActionSpec
from joynexus.testing.env_contracts import check_env
from joynexus.testing.fakes import FakePolicy
from joynexus.types import ViewSpec

pytestmark = [
    pytest.mark.sim,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # the simulator's own
]

BLIND = ViewSpec(cameras=(), image_size=(64, 64))
BOTH = ViewSpec(cameras=("hand_camera", "base_camera"), image_size=(64, 96))


def start(episode=0):
    return EpisodeStart(episode=episode, seed=episode, initial_state=episode)


@pytest.fixture(scope="module")
def blind():
    environment = ManiSkillEnvironment.open(ManiSkillSpec(task="PickCube-v1", max_episode_steps=40), BLIND)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def seeing():
    spec = ManiSkillSpec(task="PickCube-v1", robot="panda_wristcam", max_episode_steps=6)
    session = VectorSession(spec, BOTH)
    yield session
    session.close()


def test_contract_declares_what_the_task_has(blind):
    contract = blind.contract
    layout = [(field.name, field.dim) for field in contract.state]
    assert layout == [("qpos", 9), ("goal_pos", 3), ("is_grasped", 1), ("tcp_pose", 7)]
    assert contract.cameras == ("base_camera",)
    assert (contract.action_dim, contract.control_mode) == (7, "pd_ee_delta_pose")
    assert (contract.gripper, contract.orientation, contract.control_hz) == ("open_positive", "upright", 20.0)


def test_state_is_laid_out_as_declared(blind):
    state = blind.reset(start(3)).state[0]
    base = blind._base
    assert state[:9].tolist() == base.agent.robot.get_qpos()[0].tolist()
    assert state[9:12].tolist() == base.goal_site.pose.p[0].tolist()
    assert state[13:16].tolist() == base.agent.tcp.pose.p[0].tolist()


def test_positive_gripper_action_opens(blind):
    blind.reset(start())
    action = np.zeros((10, 7), dtype=np.float32)
    fingers = []
    for sign in (-1.0, 1.0):
        action[:, 6] = sign
        fingers.append(blind.step_chunk(action).observation.state[0, 7:9].sum())
    closed, opened = fingers
    assert opened > closed + 0.05


def test_nothing_is_rendered_without_cameras(blind, monkeypatch):
    monkeypatch.setattr(blind._base.scene, "update_render", lambda *_, **__: pytest.fail("it rendered"))
    blind.reset(start())
    blind.step_chunk(np.zeros((3, 7), dtype=np.float32))


def test_same_seed_same_episode_other_seed_other(blind):
    first, again, other = (blind.reset(start(each)).state for each in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"task": "PickCub-v1"}, SpecError, "Did you mean 'PickCube-v1'"),
        ({"robot": "pandaa"}, SpecError, "Did you mean 'panda'"),
        ({"control_mode": "osc"}, SpecError, "pd_ee_delta_pose"),
        ({"task": "PickSingleYCB-v1"}, AssetsMissingError, "mani_skill.utils.download_asset PickSingleYCB-v1"),
        ({"task": "TwoRobotPickCube-v1"}, SpecError, "one robot"),
        ({"robot": "fetch", "control_mode": "pd_joint_delta_pos"}, ContractError, "gripper"),
    ],
)
def test_what_can_not_be_opened_says_why(changes, error, message):
    with pytest.raises(error, match=message):
        ManiSkillEnvironment.open(ManiSkillSpec(**{"task": "PickCube-v1", **changes}), BLIND)


def test_privileged_state_is_the_simulators_own():
    environment = ManiSkillEnvironment.open(ManiSkillSpec(task="PickCube-v1", state="privileged"), BLIND)
    state = environment.reset(start()).state[0]
    names = [field.name for field in environment.contract.state]
    assert {"obj_pose", "obj_to_goal_pos"} < set(names)
    original = type(environment._base).get_obs(environment._base)
    assert state.tolist() == [
        value for group in ("agent", "extra") for part in original[group].values() for value in part.flatten().tolist()
    ]
    environment.close()


def test_cameras_come_in_order_and_differ(seeing):
    observation = seeing.reset({0: start()})[0]
    assert observation.images.shape == (1, 2, 64, 96, 3)
    assert observation.image_mask.all()
    hand, base = observation.images[0].astype(int)
    assert abs(hand - base).mean() > 10
    outcome = seeing.step({0: np.full((4, 7), 0.5, dtype=np.float32)})[0]
    moved = abs(outcome.observation.images[0, 1].astype(int) - base).mean()
    assert moved > 0.1


def test_evaluation_with_video(seeing, tmp_path):
    policy = FakePolicy(horizon=4, action_dim=7)
    action = ActionSpec(dim=7, horizon=4, num_action_steps=4, normalization="identity")
    collector = Collector(seeing, policy, tenant="fake", action=action)
    (report,) = collector.evaluate([start()], video=VideoSink(tmp_path, first=1))
    assert (report.status, report.num_steps) == ("failure", 6)
    assert Path(report.video).stat().st_size > 1000
    assert [len(request.observation) for request in policy.requests] == [1, 1]


def test_contract_check():
    contract = check_env(ManiSkillSpec(task="PushCube-v1"), BLIND)
    assert contract.source == "maniskill PushCube-v1"
