"""What a tenant's learner asks of the trainer: the product's learners without their numbers.

They keep the product's rules of order and room (:mod:`joynexus.training.learners`): SFT micro-batches strictly in the
order of their ordinals, a few ahead; PPO takes whole episodes until it has an iteration's worth, then makes
``num_epochs`` passes of minibatches and takes nothing meanwhile.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from benchmarks.simulation.store import BlockKey
from benchmarks.simulation.workload import BLOCK_ROWS, RlWork, SftWork, Tenant, block_order
from joynexus.types import LaneItem

AHEAD = 4
"""SFT micro-batches that wait beside the one under way; the product's number."""
MAX_STALENESS = 1
"""Versions; the product's default."""


@dataclass(kw_only=True, slots=True)
class Call:
    """One training call: rows that need features, then one tenant's loss, backward and optimizer step."""

    tenant: str
    blocks: tuple[tuple[BlockKey, int], ...]
    """What to look up, with the rows of each."""
    rows: int
    is_carried: bool
    """Whether the features came along, so that nothing is looked up or encoded."""
    ready_at: float
    """When it could have been served first."""


class Learner(Protocol):
    """What the trainer needs of a learner."""

    trained: "Counter[BlockKey]"
    """Rows trained, by block: every block counts its rows once per epoch."""
    trained_rows: int
    version: int

    def room(self) -> int:
        """Items that it can use now."""
        ...

    def offer(self, item: LaneItem, now: float) -> None:
        """Take an item."""
        ...

    def head(self) -> Call | None:
        """The call that waits; the same one until it is answered."""
        ...

    def on_result(self, now: float) -> list[str]:
        """Count the head as done; return the items that are used up."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether all is done."""
        ...


class SftLearner:
    """Micro-batch after micro-batch."""

    def __init__(self, tenant: Tenant, work: SftWork) -> None:
        self._tenant = tenant
        self._work = work
        self._waiting: dict[int, str] = {}
        self._next = 0
        self._head: Call | None = None
        self._order: tuple[int, list[int]] = (-1, [])
        self.trained: Counter[BlockKey] = Counter()
        self.trained_rows = 0
        self.version = 0

    def room(self) -> int:
        """Micro-batches beside those that wait."""
        left = self._work.num_steps - self._next - len(self._waiting)
        return max(0, min(left, AHEAD + 1 - len(self._waiting)))

    def offer(self, item: LaneItem, now: float) -> None:
        """Keep a micro-batch for its turn."""
        self._waiting[item.ordinal] = item.item_id
        self._make_head(now)

    def head(self) -> Call | None:
        """The next micro-batch, if it is here."""
        return self._head

    def on_result(self, now: float) -> list[str]:
        """Go on to the next micro-batch."""
        assert self._head is not None
        for key, rows in self._head.blocks:
            self.trained[key] += rows
        self.trained_rows += self._head.rows
        used = self._waiting.pop(self._next)
        self._next += 1
        self._head = None
        self._make_head(now)
        return [used]

    @property
    def is_finished(self) -> bool:
        """Whether all micro-batches are done."""
        return self._next >= self._work.num_steps

    def _make_head(self, now: float) -> None:
        if self._head is None and self._next in self._waiting:
            blocks = self.blocks(self._next)
            self._head = Call(
                tenant=self._tenant.name, blocks=blocks, rows=self._work.batch_rows, is_carried=False, ready_at=now
            )

    def blocks(self, ordinal: int) -> tuple[tuple[BlockKey, int], ...]:
        """Return the blocks of a micro-batch; a batch may span two epochs."""
        work, per_epoch = self._work, self._work.dataset_rows // BLOCK_ROWS
        place = f"{self._tenant.signature}/{work.dataset}"
        found: list[tuple[BlockKey, int]] = []
        first = ordinal * work.blocks_per_batch
        for index in range(first, first + work.blocks_per_batch):
            epoch, position = divmod(index, per_epoch)
            if self._order[0] != epoch:
                self._order = (epoch, block_order(work, self._tenant.seed, epoch))
            found.append(((place, self._order[1][position]), BLOCK_ROWS))
        return tuple(found)


class RlLearner:
    """Collects an iteration, updates, and so on."""

    def __init__(self, tenant: Tenant, work: RlWork, *, is_carried: bool) -> None:
        self._tenant = tenant
        self._work = work
        self._is_carried = is_carried
        self._waiting: list[LaneItem] = []
        self._used: list[str] = []
        self._left: list[tuple[tuple[BlockKey, int], ...]] = []
        """Minibatches to come, last one first."""
        self._head: Call | None = None
        self.trained: Counter[BlockKey] = Counter()
        self.trained_rows = 0
        self.version = 0
        self.dropped = 0
        """Episodes that were too old."""

    def room(self) -> int:
        """Episodes that the next update lacks; none while one runs."""
        return 0 if self._head is not None or self.is_finished else self._work.episodes - len(self._waiting)

    def offer(self, item: LaneItem, now: float) -> None:
        """Keep an episode, unless it is too old; begin an update once there are enough."""
        if item.policy_version < self.version - MAX_STALENESS:
            self.dropped += 1
            return
        self._waiting.append(item)
        if self._head is None and len(self._waiting) >= self._work.episodes:
            self._begin(now)

    def head(self) -> Call | None:
        """The present minibatch."""
        return self._head

    def on_result(self, now: float) -> list[str]:
        """Go on to the next minibatch; the last one makes a version."""
        assert self._head is not None
        for key, rows in self._head.blocks:
            self.trained[key] += rows
        self.trained_rows += self._head.rows
        if self._left:
            self._make_head(now)
            return []
        self._head = None
        self.version += 1
        used, self._used = self._used, []
        return used

    @property
    def is_finished(self) -> bool:
        """Whether all iterations are done."""
        return self.version >= self._work.num_iterations

    def _begin(self, now: float) -> None:
        items, self._waiting = self._waiting[: self._work.episodes], self._waiting[self._work.episodes :]
        self._used = [item.item_id for item in items]
        # Every epoch has the same minibatches: which rows are together does not change what is found or encoded.
        epoch = minibatches(f"{self._tenant.name}/{self.version}", sum(item.cost for item in items), self._work)
        self._left = epoch * self._work.num_epochs
        self._make_head(now)

    def _make_head(self, now: float) -> None:
        blocks = self._left.pop()
        rows = sum(count for _, count in blocks)
        self._head = Call(tenant=self._tenant.name, blocks=blocks, rows=rows, is_carried=self._is_carried, ready_at=now)


def minibatches(place: str, rows: int, work: RlWork) -> list[tuple[tuple[BlockKey, int], ...]]:
    """Cut an iteration's rows into minibatches of blocks."""
    blocks = [((place, start // BLOCK_ROWS), min(BLOCK_ROWS, rows - start)) for start in range(0, rows, BLOCK_ROWS)]
    per_batch = max(1, work.minibatch_rows // BLOCK_ROWS)
    return [tuple(blocks[start : start + per_batch]) for start in range(0, len(blocks), per_batch)]
