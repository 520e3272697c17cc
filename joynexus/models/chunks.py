"""Chunks of a batch whose size can't change a row's numbers, so that neighbours can't either.

Kernels choose their algorithm, and with it their rounding, by the size of the batch. A forward that always has the
same number of rows always rounds a row in the same way; a short chunk is therefore filled up with dummies. That
wastes work where one row is wanted, so smaller sizes are used too, but only those that were found on this very
machine, for this very shape, to give the numbers of a full chunk to the last bit.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]
"""Tensors with one row per sample in their first axis."""
CPU_TOKENS = 1024
"""Tokens of one forward on a CPU (``docs/decisions/0019``)."""


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

    def run(self, rows: Rows, *, max_rows: int | None = None) -> Rows:
        """Run all rows.

        Args:
            rows: At least one row.
            max_rows: Rows of a full chunk where large ones do not pay, see :func:`rows_that_pay`; the same for all
                rows of one shape.

        Returns:
            The answers, in order.
        """
        full = self._size if max_rows is None else min(self._size, max_rows)
        parts: list[Rows] = []
        for start in range(0, len(rows[0]), full):
            chunk = tuple(each[start : start + full] for each in rows)
            real = len(chunk[0])
            answer = self._forward(_fill(chunk, self._size_for(chunk, full)))
            parts.append(tuple(each[:real] for each in answer))
            self.num_forwards += 1
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _size_for(self, chunk: Rows, full: int) -> int:
        """Return the smallest size tried that holds the chunk and gives the numbers of a full one."""
        return next((size for size in self._sizes(chunk, full) if self._is_equal(chunk, size, full)), full)

    def _sizes(self, chunk: Rows, full: int) -> Iterator[int]:
        """Yield sizes to try: powers of two, and the chunk's own where the power of two below it is equal already."""
        real = len(chunk[0])
        below = 1 << real.bit_length() - 1
        if real < full and (real == below or self._is_equal(chunk, below, full)):
            yield real
        yield from (1 << power for power in range(real.bit_length(), full.bit_length()) if 1 << power < full)

    def _is_equal(self, chunk: Rows, size: int, full: int) -> bool:
        """Whether chunks of ``size`` rows round as full ones do; tried once per shape, on random images."""
        key = (size, full, torch.get_num_threads(), *((each.shape[1:], each.dtype) for each in chunk))
        if key not in self._verdicts:
            generator = torch.Generator().manual_seed(size)
            probe = tuple(
                torch.randint(256, each.shape, dtype=torch.uint8, generator=generator).to(each.device)
                if each.dtype == torch.uint8
                else each
                for each in _fill(chunk, full)
            )
            large, small = self._forward(probe), self._forward(tuple(each[:size] for each in probe))
            self._verdicts[key] = all(torch.equal(a[:size], b) for a, b in zip(large, small, strict=True))
        return self._verdicts[key]


def rows_that_pay(num_tokens: int, device: torch.device) -> int | None:
    """Return how many rows of one forward pay.

    On a CPU more tokens than fit its caches gain nothing, and from some 2,000 on they lose: memory for the
    activations is asked of the system again and again. A GPU is the fuller the better.

    Args:
        num_tokens: Of one row.
        device: Where the network is.

    Returns:
        A power of two, so that groups of the usual sizes are cut evenly; None where there is no bound.
    """
    if device.type != "cpu":
        return None
    return 1 << max(CPU_TOKENS // max(num_tokens, 1), 1).bit_length() - 1


def _fill(chunk: Rows, size: int) -> Rows:
    """Fill a chunk up to ``size`` rows with copies of its first."""
    missing = size - len(chunk[0])
    if missing == 0:
        return chunk
    return tuple(torch.cat([each, each[:1].expand(missing, *each.shape[1:])]) for each in chunk)
