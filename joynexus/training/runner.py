"""Runs the calls that the engine chose: times them, lets them take effect, and answers them.

A call takes effect under its slot's lock together with its answer, so that a checkpoint holds both or neither. Its
future is set after that, outside the lock and before the next tenant's part begins.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from joynexus.errors import JoyNexusError
from joynexus.models.backbone import Backbone
from joynexus.models.prefix_store import PrefixStore
from joynexus.observability.engine_usage import EngineLedger, device_clock
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
        self._clock = device_clock(backbone.device)
        self._seconds: dict[str, float] = {}
        self._group_id = 0
        self._group_tenants = 0
        self._group_samples = 0

    @contextmanager
    def charging(self) -> Generator[None]:
        """Charge everything that is done inside to the tenants that it is done for."""
        self._seconds = {}
        begin = self._clock()
        try:
            yield
        finally:
            self._ledger.charge(self._seconds, self._clock() - begin)

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
                answered += self._part(Member(slot=slot, queued=queued, state=slot.state))
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
            with self._timed(member):
                prepare(member, self._backbone)
        self._encode(members)
        self._group_tenants = len(members)
        self._group_samples = sum(member.queued.num_rows for member in members)
        self._ledger.record_group(
            tenants=self._group_tenants,
            samples=self._group_samples,
            encoded=sum(member.encoded for member in members),
            reused=sum(member.reused for member in members),
        )
        # The cheapest part first: a short call's future must not wait for a long one beside it.
        ordered = sorted(members, key=lambda member: member.slot.expected_seconds(member.num_rows))
        return sum(self._part(member) for member in ordered)

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
        if len(keys) > 2 * len(self._store) + KEPT_KEYS:
            keys.intersection_update(key for key in list(keys) if key in self._store)

    def _encode(self, members: Sequence[Member]) -> None:
        """Encode the group together, and split the time by the rows that each tenant caused to be encoded."""
        begin = self._clock()
        encode_group(members, self._backbone, self._store)
        for member in members:
            self._remember(member)
        spent = self._clock() - begin
        shares = [member.encoded for member in members]
        if not any(shares):  # all were found: the time is that of the look-up
            shares = [member.num_rows for member in members]
        for member, share in zip(members, shares, strict=True):
            self._charge(member, spent * share / max(sum(shares), 1))

    def _part(self, member: Member) -> bool:
        """Compute one tenant's part, let it take effect, and answer it; False if the slot was closed or loaded."""
        slot = member.slot
        with self._timed(member):
            computed = member.error or _compute(member)
            with slot.lock:
                if slot.is_closed or slot.state is not member.state:
                    return False
                metrics = _take_effect(member, computed)
                outcome = metrics if isinstance(metrics, Exception) else self._result(member, metrics)
                slot.calls.answer(member.queued, outcome)
        if isinstance(outcome, Exception):
            member.queued.future.set_exception(outcome)
        else:
            member.queued.future.set_result(outcome)
        return True

    def _result(self, member: Member, metrics: Mapping[str, float]) -> TrainingResult:
        own = self._clock() - member.part_began
        if member.num_rows:
            member.slot.measured(own, member.num_rows)
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
            device_seconds=member.seconds + own,
        )

    @contextmanager
    def _timed(self, member: Member) -> Generator[None]:
        member.part_began = self._clock()
        try:
            yield
        finally:
            self._charge(member, self._clock() - member.part_began)

    def _charge(self, member: Member, seconds: float) -> None:
        member.seconds += seconds
        tenant = member.slot.tenant
        self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds


def _compute(member: Member) -> Computed | JoyNexusError | None:
    """Compute a call's gradient; None where it has no batch."""
    if member.queued.call.batch is None:
        return None
    try:
        return forward_backward(member)
    except Exception as error:  # noqa: BLE001  # the tenant's boundary
        return tenant_error(member.slot, error)
    finally:
        member.features = None


def _take_effect(member: Member, computed: Computed | JoyNexusError | None) -> dict[str, float] | JoyNexusError:
    """Change the slot, whose lock is held, by what was computed; on an error not at all."""
    if isinstance(computed, JoyNexusError):
        return computed
    state, call = member.state, member.queued.call
    accumulated, metrics = state.accumulated, dict[str, float]()
    if computed is not None:
        accumulated = accumulated.plus(computed.gradient, computed.rows)
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
