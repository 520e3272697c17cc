"""One tenant's run inside the training runtime: its workload, its checkpoints, its publications.

The order at a boundary is what makes a crash harmless:

    version + 1  ->  checkpoint (slot and learner, durable)  ->  publish  ->  acknowledge the items that went into it

A crash before the checkpoint forgets the work, and its items come again. A crash after it repeats the publication,
bit for bit, and the items that come again are known. A published version never changes.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from joynexus.errors import CheckpointError, SequenceConflictError, SpecError
from joynexus.specs.tenant import EvaluationSpec, RlSpec, SftSpec, TenantSpec
from joynexus.training.engine import TrainingEngine
from joynexus.training.json_values import JsonObject
from joynexus.training.learners.base import Boundary
from joynexus.training.publications import Publications
from joynexus.training.run_folder import RunFolder
from joynexus.training.workload_run import WorkloadRun, build_learner
from joynexus.types import PolicySnapshot, PolicyStats, TrainingResult, WorkloadProgress

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


@dataclass(kw_only=True, slots=True)
class SavedWorkload:
    """The newest workload as it was at its last checkpoint."""

    index: int = -1
    """-1 before the first."""
    state: JsonObject | None = None
    """The learner's."""
    error: str | None = None
    is_over: bool = True


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
        self.workload: WorkloadRun | None = None
        self._engine = engine
        self._publications = Publications(publish)
        self._saved = SavedWorkload()
        self.stats: PolicyStats | None = None
        """What the policy normalises with: a checkpoint's, those of ``init_from``, or the dataset's, in this order."""
        self._published_steps = 0
        """Optimizer steps in the newest version."""
        self._resume()

    def is_of(self, spec: TenantSpec, folder: Path) -> bool:
        """Whether it is the run of this tenant in this folder; workloads may have come since it was opened."""
        return self.folder.folder == folder and self.spec == spec.model_copy(update={"workloads": self.spec.workloads})

    @property
    def progress(self) -> WorkloadProgress | None:
        """How far the newest workload is; None before the first."""
        return None if self.workload is None else self.workload.progress

    def check_idle(self, what: str) -> None:
        """Refuse what would disturb a running workload.

        Raises:
            SequenceConflictError: If one runs.
        """
        if self.workload is not None and self.workload.is_busy:
            raise SequenceConflictError(
                f"tenant {self.tenant!r}: {what} while workload {self.workload.index} runs. Wait for its end."
            )

    # ---- versions

    def publish_all(self) -> None:
        """Publish the base and the newest version, again if need be."""
        base = self._engine.base_snapshot(self.tenant)
        self.stats = base.stats
        self._publications.publish(base)
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
        version = self._engine.advance_version(self.tenant)
        self._save(is_published=True)
        self._publish()
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
        if index < self._saved.index:
            return self._ended(spec, index)
        if self.workload is None or index > self.workload.index:
            self.check_idle(f"start_workload {index}")
            self.workload = self._begin(spec, index)
        return self.workload.progress

    def advance(self) -> Advance:
        """Take in the answer to the learner's call, if it is there, and do what is due at its boundary."""
        workload = self.workload
        answered = None if workload is None else workload.take_answer()
        if workload is None or answered is None:
            return Advance()
        try:
            before, result = workload.progress.iterations, answered.result()
            boundary = workload.learner.on_result(result)
            progress = workload.look()
            advance = self._pass(workload, boundary)
        except Exception as error:  # noqa: BLE001  # the tenant's boundary
            workload.fail(error)
            return Advance()
        advance.result = result
        advance.progress = workload.progress if progress.iterations > before else None
        return advance

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

    def _begin(self, spec: TenantSpec, index: int) -> WorkloadRun:
        learner = build_learner(spec, index)
        learner.version = self._engine.status(self.tenant).version
        if index == self._saved.index and self._saved.state is not None:
            learner.restore(self._saved.state)
        else:
            if not self._saved.is_over:
                log.warning("tenant %s: workload %d begins, %d had not ended", self.tenant, index, self._saved.index)
            self._engine.reset_optimizer(self.tenant)
            self._saved = SavedWorkload(index=index, state=learner.state(), is_over=False)
        begun = WorkloadRun(learner, self._engine)
        begun.progress = dataclasses.replace(begun.progress, error=self._saved.error)
        return begun

    def _ended(self, spec: TenantSpec, index: int) -> WorkloadProgress:
        """Describe a workload that is over, of which nothing else is kept."""
        blank = build_learner(spec, index).progress()
        version = self._engine.status(self.tenant).version
        steps = blank.target if blank.kind == "sft" else blank.steps
        return dataclasses.replace(blank, steps=steps, iterations=blank.target, policy_version=version, finished=True)

    def _pass(self, workload: WorkloadRun, boundary: Boundary) -> Advance:
        """Do what a boundary asks for, in the order that the module describes."""
        if not boundary.publish and not boundary.checkpoint:
            return Advance()
        learner = workload.learner
        if boundary.publish:
            learner.version = self._engine.advance_version(self.tenant)
        progress = workload.look()
        self._saved = SavedWorkload(index=workload.index, state=learner.state(), is_over=progress.finished)
        self._save(is_published=boundary.publish)
        settled = learner.take_settled()
        if not boundary.publish:
            return Advance(settled=settled)
        self._publish()
        return Advance(settled=settled, version=learner.version, oldest_useful=learner.oldest_useful())

    # ---- checkpoints

    def _save(self, *, is_published: bool) -> None:
        status = self._engine.status(self.tenant)
        if is_published:
            self._published_steps = status.optimizer_steps
        if self.workload is not None and self.workload.progress.error is not None:
            self._saved.error, self._saved.is_over = self.workload.progress.error, True
        extra = {**dataclasses.asdict(self._saved), "published_steps": self._published_steps}
        place = self.folder.checkpoint(steps=status.optimizer_steps, version=status.version)
        with self._engine.idle.because("copying"):
            self._engine.save_state(self.tenant, place, extra=extra)
            self.folder.prune()

    def _publish(self) -> None:
        with self._engine.idle.because("copying"):
            self._publications.publish(self._engine.snapshot(self.tenant))

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
            self._published_steps = extra.pop("published_steps")
            self._saved = SavedWorkload(**extra)
            if reasons or self._published_steps != self._engine.status(self.tenant).optimizer_steps:
                self._engine.advance_version(self.tenant, beyond=self.folder.highest_version())
                self._save(is_published=True)
            if self._engine.status(self.tenant).version > 0:
                self._publications.newest = self._engine.snapshot(self.tenant)
            return
        if found:
            raise CheckpointError(
                f"tenant {self.tenant!r}: none of {len(found)} checkpoints can be used. The newest: {reasons[0]} "
                "Restore one, or start the run in a new folder."
            )
