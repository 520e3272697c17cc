"""The contract of a learner: a workload's rule for turning lane items into training calls.

    offer(item) ... next_call() -> call -> engine -> on_result(result) -> Boundary ... take_settled() -> acknowledge

A learner holds plain data and no tensors of the module. It has one call under way at a time. Its ``state`` is asked
for at its start and at its boundaries alone, holds all that decides what comes next, and is stored with the slot's:
after a crash, slot and learner come back from one and the same moment, and items that come again are known again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.tenant import TenantSpec
from joynexus.training.json_values import JsonObject
from joynexus.types import LaneItem, Loss, TrainingBatch, TrainingResult, WorkloadProgress

OfferAnswer = Literal["ok", "stale", "duplicate"]
"""``ok``: the learner keeps the item. Otherwise it has no use for it, and the item can be acknowledged at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerCall:
    """A training call without tenant and sequence number, which the runtime adds."""

    batch: TrainingBatch | None = None
    item_id: str | None = None
    """The lane item whose payload the batch is, unchanged; only such an item may come without frames."""
    loss: Loss | None = None
    optimizer: OptimizerSpec | None = None
    schedule_steps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What has to happen after a result, before the learner goes on. A publication is always checkpointed first."""

    publish: bool = False
    """The parameters are a new policy version."""
    checkpoint: bool = False
    """They have to be made durable, with the learner's state; the items that went into them are settled then."""


class Learner(ABC):
    """One training workload of one tenant.

    A third party's algorithm names its learner in its spec's ``implementation``.
    """

    names_items: ClassVar[bool] = False
    """Whether each call's batch is one lane item, named in its ``item_id``: its items may come without frames."""

    def __init__(self, tenant: TenantSpec, workload_index: int) -> None:
        """Start at the workload's beginning.

        Args:
            tenant: The tenant's spec.
            workload_index: Which of its workloads.
        """
        self.tenant = tenant
        self.workload_index = workload_index
        self.version = 0
        """The trainer's policy version; the runtime keeps it up to date."""
        self._settled: list[str] = []

    @abstractmethod
    def room(self) -> int:
        """How many further items it can use now."""

    @abstractmethod
    def offer(self, item: LaneItem) -> OfferAnswer:
        """Take an item, or say why not. Items beyond :meth:`room` are taken too.

        Raises:
            InvalidBatchError: If the item is not what the workload needs.
        """

    @abstractmethod
    def next_call(self) -> LearnerCall | None:
        """Return the next training call; None while it waits for items or for a result."""

    @abstractmethod
    def on_result(self, result: TrainingResult) -> Boundary:
        """Take in the result of the call that is under way."""

    @abstractmethod
    def progress(self) -> WorkloadProgress:
        """Tell how far the workload is."""

    @abstractmethod
    def state(self) -> JsonObject:
        """Return what :meth:`restore` needs, as plain values."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; only on a new learner of the same workload."""

    def oldest_useful(self) -> int:
        """Return the lowest policy version whose samples it still learns from."""
        return 0

    def take_settled(self) -> list[str]:
        """Return, once, the items that are done with; called when a checkpoint with their effect is durable."""
        settled, self._settled = self._settled, []
        return settled

    def settle(self, item_id: str) -> None:
        """Note an item whose effect is in the parameters, or that was dropped."""
        self._settled.append(item_id)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not finite: metrics go into checkpoints, which hold finite numbers only."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
