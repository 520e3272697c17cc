"""Videos of episodes, for a person to look at."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v3 as iio
import numpy as np

from joynexus.types import Array

DEFAULT_FPS = 20.0
"""Where the environment does not tell its control rate."""


class VideoSink:
    """Writes the first episodes of an evaluation as MP4 files (H.264, played anywhere).

    Args:
        folder: Created where it is missing.
        first: Number of episodes to record: those with an index below it.
    """

    def __init__(self, folder: Path, *, first: int) -> None:
        self._folder = folder
        self._first = first

    def wants(self, episode: int) -> bool:
        """Whether an episode is to be recorded."""
        return episode < self._first

    def write(self, episode: int, frames: Sequence[Array], *, fps: float | None, outcome: str) -> str | None:
        """Write one episode.

        Args:
            episode: Its index.
            frames: RGB frames, one per step; all of one size.
            fps: Steps per second of the simulation, so that the video runs in real time.
            outcome: Such as ``success``; becomes part of the name.

        Returns:
            The file's path, or None where there is no frame.
        """
        if not frames:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"episode_{episode:05d}_{outcome}.mp4"
        even = np.stack([_even(frame) for frame in frames])
        iio.imwrite(path, even, plugin="pyav", codec="libx264", fps=float(fps or DEFAULT_FPS))
        return str(path)


def _even(frame: Array) -> Array:
    """Cut a frame to even sides: the codec halves the resolution of colours."""
    height, width = frame.shape[:2]
    return np.ascontiguousarray(frame[: height - height % 2, : width - width % 2])
