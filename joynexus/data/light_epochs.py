"""Which micro-batches go without frames, because the trainer has their features. Pure: no files, no clock."""

from collections import deque

import numpy as np
from jaxtyping import Bool, Int64

from joynexus.data.sampler import EpochSampler
from joynexus.types import Array

WINDOW = 32
"""Light items that are looked back at."""
LEAST_FETCHED = 4
"""Fewer than so many that were asked for in full are never too many."""
LARGEST_SHARE = 0.25
"""Part of the light items in the window that may be asked for in full."""
LONGEST_PAUSE = 64
"""Epochs between two tries at most."""


class LightEpochs:
    """Chooses, item by item, whether frames are read and sent.

    An item can be light when each of its rows was sent in full before, so that the trainer may have kept its features.
    Whether it did shows in what it asks for again: where that is too much (its store is too small, or it was made
    anew), items go in full for an epoch, then for two, four, ... before the next try. Which items are light decides
    what is moved, and never what is learnt.
    """

    def __init__(self, sampler: EpochSampler, *, is_enabled: bool) -> None:
        self._sampler = sampler
        self._is_enabled = is_enabled
        self._sent: Bool[Array, " n"] = np.zeros(sampler.num_samples, dtype=np.bool_)
        self._full_until = 0
        """Ordinal before which nothing is light."""
        self._light: deque[int] = deque(maxlen=4 * WINDOW)
        """Ordinals of the newest light items; more than a window, since what is asked for again lags behind."""
        self._fetched: set[int] = set()
        self._failures = 0
        self._since_failure = 0
        """Light items since the last time that too many were asked for."""

    def begin(self, first: int, *, stored_from: int) -> None:
        """Start, or start again, at an item.

        Args:
            first: Ordinal of the next item.
            stored_from: The trainer got items ``stored_from`` to ``first - 1`` in full and may have kept them; one that
                was made anew has none, so that both are equal.
        """
        self._sent[:] = False
        self._light.clear()
        self._fetched.clear()
        self._full_until = 0
        epoch = -(-self._sampler.num_samples // self._sampler.batch_size)
        for ordinal in range(max(stored_from, first - 2 * epoch - 1), first):
            self._sent[self._sampler.batch(ordinal)] = True

    def choose(self, ordinal: int) -> bool:
        """Decide on the next item, and note it: True sends it without frames."""
        rows: Int64[Array, " b"] = self._sampler.batch(ordinal)
        if self._is_enabled and ordinal >= self._full_until and bool(self._sent[rows].all()):
            self._light.append(ordinal)
            self._since_failure += 1
            return True
        self._sent[rows] = True
        return False

    def fetched(self, ordinal: int) -> None:
        """Note that the trainer asked for a light item in full; an ordinal that was not light is ignored."""
        if ordinal not in self._light or ordinal in self._fetched:
            return
        self._fetched = {each for each in self._fetched if each >= self._light[0]} | {ordinal}
        window = [each for each in self._light if each <= ordinal][-WINDOW:]
        count = sum(each in self._fetched for each in window)
        if count >= max(LEAST_FETCHED, LARGEST_SHARE * len(window)):
            self._pause()

    def _pause(self) -> None:
        """Go in full for a while; longer where the last try failed as well."""
        num_samples, batch_size = self._sampler.num_samples, self._sampler.batch_size
        held = self._since_failure * batch_size >= num_samples + 2 * WINDOW * batch_size
        self._failures = 1 if held else self._failures + 1
        epochs = min(2 ** (self._failures - 1), LONGEST_PAUSE)
        self._full_until = self._light[-1] + 1 + -(-epochs * num_samples // batch_size)
        self._since_failure = 0
        self._sent[:] = False
        self._light.clear()
        self._fetched.clear()
