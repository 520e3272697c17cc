"""LIBERO on the real simulator. What needs no camera runs in this process, where shapes and types are checked."""

import numpy as np
import pytest

from joynexus.envs.base import EpisodeStart
from joynexus.envs.libero import LiberoEnvironment
from joynexus.envs.session import VectorSession
from joynexus.errors import AssetsMissingError, ContractError, SpecError
from joynexus.specs.environment import LiberoSpec
from joynexus.testing.env_contracts import check_env
from joynexus.types import ViewSpec

pytestmark = [
    pytest.mark.sim,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # the simulator's own
]

BLIND = ViewSpec(cameras=(), image_size=(64, 64))
BOTH = ViewSpec(cameras=("image", "image2"), image_size=(256, 256))
CLOSE = np.tile(np.array([0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 1.0], dtype=np.float32), (8, 1))


def start(episode=0, *, initial_state=None):
    return EpisodeStart(
        episode=episode, seed=episode, initial_state=episode if initial_state is None else initial_state
    )


@pytest.fixture(scope="module")
def blind():
    environment = LiberoEnvironment.open(LiberoSpec(suite="libero_spatial", task_id=0, max_episode_steps=30), BLIND)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def seeing():
    session = VectorSession(LiberoSpec(suite="libero_spatial", task_id=0), BOTH)
    yield session
    session.close()


def test_contract_is_that_of_lerobot(blind):
    contract = blind.contract
    layout = [(field.name, field.dim) for field in contract.state]
    assert layout == [("eef_pos", 3), ("eef_axis_angle", 3), ("gripper_qpos", 2)]
    assert contract.cameras == ("image", "image2")
    assert (contract.action_dim, contract.control_mode, contract.gripper) == (7, "osc_pose", "close_positive")
    assert (contract.orientation, contract.control_hz) == ("flipped_horizontal", 20.0)


def test_positive_gripper_action_closes(blind):
    before = blind.reset(start())
    after = blind.step_chunk(CLOSE).observation
    width = [abs(each.state[0, 6:8]).sum() for each in (before, after)]
    assert width[1] < width[0] - 0.02
    assert before.instructions == (
        "pick up the black bowl between the plate and the ramekin and place it on the plate",
    )


def test_an_episode_does_not_depend_on_the_one_before(blind):
    first = blind.reset(start()).state
    moved = blind.step_chunk(CLOSE).observation.state
    again = blind.reset(start()).state  # the gripper was closed
    assert np.array_equal(first, again)
    assert np.array_equal(blind.step_chunk(CLOSE).observation.state, moved)


def test_initial_states_differ_and_come_round(blind):
    zero, one, fifty = (blind.reset(start(initial_state=each)) for each in (0, 1, 50))
    assert np.array_equal(zero.state, fifty.state)
    assert not np.array_equal(zero.state, one.state)


def test_success_ends_the_episode_within_the_chunk(blind):
    blind.reset(start())
    data = blind._control.sim.data
    objects = blind._control.env.objects_dict
    bowl, plate = objects["akita_black_bowl_1"], objects["plate_1"]
    pose = data.get_joint_qpos(plate.joints[0]).copy()
    pose[2] += 0.02
    data.set_joint_qpos(bowl.joints[0], pose)
    still = np.zeros((30, 7), dtype=np.float32)
    outcome = blind.step_chunk(still)
    assert outcome.terminated
    assert not outcome.truncated
    assert outcome.num_steps < 30
    assert outcome.success.tolist() == [False] * (outcome.num_steps - 1) + [True]
    assert outcome.rewards.sum() == 1.0


def test_time_limit_truncates(blind):
    blind.reset(start())
    outcome = blind.step_chunk(np.zeros((40, 7), dtype=np.float32))
    assert (outcome.num_steps, outcome.truncated, outcome.terminated) == (30, True, False)


@pytest.mark.parametrize(
    ("suite", "task_id", "error", "message"),
    [
        ("libero_spatal", 0, SpecError, "Did you mean 'libero_spatial'"),
        ("libero_spatial", 10, SpecError, "tasks 0 to 9: 0 pick_up_the_black_bowl"),
        ("libero_goal_env", 0, AssetsMissingError, "standard suites"),
        ("libero_100", 0, AssetsMissingError, "no tasks"),
    ],
)
def test_what_can_not_be_opened_says_why(suite, task_id, error, message):
    with pytest.raises(error, match=message):
        LiberoEnvironment.open(LiberoSpec(suite=suite, task_id=task_id), BLIND)


def test_unknown_camera_is_refused():
    view = ViewSpec(cameras=("agentview",), image_size=(64, 64))
    with pytest.raises(ContractError, match="it offers"):
        LiberoEnvironment.open(LiberoSpec(suite="libero_spatial", task_id=0), view)


def test_a_changed_instruction_comes_from_the_task_file():
    environment = LiberoEnvironment.open(LiberoSpec(suite="libero_object_lan", task_id=0, num_settling_steps=0), BLIND)
    assert environment.reset(start()).instructions == ("grab alphabet soup and put it into basket",)
    environment.close()


def test_c53_frames_are_the_mirror_image_of_the_true_view(seeing):
    observation = seeing.reset({0: start()})[0]
    scene, wrist = observation.images[0].astype(int)
    assert abs(scene - wrist).mean() > 10
    outcome = seeing.step({0: CLOSE[:2]}, record={0})[0]
    true_view = outcome.frames[-1]
    seen = outcome.observation.images[0, 0]
    assert np.array_equal(seen, true_view[:, ::-1])
    assert not np.array_equal(seen, true_view)


def test_contract_check():
    check_env(LiberoSpec(suite="libero_object", task_id=0), ViewSpec(cameras=("image", "image2"), image_size=(64, 64)))
