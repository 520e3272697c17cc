"""The training runtime: engine, learners, checkpoints and publications of all tenants, driven by one thread.

    loop:  offer(items of the queue) -> fetch what take_incomplete() names -> step() -> acknowledge what it returns
    step:  each tenant's learner gives its next call -> one group step of the engine -> each result is taken in;
           at a boundary: version + 1, checkpoint, publish, and only then are the items acknowledged

Whatever fails in one tenant's learner, data or checkpoint fails that tenant's workload, with the reason in its
progress, and nobody else's. Only ``progress`` and ``usage`` may be called from other threads.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from joynexus.errors import TenantExistsError, TenantNotFoundError
from joynexus.observability.engine_usage import EngineUsage
from joynexus.specs.tenant import RlSpec, SftSpec, TenantSpec
from joynexus.training.engine import TrainingEngine
from joynexus.training.export import write_export
from joynexus.training.run_folder import RunFolder
from joynexus.training.tenant_run import TenantRun
from joynexus.types import LaneItem, PolicySnapshot, PolicyStats, TrainingCall, TrainingResult, WorkloadProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one step of the runtime did."""

    did_work: bool
    """Whether a call was answered; if not, the loop may sleep until items or calls come."""
    hold_s: float | None
    """For how long a group is put off for further members: sleep no longer; None if none is."""
    acknowledged: list[str]
    """Items that the queue can forget: their effect is in a durable checkpoint."""
    versions: dict[str, int]
    """Tenants with a new policy version."""
    oldest_useful: dict[str, int]
    """Of those tenants, the lowest version that is still learnt from: the queue can drop what is older."""
    results: dict[str, TrainingResult]
    """Of each tenant's learner, the call that was answered."""
    progress: dict[str, WorkloadProgress]
    """Of each tenant whose optimizer step (SFT) or iteration (RL) ended."""


