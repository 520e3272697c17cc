"""Random access to the camera frames of a trajectory file, decoded once where memory allows."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import h5py
from jaxtyping import UInt8

from joynexus.errors import DatasetError
from joynexus.types import Array


class FrameReader:
    """Frames by (episode, camera, step).

    Decoded episodes are kept until ``budget_bytes`` are used; from then on frames of other episodes are read one by
    one. Nothing is evicted: training visits all frames equally often, so that an LRU smaller than the data would only
    throw away what it needs next. The file is opened at the first read, also in a process that unpickled the reader.
    """

    def __init__(self, path: Path, *, num_frames: Mapping[str, int], budget_bytes: int) -> None:
        self._path = path
        self._num_frames = dict(num_frames)
        self._budget_bytes = budget_bytes
        self._identity = _identity(path)
        self._file: Any = None
        self._decoded: dict[tuple[str, str], UInt8[Array, "t h w 3"]] = {}
        self._used_bytes = 0
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file and the decoded frames behind."""
        return self.__dict__ | {"_file": None, "_decoded": {}, "_used_bytes": 0}

    @property
    def used_bytes(self) -> int:
        """Bytes of decoded frames that are kept."""
        return self._used_bytes

    def frame(self, episode: str, camera: str, step: int) -> UInt8[Array, "h w 3"]:
        """Return one frame, read-only.

        Raises:
            DatasetError: If it can't be read or decoded; a faulty file is never taken for a shorter one.
        """
        kept = self._decoded.get((episode, camera))
        if kept is not None:
            return kept[step]
        place = f"{episode}/obs/sensor_data/{camera}/rgb"
        try:
            data = self._open().get(place)
            if data is None:
                raise DatasetError(f"dataset {self._path}: {place} does not exist. Check the policy's cameras.")
            size = self._num_frames[episode] * math.prod(data.shape[1:])
            if self._used_bytes + size > self._budget_bytes:
                return cast("Array", data[step])
            frames = cast("Array", data[: self._num_frames[episode]])
        except (OSError, RuntimeError) as error:
            raise DatasetError(
                f"dataset {self._path}: {place} can't be decoded near step {step} ({error}). Copy or record it again."
            ) from error
        frames.flags.writeable = False
        self._decoded[episode, camera] = frames
        self._used_bytes += size
        return frames[step]

    def close(self) -> None:
        """Close the file and forget the frames; later reads are refused."""
        if self._file is not None:
            self._file.close()
        self._file, self._decoded, self._used_bytes, self._closed = None, {}, 0, True

    def _open(self) -> Any:  # noqa: ANN401  # h5py has no types
        if self._closed:
            raise DatasetError(f"dataset {self._path}: it was closed. Open it again.")
        if self._file is None:
            if _identity(self._path) != self._identity:
                raise DatasetError(f"dataset {self._path}: the file changed after it was verified. Open it again.")
            self._file = h5py.File(self._path, "r", locking="best-effort")
        return self._file


def _identity(path: Path) -> tuple[int, int] | None:
    """Size and modification time, which tell a replaced file from the one that was verified."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
