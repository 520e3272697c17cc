"""Which groups went through an engine: few bytes each, bounded, and cheap to send on in parts."""

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_GROUPS = 2048
"""Groups that a log keeps; beyond it every second one is left out, and so on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupColumns:
    """Groups in the order of their ends, as columns: 24 bytes a group, and one object whatever their number."""

    ordinal: npt.NDArray[np.int64]
    """Which group of the engine it was, from 0."""
    time_s: npt.NDArray[np.float64]
    """Unix time at its end."""
    tenants: npt.NDArray[np.int32]
    samples: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ordinal)

    def pick(self, rows: slice | npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> "GroupColumns":
        """Return copies of some rows."""
        return GroupColumns(
            ordinal=self.ordinal[rows].copy(),
            time_s=self.time_s[rows].copy(),
            tenants=self.tenants[rows].copy(),
            samples=self.samples[rows].copy(),
        )

    @staticmethod
    def merge(parts: "list[GroupColumns]") -> "GroupColumns":
        """Put the groups of several engines together, in order of time; ordinals are those of each engine."""
        joined = _join([empty_columns(), *parts])
        return joined.pick(np.argsort(joined.time_s, kind="stable"))


class GroupLog:
    """The groups of one engine, from the first to the newest; evenly thinned out where there were too many.

    The engine appends; whoever collects takes what is new with ``since`` and puts it into a log of its own with
    ``extend``, which takes no group twice. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = _zeros(MAX_GROUPS + 1)
        self._size = 0
        self._stride = 1
        self._next = 0

    @property
    def next_ordinal(self) -> int:
        """Number of groups so far: ``since`` this one is all that comes later."""
        return self._next

    def append(self, *, tenants: int, samples: int) -> None:
        """Note a group that ends now."""
        with self._lock:
            self._put(self._next, time.time(), tenants, samples)

    def extend(self, columns: GroupColumns) -> None:
        """Take over groups of another log; those that are known already are left out."""
        with self._lock:
            rows = zip(
                columns.ordinal.tolist(),
                columns.time_s.tolist(),
                columns.tenants.tolist(),
                columns.samples.tolist(),
                strict=True,
            )
            for row in rows:
                if row[0] >= self._next:
                    self._put(*row)

    def since(self, ordinal: int = 0) -> GroupColumns:
        """Copy the groups that are kept from one on."""
        with self._lock:
            kept = self._kept.ordinal[: self._size]
            return self._kept.pick(slice(int(np.searchsorted(kept, ordinal)), self._size))

    def _put(self, ordinal: int, time_s: float, tenants: int, samples: int) -> None:
        self._next = ordinal + 1
        if ordinal % self._stride:
            return
        kept, row = self._kept, self._size
        kept.ordinal[row], kept.time_s[row], kept.tenants[row], kept.samples[row] = ordinal, time_s, tenants, samples
        self._size += 1
        if self._size > MAX_GROUPS:
            self._stride *= 2
            thinned = kept.pick(kept.ordinal[: self._size] % self._stride == 0)
            self._size = len(thinned)
            self._kept = _join([thinned, _zeros(MAX_GROUPS + 1 - self._size)])


def empty_columns() -> GroupColumns:
    """Return no groups."""
    return _zeros(0)


def _zeros(rows: int) -> GroupColumns:
    return GroupColumns(
        ordinal=np.zeros(rows, np.int64),
        time_s=np.zeros(rows, np.float64),
        tenants=np.zeros(rows, np.int32),
        samples=np.zeros(rows, np.int32),
    )


def _join(parts: list[GroupColumns]) -> GroupColumns:
    return GroupColumns(
        ordinal=np.concatenate([each.ordinal for each in parts]),
        time_s=np.concatenate([each.time_s for each in parts]),
        tenants=np.concatenate([each.tenants for each in parts]),
        samples=np.concatenate([each.samples for each in parts]),
    )
