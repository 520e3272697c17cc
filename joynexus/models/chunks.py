"""Fixed-size chunks of a batch, so that the rows beside a row can't change its numbers.

Kernels choose their algorithm, and with it their rounding, by the size of the batch. A forward that always has the
same number of rows always rounds a row in the same way.
"""

from collections.abc import Iterator

import torch

from joynexus.models.prefix import PrefixBatch


def fixed_chunks(batch: PrefixBatch, size: int) -> Iterator[tuple[PrefixBatch, int]]:
    """Split a batch into chunks of exactly ``size`` rows.

    Args:
        batch: At least one row.
        size: Rows of a chunk.

    Yields:
        A chunk and how many of its rows are real; the rest repeat its first row.
    """
    for start in range(0, len(batch), size):
        chunk = batch.rows(start, start + size)
        yield (_fill(chunk, size) if len(chunk) < size else chunk), len(chunk)


def _fill(chunk: PrefixBatch, size: int) -> PrefixBatch:
    index = torch.zeros(size, dtype=torch.int64, device=chunk.tokens.device)
    index[: len(chunk)] = torch.arange(len(chunk), device=index.device)
    return chunk.pick(index)
