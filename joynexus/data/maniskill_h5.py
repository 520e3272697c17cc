"""ManiSkill demonstrations with camera images (Tao et al. 2024, https://arxiv.org/abs/2410.00425).

Such files come from ``python -m joynexus.data.demonstrations`` or from ManiSkill's own
``python -m mani_skill.trajectory.replay_trajectory --save-traj -o rgb``.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.frame_reader import FrameReader
from joynexus.data.maniskill_file import Trajectories, find_file, read_trajectories
from joynexus.data.normalization import compute_stats
from joynexus.errors import ContractError, DatasetError
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.data import DatasetSpec, ManiSkillH5Spec
from joynexus.specs.maniskill import maniskill_gripper, task_instruction
from joynexus.types import Array, Observation, PolicyStats, TrainingBatch, ViewSpec, broadcast_instructions

FRAME_CACHE_BYTES = 512 << 20
"""Decoded frames that one dataset keeps in memory."""


class ManiSkillH5Dataset(EpisodeDataset):
    """One ManiSkill trajectory file; states and actions in memory, images read as they are needed."""

    def __init__(self, trajectories: Trajectories, view: ViewSpec, *, label: str, instruction: str) -> None:
        self._view = view
        self._source = label
        self._instruction = instruction
        self._names = tuple(each.name for each in trajectories.episodes)
        lengths = {each.name: len(each.actions) for each in trajectories.episodes}
        self._ends: Int64[Array, " e"] = np.cumsum(list(lengths.values()), dtype=np.int64)
        self._states: Float32[Array, "n s"] = np.concatenate([each.states for each in trajectories.episodes])
        self._actions: Float32[Array, "n a"] = np.concatenate([each.actions for each in trajectories.episodes])
        self._contract = _contract(trajectories, view, label)
        self._frames = FrameReader(trajectories.path, num_frames=lengths, budget_bytes=FRAME_CACHE_BYTES)

    @classmethod
    def open(cls, spec: DatasetSpec, view: ViewSpec) -> "ManiSkillH5Dataset":
        """Open and verify a trajectory file.

        Args:
            spec: A :class:`~joynexus.specs.data.ManiSkillH5Spec`.
            view: The cameras that ``read`` returns, in this order. Whether the file has them, and in which size, is
                in ``contract``.

        Raises:
            DatasetError: If a file is missing, truncated or inconsistent, naming the file and the episode.
        """
        instruction = spec.instruction if isinstance(spec, ManiSkillH5Spec) else None
        trajectories = read_trajectories(find_file(spec.path), max_episodes=spec.max_episodes)
        instruction = instruction or task_instruction(trajectories.env_id)
        return cls(trajectories, view, label=spec.label, instruction=instruction)

    @property
    def contract(self) -> InterfaceContract:
        """What the file declares of its task."""
        return self._contract

    @property
    def num_frames(self) -> int:
        """Actions of all episodes; the observation after an episode's last action starts no sample."""
        return len(self._actions)

    @property
    def instructions(self) -> tuple[str, ...]:
        """The task's instruction."""
        return (self._instruction,)

    def statistics(self) -> PolicyStats:
        """Return statistics of states and actions over all frames that start a sample."""
        return PolicyStats(
            state=compute_stats(self._states), action=compute_stats(self._actions), source=self._contract.source
        )

    def read(self, indices: Sequence[int] | Array, horizon: int, *, with_frames: bool = True) -> TrainingBatch:
        """Read samples by frame index; see :meth:`joynexus.data.episodes.EpisodeDataset.read`.

        Raises:
            DatasetError: If an index is out of range or a frame can't be decoded.
        """
        frames = np.asarray(indices, dtype=np.int64)
        if horizon < 1 or frames.ndim != 1 or len(frames) == 0 or frames.min() < 0 or frames.max() >= self.num_frames:
            raise DatasetError(
                f"{self._source}: can't read frames {indices!r} with horizon {horizon}. Give indices in "
                f"[0, {self.num_frames}) and a horizon of 1 or more."
            )
        episodes: Int64[Array, " b"] = np.searchsorted(self._ends, frames, side="right")
        ends = self._ends[episodes]
        starts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends])[episodes]
        steps = frames[:, None] + np.arange(horizon)
        inside: list[int] = (frames - starts).tolist()
        places = [(self._names[int(episode)], step) for episode, step in zip(episodes, inside, strict=True)]
        return TrainingBatch(
            observation=Observation(
                images=self._images(places) if with_frames else self._no_images(len(places)),
                image_mask=np.ones((len(frames), len(self._view.cameras)), dtype=np.bool_),
                state=self._states[frames],
                instructions=broadcast_instructions(self._instruction, len(frames)),
            ),
            actions=self._actions[np.minimum(steps, ends[:, None] - 1)],
            action_is_pad=steps >= ends[:, None],
            sample_ids=tuple(f"{name}/{step}" for name, step in places),
        )

    def close(self) -> None:
        """Close the file; harmless when called twice."""
        self._frames.close()

    def _no_images(self, rows: int) -> UInt8[Array, "b c 0 0 3"]:
        return np.zeros((rows, len(self._view.cameras), 0, 0, 3), dtype=np.uint8)

    def _images(self, places: Sequence[tuple[str, int]]) -> UInt8[Array, "b c h w 3"]:
        cameras = self._view.cameras
        height, width = self._contract.image_size or self._view.image_size
        images = np.empty((len(places), len(cameras), height, width, 3), dtype=np.uint8)
        for row, (name, step) in enumerate(places):
            for column, camera in enumerate(cameras):
                images[row, column] = self._frames.frame(name, camera, step)
        return images


def _contract(trajectories: Trajectories, view: ViewSpec, label: str) -> InterfaceContract:
    cameras = trajectories.episodes[0].cameras
    seen = {size for camera, size in cameras.items() if camera in view.cameras} or set(cameras.values())
    if len(seen) > 1:
        raise DatasetError(
            f"dataset {trajectories.path}: cameras differ in size: {dict(cameras)}. Record the cameras of one policy "
            f"in one size."
        )
    try:
        gripper = maniskill_gripper(trajectories.robot)
    except ContractError as error:
        raise DatasetError(f"dataset {trajectories.path}: {error}") from error
    return InterfaceContract(
        source=label,
        cameras=tuple(sorted(cameras)),
        image_size=seen.pop() if seen else None,
        state=trajectories.state,
        action_dim=trajectories.episodes[0].actions.shape[1],
        control_mode=trajectories.control_mode,
        gripper=gripper,
        control_hz=trajectories.control_hz,
    )
