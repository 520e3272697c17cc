"""Chunks of a batch whose size can't change a row's numbers, so that neighbours can't either.

Kernels choose their algorithm, and with it their rounding, by the size of the batch. A forward that always has the
same number of rows always rounds a row in the same way; a short chunk is therefore filled up with dummies. That
wastes work where one row is wanted, so smaller sizes are used too, but only those that were found on this very
machine, for this very shape, to give the numbers of a full chunk to the last bit.

Where rows have adapters (:mod:`joynexus.models.adapted_rows`), each chunk is told whose rows it holds, and a size has
to give the numbers of a full chunk without adapters and with one of every kind in it, gradients included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from joynexus.models.adapted_rows import AdaptedRows, adapted_rows, rounds_alike
from joynexus.models.adapters import Adapter, adapting
from joynexus.models.pauses import pause

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
        adapted = adapted_rows()
        if adapted is None:
            return self._run(rows, full, None)
        with torch.set_grad_enabled(adapted.records):  # the prefix is computed under no_grad but for adapters
            return self._run(rows, full, adapted)

    def _run(self, rows: Rows, full: int, adapted: AdaptedRows | None) -> Rows:
        parts: list[Rows] = []
        for start in range(0, len(rows[0]), full):
            pause()
            chunk = tuple(each[start : start + full] for each in rows)
            real = len(chunk[0])
            kinds = [] if adapted is None else adapted.kinds(start, real)
            size = self._size_for(chunk, full, kinds, records=adapted is not None and adapted.records)
            with nullcontext() if adapted is None else adapted.chunk(start, real, size):
                answer = self._forward(_fill(chunk, size))
            parts.append(tuple(each[:real] for each in answer))
            self.num_forwards += 1
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _size_for(self, chunk: Rows, full: int, kinds: Sequence[Adapter], *, records: bool) -> int:
        """Return the smallest size tried that holds the chunk and gives the numbers of a full one."""

        def is_equal(size: int) -> bool:
            tried = [None, *kinds]
            return all(self._is_equal(chunk, size, full, each, records=records) for each in tried)

        return next((size for size in _sizes(len(chunk[0]), full, is_equal) if is_equal(size)), full)

    def _is_equal(self, chunk: Rows, size: int, full: int, like: Adapter | None, *, records: bool) -> bool:
        """Whether chunks of ``size`` rows round as full ones do; tried once per shape, on random images.

        Args:
            chunk: Gives the shape.
            size: Rows to try.
            full: Rows of a full chunk.
            like: An adapter of the kind that all rows are tried with; None for none.
            records: Whether the adapters' gradients have to be equal too.
        """
        kind = None if like is None else (like.kind, records)
        key = (size, full, torch.get_num_threads(), kind, *((each.shape[1:], each.dtype) for each in chunk))
        if key not in self._verdicts:
            generator = torch.Generator().manual_seed(size)
            probe = tuple(
                torch.randint(256, each.shape, dtype=torch.uint8, generator=generator).to(each.device)
                if each.dtype == torch.uint8
                else each
                for each in _fill(chunk, full)
            )
            if like is None:
                with adapting(None), torch.no_grad():
                    large, small = self._forward(probe), self._forward(tuple(each[:size] for each in probe))
                self._verdicts[key] = all(torch.equal(a[:size], b) for a, b in zip(large, small, strict=True))
            else:
                self._verdicts[key] = rounds_alike(self._forward, probe, size, like, records=records)
        return self._verdicts[key]


def _sizes(real: int, full: int, is_equal: Callable[[int], bool]) -> Iterator[int]:
    """Yield sizes to try: powers of two, and the chunk's own where the power of two below it is equal already."""
    below = 1 << real.bit_length() - 1
    if real < full and (real == below or is_equal(below)):
        yield real
    yield from (1 << power for power in range(real.bit_length(), full.bit_length()) if 1 << power < full)


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
