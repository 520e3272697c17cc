"""Items that came without frames: found in the prefix store, or asked for in full.

    light item ──> every row in the store ────────────────────────> its features are held until its call is answered
               ├─> what is missing comes with an earlier full item ─> looked at again when that one is done
               └─> else ──> asked for in full ──> the full item takes its place, under the same id

The learner keeps the light item meanwhile, in its order; only the call made of it waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from joynexus.models.prefix import PrefixFeatures
from joynexus.training.sample_keys import SampleKeys
from joynexus.types import LaneItem, TrainingBatch

Hold = Callable[[Sequence[bytes]], list[PrefixFeatures | None]]
"""Finds rows of the prefix store by their keys."""


@dataclass(kw_only=True, slots=True)
class _Taken:
    """An item that the learner has, until its call is answered."""

    item: LaneItem
    batch: TrainingBatch
    features: list[PrefixFeatures] | None = None
    """Of each row, once all were found."""
    is_asked: bool = False
    """Whether it was, or will be, asked for in full."""

    @property
    def is_complete(self) -> bool:
        return self.features is not None or self.batch.observation.has_frames

    @property
    def will_be_encoded(self) -> bool:
        """Whether its rows will be in the store when it is done, as far as that has room."""
        return self.is_asked or self.batch.observation.has_frames


class LightItems:
    """The items of one workload. Used by the thread of the runtime alone."""

    def __init__(self, hold: Hold) -> None:
        self.sample_keys = SampleKeys()
        """What the workload's own full items taught."""
        self.found = 0
        """Light items that needed no frames."""
        self.fetched = 0
        """Light items that were asked for in full."""
        self.spared_rows = 0
        """Rows whose frames were not needed."""
        self._hold = hold
        self._taken: dict[str, _Taken] = {}
        self._incomplete: list[LaneItem] = []

    def take(self, item: LaneItem) -> None:
        """Note an item that the learner keeps."""
        if isinstance(item.payload, TrainingBatch):
            self._taken[item.item_id] = _Taken(item=item, batch=item.payload)
            self.look()

    def complete(self, item: LaneItem) -> bool:
        """Put a full item in the place of the light one of its id; False if none waits for it."""
        taken = self._taken.get(item.item_id)
        if taken is None or taken.is_complete or not isinstance(item.payload, TrainingBatch):
            return False
        if item.payload.observation.has_frames:
            taken.batch = item.payload
        return taken.is_complete

    def look(self) -> None:
        """Decide on the light items that can be decided on now."""
        for taken in sorted(self._taken.values(), key=lambda each: each.item.ordinal):
            if not taken.is_complete and not taken.is_asked:
                self._decide(taken)

    def ready(self, item_id: str) -> tuple[TrainingBatch, list[PrefixFeatures] | None] | None:
        """Return an item's rows, and their features where it has no frames; None while it is incomplete."""
        taken = self._taken[item_id]
        return (taken.batch, taken.features) if taken.is_complete else None

    def done(self, item_id: str) -> None:
        """Forget an item whose call was answered; what waited for its rows is decided."""
        self._taken.pop(item_id, None)
        self.look()

    def take_incomplete(self) -> list[LaneItem]:
        """Return, once, the light items that have to be asked for in full."""
        incomplete, self._incomplete = self._incomplete, []
        return incomplete

    def _decide(self, taken: _Taken) -> None:
        samples = taken.batch.sample_ids
        keys = self.sample_keys.find(samples)
        rows = dict(zip(keys, self._hold(list(keys.values())), strict=True))
        found = {sample: row for sample, row in rows.items() if row is not None}
        missing = set(samples) - found.keys()
        if not missing:
            taken.features = [found[sample] for sample in samples]
            self.found += 1
            self.spared_rows += len(samples)
        elif not missing <= self._coming_before(taken.item.ordinal):
            taken.is_asked = True
            self.fetched += 1
            self._incomplete.append(taken.item)

    def _coming_before(self, ordinal: int) -> set[str]:
        """Samples that items before this one will bring into the store."""
        before = [each for each in self._taken.values() if each.item.ordinal < ordinal and each.will_be_encoded]
        return {sample for each in before for sample in each.batch.sample_ids}
