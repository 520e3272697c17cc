"""The contract of an environment: one robot, one task, one process.

An environment executes action chunks and is looked at only between them, so that cameras are rendered only when a
policy will see the frame. It never resets itself: after an episode ended, only ``reset`` is allowed, so that the
next episode's first frame can't be taken for the last one's end.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float32, UInt8

from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import EnvironmentSpec
from joynexus.types import Array, Observation, ViewSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStart:
    """Which episode to begin; the same values give the same episode in every process."""

    episode: int
    """Index in the workload; distinct over workers."""
    seed: int
    initial_state: int
    """Index into the task's saved initial states, where it has them, modulo their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOutcome:
    """What came of one action chunk; arrays are over its executed steps ``k``."""

    observation: Observation
    """One row, after the last executed step: the episode's true final one if it ended."""
    rewards: Float32[Array, " k"]
    terminated: bool
    """The task ended, at the last executed step; later actions of the chunk were not executed."""
    truncated: bool
    """The time limit ended the episode at the last executed step."""
    success: Bool[Array, " k"]
    """Whether the task's success condition held after each step."""
    frames: tuple[UInt8[Array, "h w 3"], ...] = ()
    """One frame per executed step, where recording was asked for."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_steps(self) -> int:
        """Executed steps."""
        return len(self.rewards)

    @property
    def ended(self) -> bool:
        """Whether the episode ended within this chunk, at whichever of its steps."""
        return self.terminated or self.truncated


class Environment(ABC):
    """One simulated environment. Everything heavy is imported in ``open``, in the simulator's own process."""

    @classmethod
    @abstractmethod
    def open(cls, spec: EnvironmentSpec, view: ViewSpec) -> "Environment":
        """Start the simulator.

        Raises:
            AssetsMissingError: If the task needs files that are not on this machine. Never prompts.
            SpecError: If the task, suite, robot or controller does not exist, naming the nearest.
        """

    @property
    @abstractmethod
    def contract(self) -> InterfaceContract:
        """The facts of this task: cameras, state layout, action meaning."""

    @abstractmethod
    def reset(self, start: EpisodeStart) -> Observation:
        """Begin an episode and return its first observation, one row."""

    @abstractmethod
    def step_chunk(self, actions: Float32[Array, "k a"], *, record: bool = False) -> ChunkOutcome:
        """Execute actions in order until the chunk or the episode ends, then look once.

        Args:
            actions: In the environment's units; clipped to its bounds.
            record: Also render a frame for a person at each step.

        Raises:
            SimulatorError: If the episode has ended and ``reset`` was not called.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the simulator; harmless when called twice."""
