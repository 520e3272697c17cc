"""Supervised fine-tuning: micro-batches strictly in the order of their ordinals, each exactly once."""

from collections.abc import Mapping
from typing import Any

from joynexus.errors import InvalidBatchError
from joynexus.specs.tenant import SftSpec, TenantSpec
from joynexus.training.json_values import JsonObject, integer_in, number_in, numbers_in
from joynexus.training.learners.base import Boundary, Learner, LearnerCall, OfferAnswer, finite
from joynexus.types import LaneItem, Loss, TrainingBatch, TrainingResult, WorkloadProgress

AHEAD = 4
"""Micro-batches that wait beside the one under way, so that the trainer does not wait for the queue."""
SUPERVISED = Loss(name="supervised")


class SftLearner(Learner):
    """Learner of an ``sft`` workload.

    Micro-batch ``i`` is the item with ordinal ``i``; out-of-order arrivals wait. ``gradient_accumulation`` of them make
    one optimizer step. Every ``checkpoint_every`` steps, and at the end, the parameters become a new policy version
    and are made durable. An item may come without frames: the runtime finds its features, or asks for it in full.
    """

    names_items = True

    def __init__(self, tenant: TenantSpec, workload_index: int) -> None:
        super().__init__(tenant, workload_index)
        spec = tenant.workloads[workload_index]
        assert isinstance(spec, SftSpec)
        self._spec = spec
        self._total = spec.num_steps * spec.gradient_accumulation
        self._next = 0
        """Ordinal of the first micro-batch without effect."""
        self._waiting: dict[int, LaneItem] = {}
        self._under_way: LaneItem | None = None
        self._steps = 0
        self._losses: list[float] = []
        """Of the micro-batches of the present optimizer step."""
        self._loss_first: float | None = None
        self._loss_last: float | None = None
        self._metrics: dict[str, float] = {}

    def room(self) -> int:
        """How many further micro-batches it can use; at least the next one, whatever waits already."""
        left = self._total - self._next - len(self._waiting)
        ahead = AHEAD + self._spec.gradient_accumulation - len(self._waiting)
        starving = self._next not in self._waiting and self._under_way is None
        return max(min(left, max(ahead, int(starving))), 0)

    def offer(self, item: LaneItem) -> OfferAnswer:
        """Keep a micro-batch for its turn."""
        if not isinstance(item.payload, TrainingBatch):
            raise InvalidBatchError(
                f"tenant {item.tenant!r}: item {item.item_id!r} is a {type(item.payload).__name__}, "
                "workload 'sft' needs a TrainingBatch. Put demonstrations into its lane."
            )
        if item.workload != self.workload_index or item.ordinal >= self._total:
            return "stale"
        if item.ordinal < self._next or item.ordinal in self._waiting:
            return "duplicate"
        self._waiting[item.ordinal] = item
        return "ok"

    def next_call(self) -> LearnerCall | None:
        """Return the next micro-batch; the last one of an optimizer step brings the optimizer."""
        item = self._waiting.get(self._next)
        if self._under_way is not None or item is None:
            return None
        assert isinstance(item.payload, TrainingBatch)
        self._under_way = item
        closes = (self._next + 1) % self._spec.gradient_accumulation == 0
        return LearnerCall(
            batch=item.payload,
            item_id=item.item_id,
            loss=SUPERVISED,
            optimizer=self._spec.optimizer if closes else None,
            schedule_steps=self._spec.num_steps,
        )

    def on_result(self, result: TrainingResult) -> Boundary:
        """Count the micro-batch, and the optimizer step if this was its last one."""
        assert self._under_way is not None
        del self._waiting[self._next]
        self.settle(self._under_way.item_id)
        self._under_way = None
        self._next += 1
        if "loss" in result.metrics:
            self._losses.append(result.metrics["loss"])
        if self._next % self._spec.gradient_accumulation:
            return Boundary()
        self._steps += 1
        self._note(result)
        due = self._steps % self.tenant.checkpoint_every == 0 or self._steps == self._spec.num_steps
        return Boundary(publish=due, checkpoint=due)

    def progress(self) -> WorkloadProgress:
        """Tell how far the workload is."""
        received = self._next
        while received in self._waiting:
            received += 1
        return WorkloadProgress(
            tenant=self.tenant.tenant,
            workload=self.workload_index,
            kind="sft",
            steps=self._steps,
            iterations=self._steps,
            target=self._spec.num_steps,
            next_ordinal=received,
            policy_version=self.version,
            loss_first=self._loss_first,
            loss_last=self._loss_last,
            metrics=dict(self._metrics),
            finished=self._steps >= self._spec.num_steps,
        )

    def state(self) -> JsonObject:
        """Return the cursor; micro-batches that wait come again."""
        return {
            "next": self._next,
            "steps": self._steps,
            "loss_first": self._loss_first,
            "loss_last": self._loss_last,
            "metrics": dict(self._metrics),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last micro-batch that had an effect."""
        self._next, self._steps = integer_in(state, "next"), integer_in(state, "steps")
        self._loss_first = number_in(state, "loss_first")
        self._loss_last = number_in(state, "loss_last")
        self._metrics = numbers_in(state, "metrics")

    def _note(self, result: TrainingResult) -> None:
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses = []
        if loss is not None:
            self._loss_first = loss if self._loss_first is None else self._loss_first
            self._loss_last = loss
        self._metrics = finite({**result.metrics, **({} if loss is None else {"loss": loss})})
