"""The contract of an offline dataset: episodes of frames, read by index."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from joynexus.specs.contract import InterfaceContract
from joynexus.specs.data import DatasetSpec
from joynexus.types import Array, PolicyStats, TrainingBatch, ViewSpec


class EpisodeDataset(ABC):
    """Demonstrations, opened and checked whole before anything is trained on them."""

    @classmethod
    @abstractmethod
    def open(cls, spec: DatasetSpec, view: ViewSpec) -> "EpisodeDataset":
        """Open and verify a dataset.

        Raises:
            DatasetError: If a file is missing, truncated or inconsistent, naming the file; nothing is kept open.
        """

    @property
    @abstractmethod
    def contract(self) -> InterfaceContract:
        """The facts that the files declare."""

    @property
    @abstractmethod
    def num_frames(self) -> int:
        """Frames of all episodes; each is the start of one sample."""

    @property
    def instructions(self) -> tuple[str, ...]:
        """Every instruction that occurs, once; empty where only reading all samples would tell."""
        return ()

    @abstractmethod
    def statistics(self) -> PolicyStats:
        """Statistics of states and actions over all frames."""

    @abstractmethod
    def read(self, indices: Sequence[int] | Array, horizon: int, *, with_frames: bool = True) -> TrainingBatch:
        """Read samples: the observation at each frame, and the chunk of ``horizon`` actions from there.

        Steps past the episode's end repeat its last action and are marked in ``action_is_pad``.

        Args:
            indices: Of frames.
            horizon: Length of the chunks.
            with_frames: False reads and decodes no image; the rest is the same, as
                :meth:`joynexus.types.Observation.without_frames` would leave it.

        Returns:
            The samples. Each frame has one sample id, the same at every read, that no other frame of the dataset has.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""
