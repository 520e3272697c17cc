"""Which frames make up which batch, as a pure function of (seed, ordinal): a resumed run needs no saved state."""

import numpy as np
from jaxtyping import Int64

from joynexus.errors import SpecError
from joynexus.types import Array


class EpochSampler:
    """Passes over all samples in a new order each epoch; batch ``ordinal`` is the same in every process.

    The epochs' permutations follow one another without a gap and batches are cut from that endless row, so a batch
    may hold the end of one epoch and the beginning of the next, and no sample is ever left out of an epoch. The
    order depends on NumPy's PCG64 bit stream and seed sequence alone, both of which NumPy keeps stable over versions.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int) -> None:
        if num_samples < 1 or batch_size < 1 or seed < 0:
            raise SpecError(
                f"sampler: num_samples {num_samples}, batch_size {batch_size} and seed {seed} don't make batches. "
                f"Give at least one sample, one row and a seed of 0 or more."
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, Int64[Array, " n"]] = {}

    def batch(self, ordinal: int) -> Int64[Array, " b"]:
        """Return the sample indices of one batch.

        Args:
            ordinal: Index of the batch since the workload's beginning, from 0.

        Returns:
            ``batch_size`` indices in [0, num_samples).
        """
        if ordinal < 0:
            raise SpecError(f"sampler: batch {ordinal} does not exist. Count from 0.")
        first = ordinal * self.batch_size
        picked: list[Int64[Array, " part"]] = []
        missing = self.batch_size
        while missing:
            epoch, offset = divmod(first, self.num_samples)
            part = self._order(epoch)[offset : offset + missing]
            picked.append(part)
            first += len(part)
            missing -= len(part)
        return np.concatenate(picked)

    def _order(self, epoch: int) -> Int64[Array, " n"]:
        if epoch not in self._orders:
            stream = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            # Sorting raw words: NumPy may change how Generator.permutation spends them, but not the words.
            self._orders[epoch] = np.argsort(stream.random_raw(self.num_samples), kind="stable").astype(np.int64)
        return self._orders[epoch]
