"""One tenant's run inside the training runtime: its learner, its checkpoints, its publications.

The order at a boundary is what makes a crash harmless:

    version + 1  ->  checkpoint (slot and learner, durable)  ->  publish  ->  acknowledge the items that went into it

A crash before the checkpoint forgets the work, and its items come again. A crash after it repeats the publication,
bit for bit, and the items that come again are known. A published version never changes.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joynexus.errors import CheckpointError, SequenceConflictError, SpecError
from joynexus.specs.registry import load_implementation
from joynexus.specs.tenant import EvaluationSpec, RlSpec, SftSpec, TenantSpec
from joynexus.training.engine import TrainingEngine
from joynexus.training.json_values import JsonObject
from joynexus.training.learners.base import Boundary, Learner
from joynexus.training.learners.sft import SftLearner
from joynexus.training.publications import Publications
from joynexus.training.run_folder import RunFolder
from joynexus.types import LaneItem, PolicySnapshot, TrainingCall, TrainingResult, WorkloadProgress

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Advance:
    """What one step changed for a tenant."""

    result: TrainingResult | None = None
    """Of the learner's call, if one was answered."""
    progress: WorkloadProgress | None = None
    """If an optimizer step (SFT) or an iteration (RL) ended."""
    settled: list[str] = field(default_factory=list[str])
    """Items whose effect is in a durable checkpoint, or that were dropped."""
    version: int | None = None
    """The new policy version, if there is one."""
    oldest_useful: int = 0
    """Lowest version that the learner still learns from; only with a new version."""


