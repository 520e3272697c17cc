"""Chunks in terms of single steps: what all environments of this package have in common."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from joynexus.envs.base import ChunkOutcome, Environment, EpisodeStart
from joynexus.errors import InvalidBatchError, SimulatorError
from joynexus.types import Array, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one environment step gave."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool
    info: dict[str, Any] = field(default_factory=dict[str, Any])


class SteppedEnvironment(Environment):
    """An environment that knows single steps; looking is apart from stepping, so that a chunk is rendered once."""

    _running: bool = False

    @abstractmethod
    def _begin(self, start: EpisodeStart) -> None:
        """Put the simulator into the first state of an episode."""

    @abstractmethod
    def _advance(self, action: Float32[Array, " a"]) -> Step:
        """Execute one action, clipped to the bounds. Renders nothing and never begins the next episode."""

    @abstractmethod
    def _look(self) -> Observation:
        """Observe the present state, one row; renders the cameras of the view."""

    @abstractmethod
    def _record(self) -> UInt8[Array, "h w 3"] | None:
        """Render one frame for a person, or None where the simulator can't."""

    def reset(self, start: EpisodeStart) -> Observation:
        """Begin an episode and return its first observation, one row."""
        self._running = False
        self._begin(start)
        self._running = True
        return self._look()

    def step_chunk(self, actions: Float32[Array, "k a"], *, record: bool = False) -> ChunkOutcome:
        """Execute actions in order until the chunk or the episode ends, then look once."""
        if not self._running:
            raise SimulatorError(
                f"{self.contract.source}: no episode is running: it ended, or none was begun. Call reset first."
            )
        check_actions(actions, self.contract.action_dim, source=self.contract.source)
        steps: list[Step] = []
        frames: list[Array] = []
        for action in actions:
            step = self._advance(action)
            steps.append(step)
            frame = self._record() if record else None
            if frame is not None:
                frames.append(frame)
            if step.terminated or step.truncated:
                self._running = False
                break
        return ChunkOutcome(
            observation=self._look(),
            rewards=np.asarray([step.reward for step in steps], dtype=np.float32),
            terminated=steps[-1].terminated,
            # An episode that reaches its goal on the last permitted step ended by itself.
            truncated=steps[-1].truncated and not steps[-1].terminated,
            success=np.asarray([step.success for step in steps], dtype=np.bool_),
            frames=tuple(frames),
            info=steps[-1].info,
        )


def check_actions(actions: Float32[Array, "k a"], action_dim: int, *, source: str) -> None:
    """Refuse actions that would move a robot in no meant way.

    Raises:
        InvalidBatchError: If there is none, or their width is wrong, or one is NaN or infinite.
    """
    if len(actions) == 0 or actions.shape[1] != action_dim:
        raise InvalidBatchError(
            f"{source}: actions have shape {list(actions.shape)}, expected [k, {action_dim}] with k of at least 1. "
            "Send the executed part of a chunk."
        )
    if not np.isfinite(actions).all():
        raise InvalidBatchError(
            f"{source}: an action holds NaN or infinity. The policy diverged: look at its loss and learning rate."
        )
