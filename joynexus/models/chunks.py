"""Chunks of a batch whose size can't change a row's numbers, so that neighbours can't either.

Kernels choose their algorithm, and with it their rounding, by the size of the batch. A forward that always has the
same number of rows always rounds a row in the same way; a short chunk is therefore filled up with dummies. That
wastes work where one row is wanted, so smaller sizes are used too, but only those that were found on this very
machine, for this very shape, to give the numbers of a full chunk to the last bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]
"""Tensors with one row per sample in their first axis."""


class FixedChunks:
    """Runs a network over any number of rows; each row's answer is that of a full chunk, bit by bit."""

    def __init__(self, forward: Callable[[Rows], Rows], size: int) -> None:
        """Wrap a network.

        Args:
            forward: Runs rows; an answer depends on its own row alone but for rounding. Tensors of bytes are images.
            size: Rows of a full chunk.
        """
        self._forward = forward
        self._size = size
        self._verdicts: dict[tuple[object, ...], bool] = {}
        self.num_forwards = 0
        """Chunks run since the start, without those that only tried a size."""

    def run(self, rows: Rows) -> Rows:
        """Run all rows.

        Args:
            rows: At least one row.

        Returns:
            The answers, in order.
        """
        parts: list[Rows] = []
        for start in range(0, len(rows[0]), self._size):
            chunk = tuple(each[start : start + self._size] for each in rows)
            real = len(chunk[0])
            answer = self._forward(_fill(chunk, self._size_for(chunk)))
            parts.append(tuple(each[:real] for each in answer))
            self.num_forwards += 1
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _size_for(self, chunk: Rows) -> int:
        """Return the smallest size that holds the chunk and gives the numbers of a full one."""
        real, size = len(chunk[0]), 1
        while size < self._size:
            if size >= real and self._is_equal(chunk, size):
                return size
            size *= 2
        return self._size

    def _is_equal(self, chunk: Rows, size: int) -> bool:
        """Whether chunks of ``size`` rows round as full ones do; tried once per shape, on random images."""
        key = (size, torch.get_num_threads(), *((each.shape[1:], each.dtype) for each in chunk))
        if key not in self._verdicts:
            generator = torch.Generator().manual_seed(size)
            probe = tuple(
                torch.randint(256, each.shape, dtype=torch.uint8, generator=generator).to(each.device)
                if each.dtype == torch.uint8
                else each
                for each in _fill(chunk, self._size)
            )
            full, small = self._forward(probe), self._forward(tuple(each[:size] for each in probe))
            self._verdicts[key] = all(torch.equal(a[:size], b) for a, b in zip(full, small, strict=True))
        return self._verdicts[key]


def _fill(chunk: Rows, size: int) -> Rows:
    """Fill a chunk up to ``size`` rows with copies of its first."""
    missing = size - len(chunk[0])
    if missing == 0:
        return chunk
    return tuple(torch.cat([each, each[:1].expand(missing, *each.shape[1:])]) for each in chunk)