class TrainingRuntime:
    """All tenants of one training engine."""

    def __init__(
        self, engine: TrainingEngine, *, publish: Callable[[PolicySnapshot], None], keep_checkpoints: int
    ) -> None:
        """Start without tenants.

        Args:
            engine: Without slots; nobody else drives it.
            publish: Called with each new version, on the thread of the runtime; if it raises, it is called again with
                that version at the next step.
            keep_checkpoints: Newest checkpoints kept per tenant; at least 1.
        """
        self._engine = engine
        self._publish = publish
        self._keep = keep_checkpoints
        self._runs: dict[str, TenantRun] = {}

    # ---- tenants

    def open_tenant(self, spec: TenantSpec, folder: Path, stats: PolicyStats | None) -> PolicyStats | None:
        """Give a tenant its slot, resume it from the folder's newest good checkpoint, and publish its versions.

        Published are version 0 and, in a resumed run, the newest. Harmless when repeated with the same spec.

        Args:
            spec: The tenant.
            folder: Of this run of this tenant alone; the same one after a restart.
            stats: Statistics to normalise with; a resumed run keeps those of its checkpoint.

        Returns:
            The statistics that the policy does normalise with.

        Raises:
            TenantExistsError: If a tenant of this name is open with another spec.
            AdmissionError: If no slot or not enough memory is free.
            SpecError: If the policy can't be built.
            CheckpointError: If there are checkpoints and none can be used. A failed open leaves nothing behind.
        """
        known = self._runs.get(spec.tenant)
        if known is not None:
            if known.is_of(spec, folder):
                return known.stats
            raise TenantExistsError(f"tenant {spec.tenant!r}: is open with another spec. Close it first.")
        self._engine.open_slot(
            spec.tenant, spec.policy, seed=spec.seed, weight=spec.weight, priority=spec.priority, stats=stats
        )
        try:
            run = TenantRun(spec, self._engine, RunFolder(folder, num_kept=self._keep), self._publish)
        except BaseException:
            self._engine.close_slot(spec.tenant)
            raise
        self._runs = {**self._runs, spec.tenant: run}
        run.publish_all()
        return run.stats

    def close_tenant(self, tenant: str) -> None:
        """Free a tenant's slot and forget it; its files stay.

        Raises:
            TenantNotFoundError: If it is not open.
        """
        self._run(tenant)
        self._runs = {name: run for name, run in self._runs.items() if name != tenant}
        self._engine.close_slot(tenant)

    def start_workload(self, tenant: str, index: int, workload: SftSpec | RlSpec | None = None) -> WorkloadProgress:
        """Begin a training workload, or tell how far it is; harmless when repeated.

        Args:
            tenant: Whose.
            index: Of an ``sft`` or ``rl`` workload.
            workload: What it is; None takes it from the tenant's spec.

        Returns:
            Its progress; ``next_ordinal`` says where the producers have to begin.

        Raises:
            TenantNotFoundError: If the tenant is not open.
            SpecError: If there is no such training workload.
            SequenceConflictError: If another one runs.
        """
        return self._run(tenant).start(index, workload)

    # ---- the loop

    def wanted(self) -> dict[str, int]:
        """Tell how many lane items each tenant's learner can take."""
        return {tenant: 0 if run.workload is None else run.workload.room() for tenant, run in self._runs.items()}

    def offer(self, items: Sequence[LaneItem]) -> list[str]:
        """Hand leased items to the learners.

        Returns:
            Ids of those that are of no use (stale, known already, of a workload that is over): acknowledge them now.
        """
        refused: list[str] = []
        for item in items:
            run = self._runs.get(item.tenant)
            if run is None or run.workload is None or not run.workload.offer(item):
                refused.append(item.item_id)
        return refused

    def take_incomplete(self) -> list[LaneItem]:
        """Return, once, items that came without frames and that the prefix store can't complete.

        Offer each again in full, under the same id: its place is kept, and the learner waits for it.
        """
        runs = [run.workload for run in self._runs.values() if run.workload is not None]
        return [item for run in runs for item in run.take_incomplete()]

    def step(self, *, may_wait: bool = False) -> StepOutcome:
        """Run one group step.

        Args:
            may_wait: Whether a group may be put off for further members; the caller then has to come back after
                ``hold_s``, and may do so earlier.
        """
        runs = list(self._runs.values())
        for run in runs:
            run.publish_pending()
            if run.workload is not None:
                run.workload.submit_next()
        answered = self._engine.step(may_wait=may_wait)
        advances = {run.tenant: run.advance() for run in runs}
        changed = {tenant: each for tenant, each in advances.items() if each.version is not None}
        return StepOutcome(
            did_work=answered > 0,
            hold_s=self._engine.hold_s,
            acknowledged=[item for each in advances.values() for item in each.settled],
            versions={tenant: each.version for tenant, each in changed.items() if each.version is not None},
            oldest_useful={tenant: each.oldest_useful for tenant, each in changed.items()},
            results={tenant: each.result for tenant, each in advances.items() if each.result is not None},
            progress={tenant: each.progress for tenant, each in advances.items() if each.progress is not None},
        )

    # ---- the tenants' low-level calls

    def submit(self, call: TrainingCall) -> Future[TrainingResult]:
        """Queue a tenant's own training call; see :meth:`joynexus.training.engine.TrainingEngine.submit`.

        Raises:
            TenantNotFoundError: If the tenant is not open.
            SequenceConflictError: If a workload of the tenant runs: its learner numbers the calls.
        """
        self._run(call.tenant).check_idle(f"call {call.sequence}")
        return self._engine.submit(call)

    def next_sequence(self, tenant: str) -> int:
        """Return the number that the tenant's next call must have."""
        return self._engine.status(tenant).next_sequence

    def version(self, tenant: str) -> int:
        """Return the tenant's newest version."""
        return self._engine.status(tenant).version

    def sync_weights(self, tenant: str) -> int:
        """Make a tenant's present parameters a new policy version: durable, then published.

        Returns:
            The version.

        Raises:
            TenantNotFoundError: If the tenant is not open.
            SequenceConflictError: If a workload runs: it publishes by itself.
            CheckpointError: If the disk refuses.
        """
        return self._run(tenant).sync_weights()

    def save_state(self, tenant: str, name: str) -> Path:
        """Write a tenant's slot under a name; a state of that name is replaced.

        Returns:
            Its folder.
        """
        return self._engine.save_state(tenant, self._run(tenant).folder.state(name))

    def load_state(self, tenant: str, name: str) -> None:
        """Take a tenant's slot to a named state; what the replicas serve changes with the next ``sync_weights``.

        Raises:
            CheckpointError: If there is none, or it is damaged.
            SequenceConflictError: If a workload runs.
        """
        run = self._run(tenant)
        run.check_idle("load_state")
        self._engine.load_state(tenant, run.folder.state(name))

    def export(self, tenant: str, folder: Path) -> Path:
        """Write a tenant's present policy for use elsewhere: safetensors and JSON, this tenant's tensors alone."""
        signature = self._engine.status(self._run(tenant).tenant).signature
        return write_export(folder, self._engine.snapshot(tenant), signature=signature)

    # ---- what is going on

    def republish(self) -> None:
        """Publish every tenant's base and newest version again, for a store that lost them."""
        for run in self._runs.values():
            run.publish_all()

    def progress(self) -> dict[str, WorkloadProgress]:
        """Tell how far each tenant's newest training workload is."""
        return {tenant: run.progress for tenant, run in self._runs.items() if run.progress is not None}

    def usage(self) -> EngineUsage:
        """Tell what the engine did so far, and for whom."""
        return self._engine.usage()

    def checksum(self) -> str:
        """Hash of the backbone's weights: it never changes."""
        return self._engine.checksum()

    def _run(self, tenant: str) -> TenantRun:
        run = self._runs.get(tenant)
        if run is None:
            raise TenantNotFoundError(f"tenant {tenant!r}: is not open in this runtime. Open it first.")
        return run
