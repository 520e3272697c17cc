"""The next group's rows, tokenised and named while this one computes.

What a row's prefix is depends on the row and the policy alone, so a second thread can work it out before the group is
chosen. The thread that steps takes what is there, waits for what was begun, and does by itself what was not: the
rows, and whatever is wrong with them, are the same either way.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from joynexus.models.backbone import Backbone
from joynexus.models.normalizer import PolicyNormalizer
from joynexus.models.policy import prefix_keys, prepare_prefix
from joynexus.models.prefix import PrefixBatch
from joynexus.specs.tenant import PolicySpec
from joynexus.types import Array, Observation, TrainingBatch

MAX_AHEAD = 4
"""Calls of one tenant that are prepared before their turn at most: each holds a second copy of its frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRows:
    """Rows ready for the backbone, in host memory."""

    prefix: PrefixBatch
    keys: list[bytes]
    """One per row; see :func:`joynexus.models.policy.prefix_keys`."""
    cpu_s: float = 0.0
    """CPU seconds that another thread than the engine's spent on them."""

    def pick(self, rows: Array) -> "PreparedRows":
        """Return the rows that an array of indices, in ascending order, picks."""
        if len(rows) == len(self.keys):
            return self
        picked = [int(row) for row in rows]
        index = torch.tensor(picked, dtype=torch.int64)
        keys = [self.keys[row] for row in picked]
        return PreparedRows(prefix=self.prefix.pick(index), keys=keys, cpu_s=self.cpu_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMaker:
    """What turns a tenant's observations into what the backbone sees."""

    backbone: Backbone
    policy: PolicySpec
    normalizer: PolicyNormalizer
    signature: str

    def prepare(self, seen: Observation) -> PreparedRows:
        """Tokenise rows, and name each by its content.

        Args:
            seen: At least one row, with its frames.

        Raises:
            InvalidBatchError: If the rows do not fit the policy.
        """
        prefix = prepare_prefix(self.backbone, self.policy, seen, self.normalizer)
        return PreparedRows(prefix=prefix, keys=prefix_keys(prefix, self.signature))


class Ahead:
    """All rows of a batch, on their way."""

    def __init__(self, maker: RowMaker, future: "Future[PreparedRows]") -> None:
        self._maker = maker
        self._future = future

    def take(self, maker: RowMaker) -> PreparedRows | None:
        """Return the rows once they are ready.

        Args:
            maker: What would make them now: ``load_state`` may have brought other statistics since they were begun.

        Returns:
            The rows; None where they were not begun, failed, or would be others now. Then make them again.
        """
        if self._future.cancel() or maker != self._maker or self._future.exception() is not None:
            return None
        return self._future.result()


class Preparer:
    """One thread beside the engine's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    def begin(self, maker: RowMaker, batch: TrainingBatch | None) -> Ahead | None:
        """Begin with a batch that will be called later; None where there is none, or its rows need no encoding."""
        if batch is None or len(batch) == 0 or batch.num_featured or not batch.observation.has_frames:
            return None
        return Ahead(maker, self._thread.submit(_timed, maker, batch.observation))


def _timed(maker: RowMaker, seen: Observation) -> PreparedRows:
    began = time.thread_time()
    rows = maker.prepare(seen)
    return PreparedRows(prefix=rows.prefix, keys=rows.keys, cpu_s=time.thread_time() - began)
