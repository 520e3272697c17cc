"""The prefix store as bytes: which blocks of rows are kept, least recently used out first."""

from collections import OrderedDict

from benchmarks.simulation.workload import BLOCK_ROWS

BlockKey = tuple[str, int]
"""Signature and dataset (or a tenant's own collection), and the block's index."""


class VirtualStore:
    """Counts like the product's store, in blocks of :data:`~benchmarks.simulation.workload.BLOCK_ROWS` rows.

    One tier: rows in host memory cost no more than those on the device.
    """

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        self._blocks = capacity_bytes // (row_bytes * BLOCK_ROWS) if row_bytes else 1 << 62
        self._kept: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: BlockKey) -> bool:
        """Whether a block is kept; it is then the most recently used one."""
        if key not in self._kept:
            return False
        self._kept.move_to_end(key)
        return True

    def keep(self, key: BlockKey) -> None:
        """Keep a block, at the cost of the one that was not used for longest."""
        if self._blocks < 1:
            return
        self._kept[key] = None
        self._kept.move_to_end(key)
        if len(self._kept) > self._blocks:
            self._kept.popitem(last=False)
