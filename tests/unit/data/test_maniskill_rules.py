"""What environment and dataset have in common."""

import pytest

from joynexus.errors import ContractError
from joynexus.specs.maniskill import maniskill_gripper, maniskill_state_layout, maniskill_state_order, task_instruction


def test_the_state_is_laid_out_alike_whatever_order_a_source_lists_its_parts_in():
    agent = {"qvel": 9, "qpos": 9, "controller": 4}
    one = maniskill_state_layout(agent, {"tcp_pose": 7, "is_grasped": 1})
    other = maniskill_state_layout(dict(reversed(agent.items())), {"is_grasped": 1, "tcp_pose": 7})
    assert one == other
    assert [(field.name, field.dim) for field in one] == [("qpos", 9), ("is_grasped", 1), ("tcp_pose", 7)]


def test_order_and_layout_name_the_same_parts():
    extra = {"tcp_pose": 7, "goal_pos": 3}
    order = maniskill_state_order(extra)
    assert [key for _, key in order] == [field.name for field in maniskill_state_layout({"qpos": 9}, extra)]


def test_a_source_without_proprioception_is_refused():
    with pytest.raises(ContractError, match=r"lacks \['qpos'\]"):
        maniskill_state_layout({"controller": 4}, {})


def test_gripper_signs_are_declared_and_never_guessed():
    assert maniskill_gripper("panda_wristcam") == "open_positive"
    assert maniskill_gripper("panda_stick") == "none"
    with pytest.raises(ContractError, match=r"'fetch'.*Known robots.*panda"):
        maniskill_gripper("fetch")


@pytest.mark.parametrize(
    ("task", "instruction"),
    [
        ("PushCube-v1", "push the cube to the goal region"),
        ("PickSingleYCB-v1", "pick single ycb"),
        ("lower_case-v12", "lower case"),
        ("---", "---"),
    ],
)
def test_every_task_has_an_instruction(task: str, instruction: str):
    assert task_instruction(task) == instruction
