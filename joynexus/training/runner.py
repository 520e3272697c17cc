"""Runs the calls that the engine chose: times them, lets them take effect, and answers them.

A call takes effect under its slot's lock together with its answer, so that a checkpoint holds both or neither. Its
future is set after that, outside the lock and before the next tenant's part begins.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from joynexus.errors import JoyNexusError
from joynexus.models.backbone import Backbone
from joynexus.models.prefix_store import PrefixStore
from joynexus.observability.device_clock import DeviceClock, device_marks
from joynexus.observability.engine_usage import EngineLedger, Kind, RowCount
from joynexus.training.adapted import encode_adapted, waves
from joynexus.training.group import Computed, Member, encode_group, forward_backward, prepare, tenant_error
from joynexus.training.slot import TrainingSlot
from joynexus.types import TrainingResult

KEPT_KEYS = 1024
"""Rows that a tenant's note may hold beyond twice the store's."""


class GroupRunner:
    """The part of the engine that computes. Used by one thread at a time."""

    def __init__(self, backbone: Backbone, store: PrefixStore, ledger: EngineLedger) -> None:
        self._backbone = backbone
        self._store = store
        self._ledger = ledger
        self._clock = DeviceClock(ledger, device_marks(backbone.device))
        self._group_id = 0
        self._group_tenants = 0
        self._group_samples = 0

    @contextmanager
    def charging(self) -> Generator[None]:
        """Charge everything that is done inside to the tenants that it is done for."""
        with self._ledger.idle.working(), self._clock.step():
            yield

    def settle(self) -> None:
        """Book what the device has come to meanwhile. Any thread may call this."""
        self._clock.settle()

    def optimizer_calls(self, slots: Sequence[TrainingSlot]) -> int:
        """Apply the optimizer-only calls at the heads of the queues: they need no forward and wait for nobody.

        Returns:
            How many calls were answered.
        """
        answered = 0
        for slot in slots:
            while (queued := slot.head()) is not None and queued.call.batch is None:
                self._group_id += 1  # its own: equal ids mean a shared forward
                self._group_tenants, self._group_samples = 1, 0
                began = self._clock.spent(slot.tenant)
                answered += self._part(Member(slot=slot, queued=queued, state=slot.state, began_at=began))
        return answered

    def group(self, members: Sequence[Member]) -> int:
        """Run batch calls of one signature together.

        Returns:
            How many calls were answered: fewer than members where a slot was closed or loaded meanwhile.
        """
        if not members:
            return 0
        self._group_id += 1
        for member in members:
            member.began_at = self._clock.spent(member.slot.tenant)
            with self._clock.span(member.slot.tenant, "copy"):
                prepare(member, self._backbone)
            if self._backbone.device.type == "cpu":  # elsewhere the host's time is not the device's
                self._clock.bear(member.slot.tenant, "copy", member.ahead_s)
        plain = [member for member in members if not member.is_adapted]
        adapted = [member for member in members if member.is_adapted]
        self._encode(plain)
        self._group_tenants = len(members)
        self._group_samples = sum(member.queued.num_rows for member in members)
        self._ledger.record_group({member.slot.tenant: _rows(member) for member in members})
        # The cheapest part first: a short call's future must not wait for a long one beside it.
        ordered = sorted(plain, key=lambda member: member.slot.expected_seconds(member.num_rows))
        answered = sum(self._part(member) for member in ordered)
        return answered + sum(self._adapted_parts(wave) for wave in waves(adapted, self._backbone))

    def forget(self, closed: Sequence[TrainingSlot], live: Sequence[TrainingSlot]) -> None:
        """Drop from the prefix store what closed tenants have used and no live one has."""
        gone = {key for slot in closed for key in slot.prefix_keys}
        for slot in live:
            gone -= slot.prefix_keys
        self._store.discard(gone)

    def _remember(self, member: Member) -> None:
        """Note which rows a tenant uses; those that have left the store are left out before the note outgrows it."""
        keys = member.slot.prefix_keys
        keys.update(member.keys)
        if member.queued.sample_keys is not None and member.batch is not None and member.keys:
            member.queued.sample_keys.learn(member.batch.sample_ids, member.keys, self._store)
        if len(keys) > 2 * len(self._store) + KEPT_KEYS:
            keys.intersection_update(key for key in list(keys) if key in self._store)

    def _encode(self, members: Sequence[Member]) -> None:
        """Encode the group together, and split the time by the rows that each tenant caused to be encoded."""
        if not members:
            return
        with self._clock.shared("prefix") as span:
            for store, those in self._by_store(members):
                encode_group(those, self._backbone, store)
            for member in members:
                self._remember(member)
            span.split = {member.slot.tenant: member.encoded for member in members}
            if not any(span.split.values()):  # all were found: the time is that of the look-up
                span.kind = "copy"
                span.split = {member.slot.tenant: max(member.num_looked_up, 1) for member in members}

    def _by_store(self, members: Sequence[Member]) -> list[tuple[PrefixStore | None, list[Member]]]:
        """Tell those who reuse prefixes, and find them in the store, from those who don't."""
        kept = [member for member in members if member.slot.policy.reuse_prefixes]
        return [(self._store, kept), (None, [member for member in members if not member.slot.policy.reuse_prefixes])]

    def _adapted_parts(self, members: Sequence[Member]) -> int:
        """Run members with adapters: what they share is charged by their rows; returns how many were answered."""
        rows = {member.slot.tenant: member.num_looked_up for member in members}
        with self._clock.shared("prefix") as span:
            span.split = rows
            forward = encode_adapted(members, self._backbone)
        if forward is None and len(members) > 1:
            return sum(self._adapted_parts([member]) for member in members)
        began = [self._clock.spent(member.slot.tenant) for member in members]
        parts = [self._own_part(member) for member in members]
        if forward is not None:
            with self._clock.shared("backward") as span:
                span.split = rows
                parts = forward.complete(parts)
        return sum(self._finish(*each) for each in zip(members, parts, began, strict=True))

    def _part(self, member: Member) -> bool:
        """Compute one tenant's part, let it take effect, and answer it; False if the slot was closed or loaded."""
        began = self._clock.spent(member.slot.tenant)
        return self._finish(member, self._own_part(member), began)

    def _own_part(self, member: Member) -> Computed | JoyNexusError | None:
        tenant = member.slot.tenant
        with self._clock.span(tenant, "other"):
            return member.error or _compute(member, lambda kind: self._clock.span(tenant, kind))

    def _finish(self, member: Member, computed: Computed | JoyNexusError | None, part_began: float) -> bool:
        """Let a part take effect, and answer it; False if the slot was closed or loaded."""
        slot, tenant = member.slot, member.slot.tenant
        with self._clock.span(tenant, "other"), slot.lock:
            if slot.is_closed or slot.state is not member.state:
                return False
            with self._clock.span(tenant, "backward" if member.queued.call.optimizer is None else "optimizer"):
                metrics = _take_effect(member, computed)
            outcome = metrics if isinstance(metrics, Exception) else self._result(member, metrics, part_began)
            slot.calls.answer(member.queued, outcome)
        if isinstance(outcome, Exception):
            member.queued.future.set_exception(outcome)
        else:
            member.queued.future.set_result(outcome)
        return True

    def _result(self, member: Member, metrics: Mapping[str, float], part_began: float) -> TrainingResult:
        spent = self._clock.spent(member.slot.tenant)
        if member.num_rows:
            member.slot.measured(spent - part_began, member.num_rows)
        return TrainingResult(
            tenant=member.slot.tenant,
            sequence=member.queued.call.sequence,
            metrics=metrics,
            optimizer_steps=member.state.optimizer_steps,
            group_id=self._group_id,
            group_tenants=self._group_tenants,
            group_samples=self._group_samples,
            encoded=member.encoded,
            reused=member.reused,
            carried=member.carried,
            device_seconds=spent - member.began_at,
        )


