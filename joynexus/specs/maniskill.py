"""What ManiSkill environments and ManiSkill trajectory files have in common, told once so that they can't disagree.

An environment and a dataset of one task must lay out the state alike, name the same gripper sign and give the same
instruction; the two implementations can't import each other, so the rules are here. Pure: no numpy, no simulator.
"""

import re
from collections.abc import Mapping

from joynexus.errors import ContractError
from joynexus.specs.contract import GripperSign, StateField

AGENT_FIELDS = ("qpos",)
"""Entries of ``obs/agent`` that enter the state. Velocities don't: a policy that sees them learns to continue what the
demonstrator did (PushCube, 60 demonstrations: 25 of 30 episodes solved with them, 29 of 30 without)."""

_GRIPPERS: dict[str, GripperSign] = {
    "panda": "open_positive",
    "panda_wristcam": "open_positive",
    "panda_stick": "none",
    "xarm6_nogripper": "none",
    "xarm6_nogripper_wristcam": "none",
}

_INSTRUCTIONS = {
    "DrawSVG-v1": "draw the shape on the canvas",
    "DrawTriangle-v1": "draw the triangle on the canvas",
    "LiftPegUpright-v1": "lift the peg so that it stands upright on the table",
    "PegInsertionSide-v1": "pick up the peg and insert its orange end into the hole of the box",
    "PickCube-v1": "pick up the red cube and move it to the goal",
    "PlaceSphere-v1": "pick up the sphere and place it into the bin",
    "PlugCharger-v1": "pick up the charger and plug it into the receptacle",
    "PokeCube-v1": "poke the cube with the peg and push it to the goal",
    "PullCube-v1": "pull the cube to the goal region",
    "PullCubeTool-v1": "use the tool to pull the cube within reach",
    "PushCube-v1": "push the cube to the goal region",
    "PushT-v1": "push the T-shaped block into the target region",
    "RollBall-v1": "push the ball so that it rolls to the goal region",
    "StackCube-v1": "stack the red cube on top of the green cube",
    "StackPyramid-v1": "place the red cube next to the green cube and stack the blue cube on both",
}


def maniskill_state_order(extra: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Tell in which order the parts of an observation make up the ``proprioception`` state.

    Args:
        extra: ``obs["extra"]``; only its keys matter. Every entry is flattened, a boolean becomes 0 or 1.

    Returns:
        ``(group, key)`` pairs: ``agent`` ``qpos``, then ``extra`` in the alphabetical order of
        its keys (files and simulators list them in different orders).
    """
    return tuple(("agent", key) for key in AGENT_FIELDS) + tuple(("extra", key) for key in sorted(extra))


def maniskill_state_layout(agent: Mapping[str, int], extra: Mapping[str, int]) -> tuple[StateField, ...]:
    """Lay out the ``proprioception`` state, in the order of :func:`maniskill_state_order`.

    Args:
        agent: Flattened width of each entry of ``obs["agent"]``; ``qpos`` is needed.
        extra: Flattened width of each entry of ``obs["extra"]``; a scalar has width 1.

    Returns:
        One field per entry, named by its key.

    Raises:
        ContractError: If ``qpos`` is missing.
    """
    missing = [key for key in AGENT_FIELDS if key not in agent]
    if missing:
        raise ContractError(
            f"maniskill: obs/agent lacks {missing}, it has {sorted(agent)}. Take an observation mode with "
            f"proprioception, such as 'rgb'."
        )
    groups = {"agent": agent, "extra": extra}
    return tuple(StateField(name=key, dim=groups[group][key]) for group, key in maniskill_state_order(extra))


def maniskill_gripper(robot: str) -> GripperSign:
    """Return which sign of the last action dimension opens a robot's gripper, in all of its controllers.

    Args:
        robot: ``robot_uids`` of the environment, such as ``panda``.

    Raises:
        ContractError: If the robot's convention is not known; it is never guessed.
    """
    if robot not in _GRIPPERS:
        raise ContractError(
            f"maniskill robot {robot!r}: the sign of its gripper action is not known. Known robots: "
            f"{sorted(_GRIPPERS)}. Take one of them, or declare the robot in joynexus/specs/maniskill.py."
        )
    return _GRIPPERS[robot]


def task_instruction(task: str) -> str:
    """Return what a policy is told to do in a task.

    Args:
        task: Gymnasium id, such as ``PickCube-v1``.

    Returns:
        The task's instruction; for a task that has none, its name in words (``pick single ycb``).
    """
    if task in _INSTRUCTIONS:
        return _INSTRUCTIONS[task]
    name = re.sub(r"-v\d+$", "", task)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return " ".join(words).lower() or name
