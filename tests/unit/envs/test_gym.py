"""GymEnvironment, in this process."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from joynexus.envs.base import EpisodeStart
from joynexus.envs.gym import GymEnvironment
from joynexus.errors import ContractError, InvalidBatchError, SimulatorError, SpecError
from joynexus.specs.environment import GymSpec, ManiSkillSpec
from joynexus.testing.fakes import COUNTER, CounterEnv
from joynexus.types import ViewSpec

BLIND = ViewSpec(cameras=(), image_size=(16, 16))
SEEING = ViewSpec(cameras=("render",), image_size=(16, 20))


def start(episode=0):
    return EpisodeStart(episode=episode, seed=100 + episode, initial_state=episode)


def chunk(*values):
    return np.asarray(values, dtype=np.float32)[:, None]


def open_counter(view=BLIND, *, render=False, max_episode_steps=None, **kwargs):
    spec = GymSpec(id=COUNTER, kwargs=kwargs, render=render, max_episode_steps=max_episode_steps)
    return GymEnvironment.open(spec, view)


class DictEnv(gymnasium.Env):
    """Observes a Dict whose keys are not in alphabetical order of use, and clips nothing by itself."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {"pose": spaces.Box(-1, 1, (2, 2), np.float64), "arm": spaces.Dict({"q": spaces.Box(-1, 1, (3,))})}
        )
        self.action_space = spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32))
        self.last_action = None

    def _observe(self):
        return {"pose": np.array([[1.0, 2.0], [3.0, 4.0]]), "arm": {"q": np.array([5.0, 6.0, 7.0], dtype=np.float32)}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        self.last_action = action
        return self._observe(), 0.0, False, False, {}


gymnasium.register(id="JoynexusDict-v0", entry_point=DictEnv)


def test_contract_declares_state_action_and_no_camera():
    contract = open_counter().contract
    assert contract.cameras == ()
    assert contract.state_dim == 4
    assert contract.action_dim == 1
    assert contract.gripper == "none"


def test_seed_and_initial_state_reach_the_environment():
    observation = open_counter().reset(start(3))
    assert observation.state.tolist() == [[0.0, 1.0, 3.0, 103.0]]
    assert observation.state.dtype == np.float32
    assert observation.images.shape == (1, 0, 16, 16, 3)
    assert observation.instructions == ("solve the task",)


def test_dict_is_flattened_in_key_order_and_actions_are_clipped():
    environment = GymEnvironment.open(GymSpec(id="JoynexusDict-v0"), BLIND)
    observation = environment.reset(start())
    names = [field.name for field in environment.contract.state]
    flat = {"pose": [1.0, 2.0, 3.0, 4.0], "arm.q": [5.0, 6.0, 7.0]}
    assert observation.state[0].tolist() == [value for name in names for value in flat[name]]
    environment.step_chunk(np.asarray([[5.0, -5.0]], dtype=np.float32))
    assert environment._env.unwrapped.last_action.tolist() == [1.0, -2.0]


def test_camera_is_resized_and_rendered_once_per_chunk():
    environment = open_counter(SEEING, render=True)
    counter = environment._env.unwrapped
    assert isinstance(counter, CounterEnv)
    observation = environment.reset(start())
    assert observation.images.shape == (1, 1, 16, 20, 3)
    assert observation.image_mask.all()
    assert counter.num_renders == 1
    outcome = environment.step_chunk(chunk(1, 2, 3))
    assert counter.num_renders == 2
    assert outcome.observation.images[0, 0, 0, 0].tolist() == [3, 1, 0]


def test_recording_gives_a_frame_per_executed_step():
    environment = open_counter(render=True, terminate_at=2)
    environment.reset(start())
    outcome = environment.step_chunk(chunk(1, 1, 1, 1), record=True)
    assert [int(frame[0, 0, 0]) for frame in outcome.frames] == [1, 2]


def test_c48_an_episode_that_ends_within_a_chunk_has_ended():
    environment = open_counter(terminate_at=2)
    environment.reset(start())
    outcome = environment.step_chunk(chunk(10, 20, 30, 40))
    assert outcome.terminated
    assert outcome.num_steps == 2
    assert outcome.rewards.tolist() == [10.0, 20.0]
    assert outcome.success.tolist() == [False, True]
    assert outcome.observation.state[0, 0] == 2.0


def test_c36_never_resets_itself():
    environment = open_counter(terminate_at=2)
    ends = []
    environment.reset(start(0))
    for episode in (1, 2, 3):
        ends.append(environment.step_chunk(chunk(0, 0, 0)).observation.state[0].tolist())
        with pytest.raises(SimulatorError, match="Call reset first"):
            environment.step_chunk(chunk(0))
        environment.reset(start(episode))
    resets = environment._env.unwrapped._resets
    assert resets == 1 + 3
    assert [end[0] for end in ends] == [2.0, 2.0, 2.0]
    assert [end[1] for end in ends] == [1.0, 2.0, 3.0]
    assert [end[2] for end in ends] == [0.0, 1.0, 2.0]
    assert environment._env.unwrapped._initial_state == 3


def test_step_limit_truncates():
    environment = open_counter(max_episode_steps=3)
    environment.reset(start())
    first = environment.step_chunk(chunk(0, 0))
    assert not first.ended
    second = environment.step_chunk(chunk(0, 0))
    assert (second.truncated, second.terminated, second.num_steps) == (True, False, 1)


def test_success_on_the_last_permitted_step_is_termination():
    environment = open_counter(max_episode_steps=2, terminate_at=2)
    environment.reset(start())
    outcome = environment.step_chunk(chunk(0, 0))
    assert (outcome.truncated, outcome.terminated) == (False, True)


@pytest.mark.parametrize("actions", [np.zeros((2, 3), np.float32), np.zeros((0, 1), np.float32)])
def test_wrong_action_shape_is_refused(actions):
    environment = open_counter()
    environment.reset(start())
    with pytest.raises(InvalidBatchError, match="shape"):
        environment.step_chunk(actions)


def test_nan_action_is_refused_and_moves_nothing():
    environment = open_counter()
    environment.reset(start())
    with pytest.raises(InvalidBatchError, match="NaN"):
        environment.step_chunk(chunk(1, np.nan))
    assert environment._env.unwrapped._count == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Pendulun-v1", "Did you mean 'Pendulum-v1'"),
        ("Pendulum-v99", "Did you mean 'Pendulum-v1'"),
        ("no_such_module_at_all:Thing-v0", "No module named 'no_such_module_at_all'"),
        ("joynexus.testing.fakes:Countre-v0", "Did you mean 'Counter-v0'"),
    ],
)
def test_unknown_id_names_the_nearest(name, hint):
    with pytest.raises(SpecError, match=hint):
        GymEnvironment.open(GymSpec(id=name), BLIND)


def test_discrete_actions_are_refused():
    with pytest.raises(SpecError, match="expected a Box"):
        GymEnvironment.open(GymSpec(id="CartPole-v1"), BLIND)


def test_missing_camera_is_refused():
    with pytest.raises(ContractError, match=r"cameras \['wrist'\] are missing"):
        open_counter(ViewSpec(cameras=("render", "wrist"), image_size=(16, 16)), render=True)


def test_other_spec_is_refused():
    with pytest.raises(SpecError, match="takes a GymSpec"):
        GymEnvironment.open(ManiSkillSpec(task="PickCube-v1"), BLIND)


def test_pendulum_runs():
    environment = GymEnvironment.open(GymSpec(id="Pendulum-v1"), BLIND)
    first = environment.reset(start())
    outcome = environment.step_chunk(chunk(*[2.0] * 300))
    assert outcome.truncated
    assert outcome.num_steps == 200
    assert environment.reset(start()).state.tolist() == first.state.tolist()
    environment.close()
