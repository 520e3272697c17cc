import numpy as np
import pytest

from joynexus.envs.gripper import convert_gripper, gripper_value, held_gripper
from joynexus.errors import ContractError

LIBERO, CALVIN = "close_positive", "open_positive"


def test_c57_no_command_holds_the_last_one():
    assert held_gripper(["close", None, None], CALVIN).tolist() == [-1.0, -1.0, -1.0]
    assert held_gripper(["close", None, "open", None], LIBERO).tolist() == [1.0, 1.0, -1.0, -1.0]
    with pytest.raises(ContractError, match="nothing is held yet"):
        held_gripper([None, "close"], CALVIN)


def test_c57_exactly_one_flip_end_to_end():
    actions = np.asarray([[0.5, -0.25, gripper_value("close", LIBERO)]], dtype=np.float32)
    once = convert_gripper(actions, source=LIBERO, target=CALVIN)
    assert once.tolist() == [[0.5, -0.25, gripper_value("close", CALVIN)]]
    assert convert_gripper(once, source=CALVIN, target=CALVIN).tolist() == once.tolist()
    assert actions[0, 2] == 1.0


def test_a_robot_without_gripper_takes_no_command():
    with pytest.raises(ContractError, match="no gripper"):
        gripper_value("open", "none")
    with pytest.raises(ContractError, match="can't become"):
        convert_gripper(np.zeros((1, 3), np.float32), source=LIBERO, target="none")