class TenantRun:
    """A tenant that is open in the runtime. Used by one thread at a time, but for ``progress``."""

    def __init__(
        self, spec: TenantSpec, engine: TrainingEngine, folder: RunFolder, publish: Callable[[PolicySnapshot], None]
    ) -> None:
        """Attach to the tenant's slot, which is open, and resume from the newest good checkpoint, if there is any.

        Raises:
            CheckpointError: If there are checkpoints and none can be used.
        """
        self.spec = spec
        self.tenant = spec.tenant
        self.folder = folder
        self._engine = engine
        self._publications = Publications(publish)
        self._learner: Learner | None = None
        self._under_way: Future[TrainingResult] | None = None
        self._progress: WorkloadProgress | None = None
        """Newest; read by other threads."""
        self._error: str | None = None
        self._workload = -1
        """Newest training workload; in a resumed run, that of the checkpoint, before it is started again."""
        self._learner_state: JsonObject | None = None
        """Of that workload, at its last checkpoint."""
        self._is_finished = True
        """Whether that workload is over, be it failed."""
        self._published_steps = 0
        """Optimizer steps in the newest version."""
        self._resume()

    def is_of(self, spec: TenantSpec, folder: Path) -> bool:
        """Whether it is the run of this tenant in this folder; workloads may have come since it was opened."""
        return self.folder.folder == folder and self.spec == spec.model_copy(update={"workloads": self.spec.workloads})

    # ---- versions

    def publish_all(self) -> None:
        """Publish the base and the newest version, again if need be."""
        self._publications.publish(self._engine.base_snapshot(self.tenant))
        if self._publications.newest is not None:
            self._publications.publish(self._publications.newest)

    def publish_pending(self) -> None:
        """Try again what could not be published."""
        self._publications.retry()

    def sync_weights(self) -> int:
        """Make the present parameters a new version, durable and published.

        Returns:
            The version.
        """
        self.check_idle("sync_weights")
        version = self._new_version()
        self._publications.publish(self._engine.snapshot(self.tenant))
        return version

    # ---- the workload

    def start(self, index: int, workload: SftSpec | RlSpec | None = None) -> WorkloadProgress:
        """Begin a workload, or go on with it; harmless when repeated.

        Args:
            index: Of the workload.
            workload: What it is, where the tenant's spec does not hold it.

        Raises:
            SpecError: If there is no such workload, or it does not train.
            SequenceConflictError: If another one is not finished.
        """
        spec = self._with_workload(index, workload)
        if index < self._workload:
            return self._ended(spec, index)
        if self._learner is None or index > self._workload:
            self.check_idle(f"start_workload {index}")
            self._start(spec, index)
        assert self._progress is not None
        return self._progress

    def room(self) -> int:
        """How many lane items the learner can take."""
        if self._learner is None or not self.is_busy:
            return 0
        try:
            return self._learner.room()
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self._fail(error)
            return 0

    def offer(self, item: LaneItem) -> bool:
        """Hand an item to the learner; False if there is no use for it, so that it can be acknowledged."""
        if self._learner is None or not self.is_busy:
            return False
        try:
            is_taken = self._learner.offer(item) == "ok"
            self._look(self._learner)
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self._fail(error)
            return False
        return is_taken

    def submit_next(self) -> None:
        """Give the engine the learner's next call, if there is one and none is under way."""
        if self._learner is None or self._under_way is not None or not self.is_busy:
            return
        try:
            call = self._learner.next_call()
            if call is not None:
                sequence = self._engine.status(self.tenant).next_sequence
                self._under_way = self._engine.submit(
                    TrainingCall(
                        tenant=self.tenant,
                        sequence=sequence,
                        batch=call.batch,
                        loss=call.loss,
                        optimizer=call.optimizer,
                        schedule_steps=call.schedule_steps,
                    )
                )
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self._fail(error)

    def take_result(self) -> Advance:
        """Take in the result of the call under way, and do what is due at its boundary."""
        if self._learner is None or self._under_way is None or not self._under_way.done():
            return Advance()
        future, self._under_way = self._under_way, None
        try:
            before = 0 if self._progress is None else self._progress.iterations
            result = future.result()
            advance = self._pass(self._learner, self._learner.on_result(result))
            progress = self._look(self._learner)
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            self._fail(error)
            return Advance()
        advance.result = result
        advance.progress = progress if progress.iterations > before else None
        return advance

    @property
    def is_busy(self) -> bool:
        """Whether a workload runs."""
        return self._learner is not None and not self._is_finished

    def check_idle(self, what: str) -> None:
        """Refuse what would disturb a running workload.

        Raises:
            SequenceConflictError: If one runs.
        """
        if self.is_busy:
            raise SequenceConflictError(
                f"tenant {self.tenant!r}: {what} while workload {self._workload} runs. Wait for its end."
            )

    @property
    def progress(self) -> WorkloadProgress | None:
        """How far the newest workload is; None before the first."""
        return self._progress

    # ---- inside

    def _with_workload(self, index: int, workload: SftSpec | RlSpec | None) -> TenantSpec:
        """Return the tenant's spec with this workload in its place; those before it are never looked at."""
        workloads = self.spec.workloads
        if workload is not None:
            filled = (*workloads, *[workload] * (index - len(workloads)))
            return self.spec.model_copy(update={"workloads": (*filled[:index], workload)})
        if not 0 <= index < len(workloads) or isinstance(workloads[index], EvaluationSpec):
            raise SpecError(
                f"tenant {self.tenant!r}: workload {index} is no training workload; its spec has {len(workloads)}. "
                "Give the index of an 'sft' or 'rl' workload, or the workload itself."
            )
        return self.spec

    def _start(self, spec: TenantSpec, index: int) -> None:
        is_resumed = index == self._workload
        if not is_resumed:
            if not self._is_finished:
                before = self._workload
                log.warning("tenant %s: workload %d starts, though %d had not ended", self.tenant, index, before)
            self._engine.reset_optimizer(self.tenant)
            self._error = None
        learner = _build_learner(spec, index)
        learner.version = self._engine.status(self.tenant).version
        if is_resumed and self._learner_state is not None:
            learner.restore(self._learner_state)
        self._workload, self._learner_state = index, learner.state()
        self._learner = learner
        self._look(learner)

    def _ended(self, spec: TenantSpec, index: int) -> WorkloadProgress:
        """Describe a workload that is over, of which nothing else is kept."""
        blank = _build_learner(spec, index).progress()
        version = self._engine.status(self.tenant).version
        steps = blank.target if blank.kind == "sft" else blank.steps
        return dataclasses.replace(blank, steps=steps, iterations=blank.target, policy_version=version, finished=True)

    def _look(self, learner: Learner) -> WorkloadProgress:
        self._progress = dataclasses.replace(learner.progress(), error=self._error)
        self._is_finished = self._progress.finished or self._error is not None
        return self._progress

    def _pass(self, learner: Learner, boundary: Boundary) -> Advance:
        """Do what a boundary asks for, in the order that the module describes."""
        if not boundary.publish and not boundary.checkpoint:
            return Advance()
        if boundary.publish:
            learner.version = self._engine.advance_version(self.tenant)
        self._learner_state = learner.state()
        self._look(learner)
        self._save(is_published=boundary.publish)
        settled = learner.take_settled()
        if boundary.publish:
            self._publications.publish(self._engine.snapshot(self.tenant))
            return Advance(settled=settled, version=learner.version, oldest_useful=learner.oldest_useful())
        return Advance(settled=settled)

    def _new_version(self, *, beyond: int = 0) -> int:
        version = self._engine.advance_version(self.tenant, beyond=beyond)
        if self._learner is not None:
            self._learner.version = version
        self._save(is_published=True)
        return version

    def _save(self, *, is_published: bool) -> None:
        status = self._engine.status(self.tenant)
        if is_published:
            self._published_steps = status.optimizer_steps
        extra: JsonObject = {
            "workload": self._workload,
            "learner": self._learner_state,
            "error": self._error,
            "finished": self._is_finished,
            "published_steps": self._published_steps,
        }
        place = self.folder.checkpoint(steps=status.optimizer_steps, version=status.version)
        self._engine.save_state(self.tenant, place, extra=extra)
        self.folder.prune()

    def _fail(self, error: Exception) -> None:
        version = self._engine.status(self.tenant).version
        log.error("tenant %s at version %d: workload %d failed", self.tenant, version, self._workload, exc_info=error)
        self._error = f"{type(error).__name__}: {error}"
        self._is_finished = True
        if self._progress is not None:
            self._progress = dataclasses.replace(self._progress, error=self._error)

    def _resume(self) -> None:
        """Load the newest good checkpoint. A newer, damaged one has used up its version."""
        self.folder.remove_leftovers()
        found, reasons = self.folder.newest_first(), list[str]()
        for place in found:
            try:
                extra = self._engine.load_state(self.tenant, place)
            except CheckpointError as error:
                log.warning("tenant %s: checkpoint left out, trying the one before it: %s", self.tenant, error)
                reasons.append(str(error))
                continue
            self._take_over(extra)
            status = self._engine.status(self.tenant)
            if reasons or self._published_steps != status.optimizer_steps:
                self._new_version(beyond=self.folder.highest_version())
            if self._engine.status(self.tenant).version > 0:
                self._publications.newest = self._engine.snapshot(self.tenant)
            return
        if found:
            raise CheckpointError(
                f"tenant {self.tenant!r}: none of {len(found)} checkpoints can be used. The newest: {reasons[0]} "
                "Restore one, or start the run in a new folder."
            )

    def _take_over(self, extra: Mapping[str, Any]) -> None:
        workload, state, steps = extra.get("workload"), extra.get("learner"), extra.get("published_steps")
        self._workload = workload if isinstance(workload, int) else -1
        self._learner_state = state if isinstance(state, dict) else None
        self._published_steps = steps if isinstance(steps, int) else 0
        self._is_finished = extra.get("finished") is True
        error = extra.get("error")
        self._error = error if isinstance(error, str) else None


def _build_learner(spec: TenantSpec, index: int) -> Learner:
    workload = spec.workloads[index]
    if isinstance(workload, RlSpec):
        learner = load_implementation(workload.algorithm)(spec, index)
        assert isinstance(learner, Learner), f"{workload.algorithm.type}: its implementation is no Learner"
        return learner
    return SftLearner(spec, index)
