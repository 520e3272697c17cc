"""One running episode: what was seen, decided and executed so far, and what becomes of it."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.rollout.chunking import chunk_reward, chunk_success
from joynexus.types import ActionChunk, Array, Arrays, EpisodeReport, Observation, PrefixArrays, Trajectory


class EpisodeRecord:
    """Collects the decisions of one episode.

    Args:
        start: How it began.
        attempt: 0, or 1 where a crash made it begin again.
        is_recorded: Whether frames for a video are kept.
    """

    def __init__(self, start: EpisodeStart, *, attempt: int = 0, is_recorded: bool = False) -> None:
        self.start = start
        self.attempt = attempt
        self.is_recorded = is_recorded
        self.observation: Observation | None = None
        """What the next decision is made from; None while the environment is busy."""
        self.terminated = False
        self.truncated = False
        self.final_value = 0.0
        self.frames: list[Array] = []
        self._seen: list[Observation] = []
        self._decisions: list[tuple[ActionChunk, int]] = []
        """The answer that each decision came in, without features, and its row there."""
        self._features: list[PrefixArrays] | None = []
        """Of each decision; None once one lacks them, or they were dropped."""
        self._num_steps: list[int] = []
        self._rewards: list[float] = []
        self._success_once = False
        self._success_at_end = False

    @property
    def num_decisions(self) -> int:
        """Decisions made so far."""
        return len(self._decisions)

    @property
    def num_steps(self) -> int:
        """Environment steps executed so far."""
        return sum(self._num_steps)

    @property
    def is_stepping(self) -> bool:
        """Whether the environment executes a chunk at present."""
        return len(self._decisions) > len(self._num_steps)

    @property
    def ended(self) -> bool:
        """Whether the environment has ended the episode."""
        return self.terminated or self.truncated

    @property
    def needs_final_value(self) -> bool:
        """Whether the critic has to look at the final observation: after a time limit, where there is a critic."""
        return self.truncated and not self.terminated and self._decisions[-1][0].value is not None

    @property
    def has_features(self) -> bool:
        """Whether no decision so far lacks its prefix features."""
        return self._features is not None

    @property
    def feature_bytes(self) -> int:
        """Bytes of the prefix features so far."""
        return sum(each.nbytes for each in self._features or ())

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frames that decisions were made from so far."""
        return sum(each.images.nbytes for each in self._seen)

    def features(self) -> PrefixArrays | None:
        """Stack the prefix features of all decisions; None where one lacks them, or they are of several kinds."""
        if not self._features or len({each.kind for each in self._features}) > 1:
            return None
        return PrefixArrays.concatenate(self._features)

    def drop_features(self) -> None:
        """Keep no prefix features of this episode any longer."""
        self._features = None

    def decide(self, chunk: ActionChunk, row: int) -> None:
        """Note what was decided from the present observation; the environment is busy from now on."""
        assert self.observation is not None, "a decision needs an observation"
        self._seen.append(self.observation)
        if chunk.features is None:
            self.drop_features()
        elif self._features is not None:
            self._features.append(chunk.features.rows([row]))
        # The answer holds the rows of all environments: their features must not outlive the decision.
        self._decisions.append((dataclasses.replace(chunk, features=None), row))
        self.observation = None

    def add(self, outcome: ChunkOutcome) -> None:
        """Note what came of the last decision."""
        self.observation = outcome.observation
        self._num_steps.append(outcome.num_steps)
        self._rewards.append(chunk_reward(outcome.rewards))
        self._success_once, self._success_at_end = chunk_success(outcome.success, once=self._success_once)
        self.terminated, self.truncated = outcome.terminated, outcome.truncated
        self.frames.extend(outcome.frames)

    def trajectory(self, *, tenant: str, ids: str) -> Trajectory:
        """Assemble the trajectory of an ended episode.

        Args:
            tenant: Whose policy acted.
            ids: Prefix of the trajectory's id.
        """
        chosen = [chunk.actions[row] for chunk, row in self._decisions]
        return Trajectory(
            trajectory_id=f"{ids}e{self.start.episode}a{self.attempt}",
            tenant=tenant,
            episode=self.start.episode,
            seed=self.start.seed,
            initial_state=self.start.initial_state,
            observation=Observation.concatenate(self._seen),
            actions=np.stack(chosen),
            num_steps=np.asarray(self._num_steps, dtype=np.int64),
            rewards=np.asarray(self._rewards, dtype=np.float32),
            log_prob=_column([(chunk.log_prob, row) for chunk, row in self._decisions]),
            values=_column([(chunk.value, row) for chunk, row in self._decisions]),
            trace=self._trace(),
            policy_versions=np.asarray([chunk.policy_version for chunk, _ in self._decisions], dtype=np.int64),
            terminated=self.terminated,
            truncated=self.truncated,
            final_value=self.final_value,
            success_once=self._success_once,
            success_at_end=self._success_at_end,
        )

    def report(self, *, video: str | None) -> EpisodeReport:
        """Assemble the report of an ended episode; its version is the oldest that made a decision."""
        return EpisodeReport(
            episode=self.start.episode,
            seed=self.start.seed,
            initial_state=self.start.initial_state,
            status=self.outcome,
            success_once=self._success_once,
            success_at_end=self._success_at_end,
            num_steps=self.num_steps,
            episode_return=float(sum(self._rewards)),
            policy_version=min(chunk.policy_version for chunk, _ in self._decisions),
            video=video,
        )

    @property
    def outcome(self) -> Literal["success", "failure"]:
        """``success`` if the task's condition held at any step, else ``failure``."""
        return "success" if self._success_once else "failure"

    def _trace(self) -> Arrays:
        names = self._decisions[0][0].trace
        return {name: np.stack([chunk.trace[name][row] for chunk, row in self._decisions]) for name in names}


def _column(values: Sequence[tuple[Array | None, int]]) -> Array:
    """Gather one number per decision; zeros where the policy gives none."""
    return np.asarray([0.0 if array is None else array[row] for array, row in values], dtype=np.float32)
