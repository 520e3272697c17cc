"""The store of prefix features: no prefix is computed twice while its row is kept.

Rows are found by content (see :func:`joynexus.models.policy.prefix_keys`), so that PPO epochs, SFT epochs and the
way from rollout to trainer share them, whoever asked first. A key holds the schema signature: features of another
backbone, dtype or preprocessing are never found.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.service import PrefixStoreSpec


class _Tier:
    """Rows within a byte budget; the least recently used one leaves first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self.rows: OrderedDict[bytes, PrefixFeatures] = OrderedDict()

    def get(self, key: bytes) -> PrefixFeatures | None:
        row = self.rows.get(key)
        if row is not None:
            self.rows.move_to_end(key)
        return row

    def put(self, key: bytes, row: PrefixFeatures) -> list[tuple[bytes, PrefixFeatures]]:
        """Keep a row and return those that had to leave; the row itself where it is larger than the budget."""
        if row.nbytes > self.capacity:
            return [(key, row)]
        self.pop(key)
        self.rows[key] = row
        self.nbytes += row.nbytes
        gone: list[tuple[bytes, PrefixFeatures]] = []
        while self.nbytes > self.capacity:
            oldest, left = self.rows.popitem(last=False)
            self.nbytes -= left.nbytes
            gone.append((oldest, left))
        return gone

    def pop(self, key: bytes) -> PrefixFeatures | None:
        row = self.rows.pop(key, None)
        if row is not None:
            self.nbytes -= row.nbytes
        return row


class PrefixStore:
    """Two tiers of rows, on the device of the backbone and in host memory; on a CPU they are one.

    A row that leaves the device tier moves to the host tier, and back when it is asked for. Rows are the store's
    own copies: what a caller does to a batch of features can't reach them. Not thread-safe; an engine owns one.
    """

    def __init__(self, spec: PrefixStoreSpec) -> None:
        self._spec = spec
        self._device = _Tier(spec.device_bytes)
        self._host = _Tier(spec.host_bytes)
        self._where = torch.device("cpu")
        self.hits = 0
        """Rows found since the start."""
        self.misses = 0
        """Rows not found since the start."""

    def __len__(self) -> int:
        return len(self._device.rows) + len(self._host.rows)

    def __contains__(self, key: object) -> bool:
        return key in self._device.rows or key in self._host.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are kept."""
        return self._device.nbytes + self._host.nbytes

    def lookup(self, keys: Sequence[bytes]) -> list[PrefixFeatures | None]:
        """Return the row of each key, or None, on the device that it was computed on; read-only for the caller."""
        found = [self._find(key) for key in keys]
        missing = sum(row is None for row in found)
        self.misses += missing
        self.hits += len(found) - missing
        return found

    def hold(self, keys: Sequence[bytes]) -> list[PrefixFeatures | None]:
        """Return the row of each key, or None, for somebody who will use the rows later; read-only for the caller.

        The rows stay valid for as long as they are held, whatever leaves the store meanwhile. They are where the store
        keeps them, on the device or in host memory, and nothing is moved for them. Not counted as hits or misses: who
        holds rows may find that one is missing, and ask again.
        """
        return [self._device.get(key) or self._host.get(key) for key in keys]

    def insert(self, keys: Sequence[bytes], features: PrefixFeatures) -> None:
        """Keep copies of rows, one per key; the least recently used leave to make room.

        Args:
            keys: One per row of ``features``.
            features: Rows of one signature, all on the device of the backbone.
        """
        self._where = features.hidden.device
        if not self._has_host_tier():
            self._device.capacity = self._spec.device_bytes + self._spec.host_bytes
        for index, key in enumerate(keys):
            row = features.slice(index, index + 1)
            if row.nbytes <= max(self._device.capacity, self._host.capacity):
                self._host.pop(key)
                self._keep(key, row.map(Tensor.clone))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget rows; keys that are not kept are ignored."""
        for key in keys:
            self._device.pop(key)
            self._host.pop(key)

    def clear(self) -> None:
        """Forget every row; the counters stay."""
        self._device = _Tier(self._device.capacity)
        self._host = _Tier(self._host.capacity)

    def _has_host_tier(self) -> bool:
        """On a CPU the budget of both tiers is in the first."""
        return self._where.type != "cpu"

    def _find(self, key: bytes) -> PrefixFeatures | None:
        row = self._device.get(key)
        if row is not None:
            return row
        kept = self._host.pop(key)
        if kept is None:
            return None
        row = kept.map(lambda each: each.to(self._where))
        self._keep(key, row)
        return row

    def _keep(self, key: bytes, row: PrefixFeatures) -> None:
        for gone, left in self._device.put(key, row):
            if self._has_host_tier():
                self._host.put(gone, left.map(Tensor.cpu))
