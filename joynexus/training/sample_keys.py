"""Which prefix a sample stands for: how rows that come without frames are found in the prefix store.

The note belongs to one workload of one tenant, and holds only what that workload itself sent in full. So nobody can
name another's rows, and sample ids need be unique within one dataset only.
"""

from collections.abc import Sequence

from joynexus.models.prefix_store import PrefixStore

KEPT_SAMPLES = 1024
"""Samples that a note may hold beyond twice the store's rows."""


class SampleKeys:
    """Keys of the prefix store by sample id. Used by the thread that steps the engine alone."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def learn(self, sample_ids: Sequence[str], keys: Sequence[bytes], store: PrefixStore) -> None:
        """Note the keys of rows that came in full.

        Args:
            sample_ids: One per row.
            keys: One per row.
            store: Where the rows are kept; samples whose row has left it are forgotten before the note outgrows it.
        """
        self._keys.update(zip(sample_ids, keys, strict=True))
        if len(self._keys) > 2 * len(store) + KEPT_SAMPLES:
            self._keys = {sample: key for sample, key in self._keys.items() if key in store}

    def find(self, sample_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the keys of those samples that are known."""
        return {each: self._keys[each] for each in sample_ids if each in self._keys}
