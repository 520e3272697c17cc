"""Gripper commands and their sign, in one place: it is turned at most once between a policy and a simulator.

Nothing on the way from a policy to a simulator turns a sign: a policy acts in the convention of its data, and one
whose convention differs from the environment's is refused (:mod:`joynexus.specs.contract`). These helpers are for
code that *makes* actions: experts, converters of datasets, adapters of other suites.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32

from joynexus.errors import ContractError
from joynexus.specs.contract import GripperSign
from joynexus.types import Array

GripperCommand = Literal["open", "close"]


def gripper_value(command: GripperCommand, sign: GripperSign) -> float:
    """Return the action that opens or closes a gripper: +1 or -1.

    Raises:
        ContractError: If there is no gripper.
    """
    if sign == "none":
        raise ContractError(f"gripper command {command!r}: this robot has no gripper. Leave the command out.")
    return 1.0 if (command == "open") == (sign == "open_positive") else -1.0


def held_gripper(commands: Sequence[GripperCommand | None], sign: GripperSign) -> Float32[Array, " n"]:
    """Turn commands into actions; None is *no command* and holds the last one, it is never 0.

    Args:
        commands: One per step; the first says what to do.
        sign: Convention of the suite.

    Raises:
        ContractError: If the first step has no command, as nothing is held yet, or if there is no gripper.
    """
    if commands and commands[0] is None:
        raise ContractError("gripper commands: the first step has none and nothing is held yet. Say 'open' or 'close'.")
    held: list[float] = []
    for command in commands:
        held.append(held[-1] if command is None else gripper_value(command, sign))
    return np.asarray(held, dtype=np.float32)


def convert_gripper(
    actions: Float32[Array, "*n a"], *, source: GripperSign, target: GripperSign
) -> Float32[Array, "*n a"]:
    """Rewrite actions of one convention in another; the last dimension is turned where they differ, else left.

    Raises:
        ContractError: If one side has a gripper and the other has none.
    """
    if source == target:
        return actions
    if "none" in (source, target):
        raise ContractError(
            f"gripper: actions of convention {source!r} can't become {target!r}. One of the robots has no gripper."
        )
    turned = actions.copy()
    turned[..., -1] *= -1.0
    return turned
