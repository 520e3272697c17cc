"""What an environment, a dataset and a policy say about observations and actions, and whether they agree.

Nothing here is guessed: an environment and a dataset declare facts, a policy declares what it was made for, and
every disagreement is one line that names the field, both values, and what to do.
"""

from typing import Literal

from pydantic import Field

from joynexus.errors import ContractError
from joynexus.specs.base import Spec

Orientation = Literal["upright", "rotated_180", "flipped_vertical", "flipped_horizontal"]
"""How the frames that the policy sees are turned against the true view."""
GripperSign = Literal["open_positive", "close_positive", "none"]
"""Which sign of the last action dimension opens the gripper; ``none`` where there is no gripper."""
NormalizationMode = Literal["mean_std", "min_max", "quantile", "identity"]
"""Which statistics bring a vector to about [-1, 1]; see :mod:`joynexus.models.normalizer`."""

NORMALIZATIONS = ("action_normalization", "state_normalization")
"""Fields that are compared only where both sides name a mode."""


class StateField(Spec):
    """One named part of the flat state vector."""

    name: str
    """Such as ``qpos``."""
    dim: int = Field(ge=1)
    """Its width."""


class InterfaceContract(Spec):
    """The facts of one environment task or dataset."""

    source: str
    """Who declares this, for messages: ``maniskill PickCube-v1``."""
    cameras: tuple[str, ...]
    """Cameras it can give, by name."""
    image_size: tuple[int, int] | None
    """Height and width of its frames in pixels; None where they are rendered at the size that is asked for."""
    orientation: Orientation = "upright"
    """Of the frames handed out."""
    state: tuple[StateField, ...]
    """Layout of the state vector, in order."""
    action_dim: int = Field(ge=1)
    """Width of one action."""
    control_mode: str
    """What an action means, in the source's own word: ``pd_ee_delta_pose``, ``osc_pose``."""
    gripper: GripperSign
    """Sign convention of the last action dimension."""
    control_hz: float | None = None
    """Actions per simulated second, where known."""
    action_normalization: NormalizationMode | None = None
    """How a policy has to normalise its actions, where the source asks for one mode; None takes raw units of any."""
    state_normalization: NormalizationMode | None = None
    """The same of the state."""

    @property
    def state_dim(self) -> int:
        """Width of the state vector."""
        return sum(field.dim for field in self.state)


class PolicyInterface(Spec):
    """The part of a policy spec that has to agree with what it is run and trained on."""

    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    state_dim: int
    action_dim: int
    control_mode: str | None = None
    gripper: GripperSign | None = None
    action_normalization: NormalizationMode | None = None
    state_normalization: NormalizationMode | None = None


def check_policy(policy: PolicyInterface, offered: InterfaceContract, *, owner: str) -> None:
    """Refuse a policy that an environment or dataset cannot serve.

    Args:
        policy: What the policy was made for.
        offered: What the source declares.
        owner: The tenant, for the message.

    Raises:
        ContractError: Naming every field that disagrees, both values and the remedy.
    """
    problems: list[str] = []
    missing = [camera for camera in policy.cameras if camera not in offered.cameras]
    if missing:
        problems.append(f"cameras {missing} are missing; it offers {list(offered.cameras)}")
    if policy.cameras and offered.image_size not in (None, policy.image_size):
        problems.append(f"image_size is {list(offered.image_size or ())}, the policy's is {list(policy.image_size)}")
    if policy.state_dim != offered.state_dim:
        layout = ", ".join(f"{field.name} {field.dim}" for field in offered.state)
        problems.append(f"state_dim is {offered.state_dim} ({layout}), the policy's is {policy.state_dim}")
    if policy.action_dim != offered.action_dim:
        problems.append(f"action dim is {offered.action_dim}, the policy's is {policy.action_dim}")
    if policy.control_mode not in (None, offered.control_mode):
        problems.append(f"control_mode is {offered.control_mode!r}, the policy's is {policy.control_mode!r}")
    if policy.gripper not in (None, offered.gripper):
        problems.append(f"gripper is {offered.gripper!r}, the policy's is {policy.gripper!r}")
    problems += [
        f"{field} is {asked!r}, the policy's is {mine!r}" for field, asked, mine in _other_modes(offered, policy)
    ]
    _refuse(problems, f"{owner}: policy does not fit {offered.source}")


def check_sources(first: InterfaceContract, second: InterfaceContract, *, cameras: tuple[str, ...], owner: str) -> None:
    """Refuse two sources of one policy (its dataset and its environment, say) that contradict each other.

    Args:
        first: One source.
        second: Another source.
        cameras: The cameras that the policy uses; frames of others do not matter.
        owner: The tenant, for the message.

    Raises:
        ContractError: Naming every field that disagrees.
    """
    problems: list[str] = []
    fields = ["control_mode", "gripper", "action_dim"] + (["orientation"] if cameras else [])
    for field in fields:
        mine, other = getattr(first, field), getattr(second, field)
        if mine != other:
            problems.append(f"{field} is {mine!r} in {first.source} and {other!r} in {second.source}")
    problems += [
        f"{field} is {mine!r} in {first.source} and {other!r} in {second.source}"
        for field, mine, other in _other_modes(first, second)
    ]
    if first.state != second.state:
        layouts = [", ".join(f"{each.name} {each.dim}" for each in source.state) for source in (first, second)]
        problems.append(f"state is ({layouts[0]}) in {first.source} and ({layouts[1]}) in {second.source}")
    _refuse(problems, f"{owner}: {first.source} and {second.source} disagree")


def _other_modes(
    one: InterfaceContract, other: InterfaceContract | PolicyInterface
) -> list[tuple[str, NormalizationMode, NormalizationMode]]:
    """Return the normalisation modes that both name, and name differently."""
    pairs = [(field, getattr(one, field), getattr(other, field)) for field in NORMALIZATIONS]
    return [(field, mine, its) for field, mine, its in pairs if None not in (mine, its) and mine != its]


def _refuse(problems: list[str], subject: str) -> None:
    if problems:
        raise ContractError(f"{subject}: {'; '.join(problems)}. Change the policy or the source so that they agree.")
