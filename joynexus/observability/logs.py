"""Logs as JSON lines, kept apart by tenant and role.

A shared process works for many tenants: a record goes to the tenant that it is about, named by ``tenant_logger`` or
by ``extra={"tenant": ...}``, and all others to the service's own file. So a tenant's log holds nothing of another's.
"""

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from joynexus.observability.sinks import JsonLines, read_lines

SERVICE_FOLDER = "_service"
"""Beside the tenants' folders; no tenant's name begins with an underscore."""
LOGS_FOLDER = "logs"
"""In a tenant's folder, or the service's; one file per role."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_EXTRAS = ("tenant", "policy_version", "workload", "episode")
"""Attributes of a record that are written where they are set."""


class JsonLogHandler(logging.Handler):
    """Writes each record to the file of its tenant and of this process's role."""

    def __init__(self, root: Path, *, role: str) -> None:
        """Write below ``root/TENANT/logs`` and ``root/_service/logs``.

        Args:
            root: Folder of the run.
            role: Who writes: the name of the actor.
        """
        super().__init__()
        self._root = root
        self._role = role
        self._files: dict[str, JsonLines] = {}
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a failure is reported as logging does, and stops nobody's work."""
        try:
            values = record_values(record, role=self._role)
            with self._guard:
                self._file(values.get("tenant")).append(values)
        except Exception:  # noqa: BLE001  # whatever a message's arguments or the disk may raise
            self.handleError(record)

    def _file(self, tenant: object) -> JsonLines:
        is_safe = isinstance(tenant, str) and _SAFE_NAME.fullmatch(tenant)
        folder = str(tenant) if is_safe else SERVICE_FOLDER
        if folder not in self._files:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", self._role)
            self._files[folder] = JsonLines(self._root / folder / LOGS_FOLDER / f"{name}.jsonl")
        return self._files[folder]

    def forget(self, tenant: str) -> None:
        """Close a departed tenant's file."""
        with self._guard:
            file = self._files.pop(tenant, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close all files."""
        with self._guard:
            for file in self._files.values():
                file.close()
            self._files.clear()
        super().close()


def record_values(record: logging.LogRecord, *, role: str) -> dict[str, Any]:
    """Turn a record into JSON values: time, level, role, logger, message, and what it says about the tenant."""
    values: dict[str, Any] = {
        "time_s": record.created,
        "level": record.levelname,
        "role": role,
        "logger": record.name,
        "message": record.getMessage(),
    }
    values |= {name: getattr(record, name) for name in _EXTRAS if hasattr(record, name)}
    if record.exc_info:
        values["exception"] = logging.Formatter().formatException(record.exc_info)
    return values


def setup_logging(root: Path, *, role: str, level: int = logging.INFO) -> JsonLogHandler:
    """Send joynexus' own log records of this process to files; called once, where the process starts.

    Args:
        root: Folder of the run.
        role: The name of the actor.
        level: Lowest level that is kept.

    Returns:
        The handler; close it when the role ends.
    """
    logger = logging.getLogger("joynexus")
    handler = JsonLogHandler(root, role=role)
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler


class TenantLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records are about one tenant."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:  # noqa: ANN401
        """Add the tenant to what the call gives itself."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def tenant_logger(name: str, tenant: str, **extra: object) -> TenantLogger:
    """Return a logger for one tenant's records."""
    return TenantLogger(logging.getLogger(name), {"tenant": tenant, **extra})


def read_logs(folder: Path) -> Iterator[dict[str, Any]]:
    """Read all logs of a tenant (or, with ``_service``, of the service), oldest first.

    Args:
        folder: The tenant's folder in the run.

    Yields:
        Records of all roles by time.
    """
    records = [each for path in sorted((folder / LOGS_FOLDER).glob("*.jsonl")) for each in read_lines(path)]
    yield from sorted(records, key=lambda record: record["time_s"])


def format_record(record: Mapping[str, Any]) -> str:
    """Write a record as a line for people; times are local."""
    clock = time.strftime("%H:%M:%S", time.localtime(record["time_s"]))
    who = f"{record['role']}[{record['tenant']}]" if record.get("tenant") else record["role"]
    text = f"{clock} {record['level']:7} {who}: {record['message']}"
    return f"{text}\n{record['exception']}" if record.get("exception") else text
