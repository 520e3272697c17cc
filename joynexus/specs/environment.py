"""Simulated environments that a tenant can act in."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from joynexus.specs.base import Component, Resources
from joynexus.specs.contract import NormalizationMode
from joynexus.specs.registry import OneOf


class EnvironmentSpec(Component):
    """What every environment declares, whatever its simulator.

    ``implementation`` names a class with the contract of :class:`joynexus.envs.base.Environment`; one instance
    lives in one process of its own.
    """

    num_envs: int = Field(default=1, ge=1, le=1024)
    """Environments per worker, each in a process of its own."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """Truncate after this many environment steps; None takes the task's own limit."""
    resources: Resources = Resources()
    """Of one worker, all its environments included."""
    worker_memory_limit_bytes: int = Field(default=4 << 30, ge=1 << 26)
    """A simulator process above this is replaced between two episodes: simulators leak."""
    max_resets_per_process: int = Field(default=200, ge=1)
    """A simulator process is replaced after this many episodes."""
    step_timeout_s: float = Field(default=120.0, gt=0.0)
    """A simulator process that does not answer a chunk or a reset for this long is replaced."""
    normalization: NormalizationMode | None = None
    """If given, policies that act here have to normalise their actions in this mode; others are refused."""

    vision: ClassVar[bool] = True
    """Whether the environment can give camera images."""

    @property
    def label(self) -> str:
        """Short name for messages and reports."""
        return self.type


class ManiSkillSpec(EnvironmentSpec):
    """A ManiSkill 3 task on the CPU (Tao et al. 2024, https://arxiv.org/abs/2410.00425)."""

    implementation: ClassVar[str] = "joynexus.envs.maniskill:ManiSkillEnvironment"
    type: Literal["maniskill"] = "maniskill"
    task: str
    """Gymnasium id, such as ``PickCube-v1``."""
    control_mode: str = "pd_ee_delta_pose"
    """The task's controller; checked against the dataset's and the policy's."""
    state: Literal["proprioception", "privileged"] = "proprioception"
    """``privileged`` is the simulator's whole state (poses of all objects); a policy trained on it is no VLA."""
    reward_mode: Literal["sparse", "dense", "normalized_dense"] = "normalized_dense"
    """The task's own reward."""
    shader: Literal["minimal", "default"] = "minimal"
    """Shader of the cameras: the same one in demonstrations, training and evaluation."""
    robot: str | None = None
    """``robot_uids`` of the task; None takes its default. ``panda_wristcam`` adds ``hand_camera``."""

    @property
    def label(self) -> str:  # noqa: D102
        return f"maniskill {self.task}"


class LiberoSpec(EnvironmentSpec):
    """A LIBERO task (Liu et al. 2023, https://arxiv.org/abs/2306.03310) in the observation convention of LeRobot."""

    implementation: ClassVar[str] = "joynexus.envs.libero:LiberoEnvironment"
    type: Literal["libero"] = "libero"
    suite: str
    """Such as ``libero_spatial``."""
    task_id: int = Field(ge=0)
    """Index of the task in its suite."""
    num_settling_steps: int = Field(default=10, ge=0)
    """No-op steps after a reset, while the objects come to rest."""

    @property
    def label(self) -> str:  # noqa: D102
        return f"libero {self.suite}/{self.task_id}"


class GymSpec(EnvironmentSpec):
    """Any gymnasium environment with a flat ``Box`` observation and a ``Box`` action."""

    implementation: ClassVar[str] = "joynexus.envs.gym:GymEnvironment"
    type: Literal["gym"] = "gym"
    id: str
    """Gymnasium id; ``module:Id`` imports ``module`` first."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of ``gymnasium.make``."""
    instruction: str = "solve the task"
    """What the policy is told."""
    render: bool = False
    """Whether ``rgb_array`` frames are offered as the camera ``render``."""
    success_key: str | None = "is_success"
    """Key of ``info`` that tells success; where it is absent, termination counts as neither."""

    @property
    def label(self) -> str:  # noqa: D102
        return f"gym {self.id}"


AnyEnvironment = Annotated[EnvironmentSpec, OneOf("environments")]
"""Any registered environment, by ``type``."""
