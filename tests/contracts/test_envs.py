"""The contract check on the gymnasium adapter, and on environments that break the contract.

ManiSkill and LIBERO are checked by the tests in ``tests/sim``.
"""

import pytest

from joynexus.errors import ContractError, SimulatorError
from joynexus.specs.environment import GymSpec
from joynexus.testing.env_contracts import check_env
from joynexus.testing.fakes import COUNTER
from joynexus.types import ViewSpec

SEEING = ViewSpec(cameras=("render",), image_size=(16, 16))


def test_gym_keeps_the_contract():
    contract = check_env(GymSpec(id=COUNTER, render=True, kwargs={"is_repeatable": True}), SEEING)
    assert contract.state_dim == 4


def test_gym_without_camera_keeps_the_contract():
    contract = check_env(GymSpec(id="Pendulum-v1"), ViewSpec(cameras=(), image_size=(16, 16)))
    assert [field.dim for field in contract.state] == [3]


def test_an_episode_that_does_not_repeat_is_found():
    with pytest.raises(ContractError, match="the same start gives another first state"):
        check_env(GymSpec(id=COUNTER, render=True), SEEING)


def test_c88_black_frames_are_found_naming_the_camera():
    with pytest.raises(SimulatorError, match=r"cameras \['render'\] show nothing but black"):
        check_env(GymSpec(id=COUNTER, render=True, kwargs={"is_black": True}), SEEING)