def _rows(member: Member) -> RowCount:
    return RowCount(
        samples=member.queued.num_rows, encoded=member.encoded, reused=member.reused, carried=member.carried
    )


def _compute(member: Member, span: Callable[[Kind], AbstractContextManager[object]]) -> Computed | JoyNexusError | None:
    """Compute a call's gradient; None where it has no batch."""
    if member.queued.call.batch is None:
        return None
    try:
        return forward_backward(member, span)
    except Exception as error:  # noqa: BLE001  # the tenant's boundary
        return tenant_error(member.slot, error)
    finally:
        member.features = None


def _take_effect(member: Member, computed: Computed | JoyNexusError | None) -> dict[str, float] | JoyNexusError:
    """Change the slot, whose lock is held, by what was computed; on an error not at all."""
    if isinstance(computed, JoyNexusError):
        return computed
    state, call = member.state, member.queued.call
    metrics = dict[str, float]()
    if computed is None:  # a sum of its own all the same: the step consumes it, and may be refused
        accumulated = state.accumulated.plus({}, rows=0, weight=0.0)
    else:
        accumulated = state.accumulated.plus(computed.gradient, computed.rows, computed.weight)
        metrics.update(computed.metrics)
    try:
        if call.optimizer is not None:
            metrics |= state.apply(accumulated, call.optimizer, call.schedule_steps)
        else:
            state.accumulated = accumulated
    except Exception as error:  # noqa: BLE001  # the tenant's boundary
        return tenant_error(member.slot, error)
    if computed is not None:
        state.generator = computed.generator
    return metrics
