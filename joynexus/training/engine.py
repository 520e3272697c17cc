"""The training engine: many tenants' slots beside one frozen backbone. No Ray.

    submit (any thread)                 step (one thread, again and again)
      check, digest; a thread beside      optimizer-only heads: applied at once
      makes its rows' prefixes and keys
      slot.calls <- call                  batch heads of one signature, chosen fairly, up to max_group_samples:
      Future -------------------.           (or wait a moment for more of them, where that saves a forward)
                                |           prepare each -> one backbone pass over what the store lacks
                                |           each tenant, cheapest first: loss, gradient, commit
                                `--------------------------------------------------> its Future is set at once

Who owns what: the table's lock guards the list of slots and the fair shares, a slot's lock guards everything in that
slot. Locks are taken in this order, held for the length of a copy or an optimizer step, and never during a forward.
Only the thread in ``step`` runs modules and touches the prefix store.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from joynexus.errors import InvalidBatchError, TenantNotFoundError
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import tokenize
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.prefix_store import PrefixStore
from joynexus.observability.device_clock import device_cores
from joynexus.observability.engine_usage import EngineLedger, EngineUsage
from joynexus.observability.group_log import GroupColumns
from joynexus.observability.idle_clock import IdleClock
from joynexus.scheduling.fairness import Priority
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.service import TrainingSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.training.ahead import MAX_AHEAD, Ahead, Preparer
from joynexus.training.json_values import JsonObject
from joynexus.training.runner import GroupRunner
from joynexus.training.sample_keys import SampleKeys
from joynexus.training.slot import SlotStatus, TrainingSlot, base_snapshot
from joynexus.training.slot_state import load_slot, save_slot
from joynexus.training.slot_table import SlotTable
from joynexus.training.validation import check_call, check_held, payload_digest
from joynexus.types import PolicySnapshot, PolicyStats, TrainingBatch, TrainingCall, TrainingResult

STEP_WAIT_S = 1.0
"""How long ``step`` waits for a slot that is being closed; a second thread in ``step`` holds on for longer."""
NOT_REPEATABLE = b""
"""Digest of a call that its caller never sends again."""


class TrainingEngine:
    """Trains the action modules of many tenants, each exactly as if it were alone."""

    def __init__(self, backbone: Backbone, spec: TrainingSpec, *, backbone_name: str) -> None:
        """Start without tenants.

        Args:
            backbone: Frozen; shared by all slots.
            spec: Slots, memory and group size.
            backbone_name: Its name in the service; policies for another one are refused.
        """
        self._backbone = backbone
        self._ledger = EngineLedger(num_cores=device_cores(backbone.device))
        self._store = PrefixStore(spec.prefix_store)
        self._runner = GroupRunner(backbone, self._store, self._ledger)
        self._preparer = Preparer()
        self._table = SlotTable(backbone, spec, self._ledger, backbone_name=backbone_name)
        self._stepping = threading.Lock()

    @staticmethod
    def load(backbone: BackboneSpec, spec: TrainingSpec, *, backbone_name: str) -> "TrainingEngine":
        """Load the backbone, on the accelerator if the spec reserves one, and set the number of threads."""
        torch.set_num_threads(spec.num_threads)
        device = "cuda" if spec.resources.num_gpus else "cpu"
        return TrainingEngine(load_backbone(backbone, device), spec, backbone_name=backbone_name)

    # ---- slots

    def open_slot(
        self,
        tenant: str,
        policy: PolicySpec,
        *,
        seed: int,
        weight: float = 1.0,
        priority: Priority = "normal",
        stats: PolicyStats | None = None,
    ) -> None:
        """Give a tenant a slot with the module that its policy starts from, at version 0.

        Args:
            tenant: Its name.
            policy: What to train.
            seed: Of the initial parameters and of the tenant's generator.
            weight: Fair share of the device's seconds.
            priority: Class of it; see :mod:`joynexus.scheduling.fairness`.
            stats: To normalise with; they stay with the slot. Those of ``policy.init_from`` come first.

        Raises:
            TenantExistsError: If the tenant has a slot.
            AdmissionError: If there is no free slot or not enough memory, or the policy needs another backbone.
            SpecError, CheckpointError: If the module can't be built here. A failed open leaves nothing behind.
        """
        self._table.open(tenant, policy, seed=seed, weight=weight, priority=priority, stats=stats)

    def close_slot(self, tenant: str) -> None:
        """Free a tenant's slot and all that is in it; calls that wait are answered with an error.

        Raises:
            TenantNotFoundError: If it has none.
        """
        slot = self._table.close(tenant)
        with slot.lock:
            slot.is_closed = True
            abandoned = slot.calls.drain()
        for queued in abandoned:
            queued.future.set_exception(TenantNotFoundError(f"tenant {tenant!r}: its slot was closed before the call."))
        if self._stepping.acquire(blocking=False):
            try:
                self._forget_closed()
            finally:
                self._stepping.release()

    def tenants(self) -> dict[str, SlotStatus]:
        """Describe every slot."""
        return {slot.tenant: slot.status() for slot in self._table.all()}

    def status(self, tenant: str) -> SlotStatus:
        """Describe one slot.

        Raises:
            TenantNotFoundError: If the tenant has none.
        """
        return self._slot(tenant).status()

    def reset_optimizer(self, tenant: str) -> None:
        """Begin a new workload: fresh moments, no accumulated gradient, schedule at step 0."""
        slot = self._slot(tenant)
        with slot.lock:
            slot.state.reset_optimizer()

    def check_instructions(self, tenant: str, instructions: Sequence[str]) -> None:
        """Refuse instructions that the tenant's policy can't read, before anything is made of them.

        Raises:
            TenantNotFoundError: If the tenant has no slot.
            InvalidBatchError: If a prompt is longer than the policy's token bucket.
        """
        seen = self._slot(tenant).policy.observation
        try:
            tokenize(self._backbone, seen, instructions, None)  # whatever the state will be
        except InvalidBatchError as error:
            raise InvalidBatchError(f"tenant {tenant!r}: {error}") from error

    # ---- calls

    def submit(
        self,
        call: TrainingCall,
        *,
        is_repeatable: bool = True,
        features: Sequence[PrefixFeatures] | None = None,
        sample_keys: SampleKeys | None = None,
        ahead: Ahead | None = None,
    ) -> Future[TrainingResult]:
        """Check a call and queue it. Thread-safe, and never waits for a forward.

        Args:
            call: Its sequence number is the slot's next one, or one that was used before with the same payload.
            is_repeatable: Whether the caller may send it again; if not, its payload is not hashed.
            features: Each row's by itself, from :meth:`hold`: the batch then needs no frames. They count as reused.
            sample_keys: Notes which prefix each sample of the batch stands for, to be found again by :meth:`hold`.
            ahead: Its rows, from :meth:`prepare_ahead`; None begins with them now.

        Returns:
            Its future; that of the first call where this one repeats it.

        Raises:
            TenantNotFoundError: If the tenant has no slot.
            InvalidBatchError: If the batch does not fit policy and loss.
            UnknownComponentError: If there is no such loss.
            SpecError: If the optimizer can't be used.
            SequenceConflictError: If the number is not the next one, or was used with another payload.
            BackPressureError: If too many calls of the tenant wait.
        """
        slot = self._slot(call.tenant)
        check_call(call, slot.policy, has_features=features is not None)
        check_held(call, features, slot.signature)
        digest = payload_digest(call) if is_repeatable else NOT_REPEATABLE
        with slot.lock:
            if slot.is_closed:
                raise self._table.not_found(call.tenant)
            if ahead is None and features is None and len(slot.calls) < MAX_AHEAD:
                ahead = self._preparer.begin(slot.row_maker(self._backbone), call.batch)
            return slot.calls.submit(call, digest, features=features, sample_keys=sample_keys, ahead=ahead)

    def prepare_ahead(self, tenant: str, batch: TrainingBatch) -> Ahead | None:
        """Begin with the rows of a batch that is going to be called, beside the thread that steps.

        Args:
            tenant: Whose.
            batch: Checked when it is called, and to be handed to :meth:`submit` with what this returns.
        """
        return self._preparer.begin(self._slot(tenant).row_maker(self._backbone), batch)

    def hold(self, keys: Sequence[bytes]) -> list[PrefixFeatures | None]:
        """Return the rows of the prefix store that have these keys; see :meth:`PrefixStore.hold`.

        Only between two steps, on the thread that steps. A caller must not let a tenant name the keys.
        """
        return self._store.hold(keys)

    @property
    def has_work(self) -> bool:
        """Whether a call waits."""
        return any(len(slot.calls) > 0 for slot in self._table.all())

    def step(self, *, may_wait: bool = False) -> int:
        """Run one group step.

        Args:
            may_wait: Whether a group may be put off for further members; the caller then has to step again after
                ``hold_s``, and may do so earlier.

        Returns:
            How many calls were answered; 0 where none waited, or more are awaited.

        Raises:
            RuntimeError: If another thread is in it.
        """
        if not self._stepping.acquire(timeout=STEP_WAIT_S):
            raise RuntimeError("training engine: step runs in another thread. Drive the engine from one thread.")
        try:
            with self._runner.charging():
                answered = self._runner.optimizer_calls(self._table.all())
                members = self._table.choose(may_wait=may_wait)
                answered += self._runner.group(members)
            self._table.finished(members)
            return answered
        finally:
            self._forget_closed()
            self._stepping.release()

    @property
    def hold_s(self) -> float | None:
        """For how long calls that wait are put off, after the last step; None if they are not."""
        return self._table.hold_s

    # ---- weights and state

    def snapshot(self, tenant: str) -> PolicySnapshot:
        """Copy a tenant's present parameters, under the slot's present version.

        Raises:
            TenantNotFoundError: If the tenant has no slot.
        """
        return self._slot(tenant).snapshot()

    def base_snapshot(self, tenant: str) -> PolicySnapshot:
        """Build a tenant's version 0, the module as it was initialised, again from its seed."""
        return base_snapshot(self._slot(tenant), self._backbone)

    def advance_version(self, tenant: str, *, beyond: int = 0) -> int:
        """Give the present parameters a new version, because they are about to be published.

        Args:
            tenant: Whose.
            beyond: A version that is used up, of which the slot may know nothing.

        Returns:
            The new version; a snapshot taken before the next call is that version for good.
        """
        slot = self._slot(tenant)
        with slot.lock:
            slot.version = max(slot.version, beyond) + 1
            return slot.version

    def save_state(self, tenant: str, folder: Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a tenant's slot, as it is between two calls; durable when this returns.

        Args:
            tenant: Whose.
            folder: Where to; replaced if it holds a checkpoint.
            extra: Plain values to get back from :meth:`load_state`.

        Returns:
            The folder.

        Raises:
            TenantNotFoundError: If the tenant has no slot.
            CheckpointError: If the disk refuses.
        """
        return save_slot(self._slot(tenant), folder, extra or {})

    def load_state(self, tenant: str, folder: Path) -> JsonObject:
        """Take a tenant's slot to a checkpoint, exactly; a call that is being computed is computed again from there.

        Args:
            tenant: Whose; the checkpoint has to be of the same tenant, policy, seed and backbone.
            folder: As :meth:`save_state` left it.

        Returns:
            What was saved as ``extra``.

        Raises:
            TenantNotFoundError: If the tenant has no slot.
            CheckpointError: If the checkpoint is damaged or another's; nothing was changed.
        """
        return load_slot(self._slot(tenant), folder, self._backbone)

    def usage(self) -> EngineUsage:
        """Tell what was done so far, and for whom."""
        self._runner.settle()
        return self._ledger.usage()

    def groups_since(self, ordinal: int = 0) -> GroupColumns:
        """Return the groups from one on; there may be fewer than were run, evenly thinned out."""
        return self._ledger.groups.since(ordinal)

    @property
    def idle(self) -> IdleClock:
        """For the loop that drives the engine: to say why it does not."""
        return self._ledger.idle

    def checksum(self) -> str:
        """Hash of the backbone's weights: it never changes."""
        return self._backbone.checksum()

    # ---- inside

    def _forget_closed(self) -> None:
        """Take the rows of closed slots out of the prefix store; only the thread that steps may."""
        closed, live = self._table.take_closed()
        if closed:
            self._runner.forget(closed, live)

    def _slot(self, tenant: str) -> TrainingSlot:
        return self._table.get(tenant)
