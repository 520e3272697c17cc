"""A workload that runs: its learner, its call under way, and the boundary that its faults can't cross."""

import dataclasses
import logging
import math
from concurrent.futures import Future

from joynexus.specs.registry import load_implementation
from joynexus.specs.tenant import RlSpec, TenantSpec
from joynexus.training.ahead import Ahead
from joynexus.training.engine import TrainingEngine
from joynexus.training.learners.base import Learner, LearnerCall
from joynexus.training.learners.sft import SftLearner
from joynexus.training.light_items import LightItems
from joynexus.types import LaneItem, TrainingBatch, TrainingCall, TrainingResult, WorkloadProgress

log = logging.getLogger(__name__)


class WorkloadRun:
    """One tenant's training workload. Whatever the learner raises ends the workload, with the reason, and no more."""

    def __init__(self, learner: Learner, engine: TrainingEngine) -> None:
        self.learner = learner
        self.index = learner.workload_index
        self.progress: WorkloadProgress = learner.progress()
        """Newest; replaced as a whole, so that other threads can read it."""
        self._tenant = learner.tenant.tenant
        self._engine = engine
        self._under_way: Future[TrainingResult] | None = None
        self._call: LearnerCall | None = None
        """The learner's call that is under way, or that waits for its item's frames."""
        self._light = LightItems(engine.hold) if learner.names_items else None
        self._ahead: dict[str, Ahead] = {}
        """Rows that are made before their call, by item."""

    @property
    def is_busy(self) -> bool:
        """Whether it is neither finished nor failed."""
        return not self.progress.finished and self.progress.error is None

    def room(self) -> int:
        """How many lane items the learner can take."""
        if not self.is_busy:
            return 0
        try:
            return self.learner.room()
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self.fail(error)
            return 0

    def offer(self, item: LaneItem) -> bool:
        """Hand an item to the learner; False if there is no use for it, so that it can be acknowledged."""
        if not self.is_busy:
            return False
        try:
            if self._light is not None and self._light.complete(item):
                self._prepare(item)
                return True
            is_taken = self.learner.offer(item) == "ok"
            if is_taken and self._light is not None:
                self._light.take(item)
                self._prepare(item)
            self.look()
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self.fail(error)
            return False
        return is_taken

    def _prepare(self, item: LaneItem) -> None:
        """Let the rows of an item be made while other groups are computed: its call's batch will be its payload."""
        if isinstance(item.payload, TrainingBatch):
            ahead = self._engine.prepare_ahead(self._tenant, item.payload)
            if ahead is not None:
                self._ahead[item.item_id] = ahead

    def submit_next(self) -> None:
        """Give the engine the learner's next call, if there is one and none is under way."""
        if not self.is_busy or self._under_way is not None:
            return
        try:
            self._call = self._call or self.learner.next_call()
            if self._call is not None:
                self._submit(self._call)
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self.fail(error)

    def _submit(self, call: LearnerCall) -> None:
        batch, features = call.batch, None
        if self._light is not None and call.item_id is not None:
            ready = self._light.ready(call.item_id)
            if ready is None:
                return
            batch, features = ready
        self._under_way = self._engine.submit(
            TrainingCall(
                tenant=self._tenant,
                sequence=self._engine.status(self._tenant).next_sequence,
                batch=batch,
                loss=call.loss,
                optimizer=call.optimizer,
                schedule_steps=call.schedule_steps,
            ),
            is_repeatable=False,
            features=features,
            sample_keys=None if self._light is None else self._light.sample_keys,
            ahead=None if features is not None or call.item_id is None else self._ahead.get(call.item_id),
        )

    def take_incomplete(self) -> list[LaneItem]:
        """Return, once, the items without frames that the prefix store can't complete: to be offered again in full."""
        return [] if self._light is None or not self.is_busy else self._light.take_incomplete()

    def take_answer(self) -> Future[TrainingResult] | None:
        """Return the future of the call under way once it is answered; None until then."""
        if self._under_way is None or not self._under_way.done():
            return None
        future, self._under_way = self._under_way, None
        call, self._call = self._call, None
        if self._light is not None and call is not None and call.item_id is not None:
            self._light.done(call.item_id)
            self._ahead.pop(call.item_id, None)
        return future

    def look(self) -> WorkloadProgress:
        """Ask the learner how far it is; a workload that failed stays failed."""
        progress = self.learner.progress()
        metrics = {**progress.metrics, **self._light_metrics()}
        self.progress = dataclasses.replace(progress, metrics=metrics, error=self.progress.error)
        return self.progress

    def _light_metrics(self) -> dict[str, float]:
        """Tell what came without frames; nothing where nothing did."""
        light = self._light
        if light is None or light.found + light.fetched == 0:
            return {}
        seen = self.learner.tenant.policy.observation
        row_bytes = len(seen.cameras) * math.prod(seen.image_size) * 3
        return {
            "light_items": float(light.found + light.fetched),
            "fetched_items": float(light.fetched),
            "saved_bytes": float(light.spared_rows * row_bytes),
        }

    def fail(self, error: Exception) -> None:
        """End the workload, and log why with tenant and version."""
        version = self._engine.status(self._tenant).version
        log.error("tenant %s at version %d: workload %d failed", self._tenant, version, self.index, exc_info=error)
        self.progress = dataclasses.replace(self.progress, error=f"{type(error).__name__}: {error}")


def build_learner(spec: TenantSpec, index: int) -> Learner:
    """Build the learner of a workload: SFT's own, or the one that the algorithm's spec names.

    Raises:
        UnknownComponentError: If the algorithm's implementation can't be imported.
        TypeError: If it is no learner.
    """
    workload = spec.workloads[index]
    if not isinstance(workload, RlSpec):
        return SftLearner(spec, index)
    learner = load_implementation(workload.algorithm)(spec, index)
    if not isinstance(learner, Learner):
        raise TypeError(f"algorithm {workload.algorithm.type!r}: {type(learner).__name__} is no Learner. Derive it.")
    return learner
