"""A tenant's folder of one run: its checkpoints, newest last, and the states that its user named.

<folder>/checkpoints/step_<optimizer steps>_v<policy version>/    written at each publication; the run resumes here
<folder>/states/<name>/                                          written by ``save_state``; never taken by itself
"""

import re
import shutil
from pathlib import Path

from joynexus.errors import SpecError
from joynexus.training.checkpoint import remove_leftovers

_CHECKPOINT = re.compile(r"^step_(\d+)_v(\d+)$")
_NAME = re.compile(r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$")


class RunFolder:
    """Paths of one run, and which checkpoints are kept."""

    def __init__(self, folder: Path, *, num_kept: int) -> None:
        """Use a folder, which need not exist yet.

        Args:
            folder: Of this run and tenant alone.
            num_kept: Newest checkpoints that :meth:`prune` leaves; at least 1.
        """
        self.folder = folder
        self._checkpoints = folder / "checkpoints"
        self._num_kept = num_kept

    def checkpoint(self, *, steps: int, version: int) -> Path:
        """Return the place of a checkpoint."""
        return self._checkpoints / f"step_{steps:08d}_v{version:06d}"

    def newest_first(self) -> list[Path]:
        """Return the complete checkpoints, by version, then by steps."""
        if not self._checkpoints.is_dir():
            return []
        found = [(match, path) for path in self._checkpoints.iterdir() if (match := _CHECKPOINT.match(path.name))]
        found.sort(key=lambda each: (int(each[0][2]), int(each[0][1])), reverse=True)
        return [path for _, path in found]

    def highest_version(self) -> int:
        """Return the highest version that a checkpoint was written for, good or damaged; 0 without any."""
        found = self.newest_first()
        match = _CHECKPOINT.match(found[0].name) if found else None
        return int(match[2]) if match else 0

    def prune(self) -> None:
        """Remove all but the newest checkpoints."""
        for path in self.newest_first()[self._num_kept :]:
            shutil.rmtree(path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Take away what a crash left half written."""
        remove_leftovers(self._checkpoints)
        remove_leftovers(self.folder / "states")

    def state(self, name: str) -> Path:
        """Return the place of a named state.

        Raises:
            SpecError: If the name could leave the folder.
        """
        if not _NAME.match(name):
            raise SpecError(
                f"state {name!r}: not a name. Take letters, digits, '_', '-' and '.', beginning with a letter or digit."
            )
        return self.folder / "states" / name
