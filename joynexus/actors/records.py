"""The Master's desired state of each tenant, on disk before the Master answers."""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from joynexus.specs.tenant import TenantSpec

TenantStatus = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "STOPPED"]
ENDED: frozenset[str] = frozenset({"COMPLETED", "FAILED", "STOPPED"})


class WorkloadRecord(BaseModel):
    """What is known of one workload."""

    model_config = ConfigDict(extra="forbid")

    type: str
    status: Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "STOPPED"] = "PENDING"
    results: dict[str, Any] = Field(default_factory=dict)
    """Steps, losses, success rates: what the summary prints."""
    reason: str | None = None
    """Why it failed, where its tenant lives on."""


class TenantRecord(BaseModel):
    """All that a new Master needs to go on with a tenant."""

    model_config = ConfigDict(extra="forbid")

    spec: TenantSpec
    folder: Path
    """Where everything of this tenant in this run is written."""
    status: TenantStatus = "PENDING"
    reason: str | None = None
    """Why it failed: ``ErrorClass: message``."""
    signature: str = ""
    workload: int = 0
    """Index of the workload that runs, or runs next."""
    workloads: list[WorkloadRecord] = Field(default_factory=list[WorkloadRecord])
    policy_version: int = 0
    stop_requested: bool = False
    interactive: bool = False
    """Driven through the Python API: stays until it is stopped, and may be given further workloads."""
    lifeline: str | None = None
    """Of the driver that the tenant belongs to: it is stopped when that is gone. None: it belongs to nobody."""
    order: int = 0
    """Position in the order of submission."""

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.spec.tenant


class RecordStore:
    """Records as one JSON file per tenant, replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> dict[str, TenantRecord]:
        """Read every record."""
        records = (TenantRecord.model_validate_json(path.read_text()) for path in sorted(self._folder.glob("*.json")))
        return {record.name: record for record in records}

    def save(self, record: TenantRecord) -> None:
        """Write a record durably."""
        write_atomically(self._folder / f"{record.name}.json", record.model_dump_json(indent=1))

    def remove(self, tenant: str) -> None:
        """Forget a tenant."""
        (self._folder / f"{tenant}.json").unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
