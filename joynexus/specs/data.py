"""Offline datasets of demonstrations."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from joynexus.specs.base import Component
from joynexus.specs.registry import OneOf


class DatasetSpec(Component):
    """What every dataset declares. ``implementation`` follows :class:`joynexus.data.episodes.EpisodeDataset`."""

    path: Path
    """File or folder; a relative one is taken from the folder of the tenant's YAML."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Use only the first N episodes; None uses all."""

    @property
    def label(self) -> str:
        """Short name for messages and reports."""
        return f"{self.type} {self.path}"

    def resolve(self, folder: Path) -> "DatasetSpec":
        """Return the same spec with ``path`` made absolute against ``folder``."""
        return self.model_copy(update={"path": (folder / self.path).resolve()})


class ManiSkillH5Spec(DatasetSpec):
    """ManiSkill trajectories (``.h5`` with its ``.json`` beside it) that hold camera images."""

    implementation: ClassVar[str] = "joynexus.data.maniskill_h5:ManiSkillH5Dataset"
    type: Literal["maniskill_h5"] = "maniskill_h5"
    instruction: str | None = None
    """Overrides the task's own instruction."""


AnyDataset = Annotated[DatasetSpec, OneOf("datasets")]
"""Any registered dataset, by ``type``."""
