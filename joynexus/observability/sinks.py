"""Where a tenant's metrics go: one JSON line per record, and TensorBoard events beside it.

The lines are the truth. Each is appended whole; a process that dies within a write leaves a torn last line, which
readers skip and the next writer cuts off.
"""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from joynexus.observability.metrics import check_name

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
"""In the tenant's folder."""
TENSORBOARD_FOLDER = "tensorboard"
"""In the tenant's folder."""


class JsonLines:
    """An append-only file of JSON objects, one per line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        end = size
        while end and os.pread(self._file, 1, end - 1) != b"\n":
            end -= 1
        if end != size:
            os.ftruncate(self._file, end)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one object; numbers that JSON lacks (NaN, infinity) become null."""
        cleaned = {name: _clean(value) for name, value in record.items()}
        line = json.dumps(cleaned, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        while line:  # a pipe or a full disk may take a part
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Close the file; harmless when called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _clean(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON objects, without its torn last line; a missing file is empty.

    Raises:
        ValueError: If a line before the last is not a JSON object.
    """
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(whole, start=1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is not a JSON object. Restore or delete the line.") from error
    return records


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a tenant's metrics.

    Args:
        path: The tenant's folder, or the file in it.

    Returns:
        One mapping per record: ``step``, ``time_s``, labels, and values by metric name.
    """
    return read_lines(path / METRICS_FILE if path.is_dir() else path)


class MetricsWriter:
    """Writes one tenant's metrics; one writer per file."""

    def __init__(self, folder: Path, *, tensorboard: bool = True) -> None:
        self._lines = JsonLines(folder / METRICS_FILE)
        self._events = _TensorBoard.open(folder / TENSORBOARD_FOLDER) if tensorboard else None

    def write(
        self,
        step: int,
        values: Mapping[str, float | int],
        *,
        time_s: float | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one record.

        Args:
            step: Position on the x-axis: the tenant's optimizer steps or iterations.
            values: By metric name, ``area/name``.
            time_s: Unix time of the values; None takes now.
            labels: Further fields of the line, such as ``workload``; they do not reach TensorBoard.

        Raises:
            ValueError: If a name is not of the form ``area/name``.
        """
        for name in values:
            check_name(name)
        when = time.time() if time_s is None else time_s
        numbers = {name: float(value) for name, value in values.items()}
        self._lines.append({"step": step, "time_s": when, **(labels or {}), **numbers})
        if self._events is not None:
            self._events.write(step, numbers, when)

    def close(self) -> None:
        """Write out what is buffered and close the files; harmless when called twice."""
        self._lines.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _TensorBoard:
    """TensorBoard's own event writer, which needs no torch."""

    def __init__(self, writer: Any, event: Any, summary: Any) -> None:  # noqa: ANN401  # untyped classes
        self._writer, self._event, self._summary = writer, event, summary

    @classmethod
    def open(cls, folder: Path) -> "_TensorBoard | None":
        """Return a writer; None where TensorBoard is not installed."""
        try:
            writers = import_module("tensorboard.summary.writer.event_file_writer")
            event = import_module("tensorboard.compat.proto.event_pb2").Event
            summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        except ImportError as error:
            log.warning("no TensorBoard events: %s. Install joynexus[train] for them.", error)
            return None
        return cls(writers.EventFileWriter(str(folder)), event, summary)

    def write(self, step: int, values: Mapping[str, float | int], time_s: float) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._writer.close()
