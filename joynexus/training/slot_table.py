"""The slots of one engine: who has one, who gets one, and which calls of them make the next group.

The table's lock guards the list and the fair shares. It is held for the length of a copy, never during a forward and
never while a module is built; a slot's own lock may be taken while it is held, not the other way round.
"""

import threading
from collections.abc import Sequence

from joynexus.errors import AdmissionError, TenantExistsError, TenantNotFoundError
from joynexus.models.backbone import Backbone
from joynexus.observability.engine_usage import EngineLedger
from joynexus.scheduling.fairness import Priority
from joynexus.specs.service import TrainingSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.training.capacity import Capacity
from joynexus.training.group import Member
from joynexus.training.optimizer import Moments
from joynexus.training.selection import CallSelection
from joynexus.training.slot import TrainingSlot, initial_version
from joynexus.types import PolicyStats


class SlotTable:
    """Opens and closes slots, and chooses among their calls. Thread-safe."""

    def __init__(self, backbone: Backbone, spec: TrainingSpec, ledger: EngineLedger, *, backbone_name: str) -> None:
        """Start without slots.

        Args:
            backbone: What modules are built for.
            spec: Slots, memory and group size.
            ledger: What the engine measures.
            backbone_name: Its name in the service; policies for another one are refused.
        """
        self.capacity = Capacity(backbone, spec)
        self._backbone = backbone
        self._backbone_name = backbone_name
        self._moments: Moments = spec.moments
        self._lock = threading.Lock()
        self._slots: dict[str, TrainingSlot] = {}
        self._opening: set[str] = set()
        self._closed: list[TrainingSlot] = []  # their rows are still in the prefix store: a step was running
        self._selection = CallSelection(backbone, spec, ledger)

    def open(
        self,
        tenant: str,
        policy: PolicySpec,
        *,
        seed: int,
        weight: float,
        priority: Priority,
        stats: PolicyStats | None,
    ) -> None:
        """Give a tenant a slot; see :meth:`joynexus.training.engine.TrainingEngine.open_slot`.

        Raises:
            TenantExistsError: If the tenant has a slot.
            AdmissionError: If there is no free slot or not enough memory, or the policy needs another backbone.
            SpecError, CheckpointError: If the module can't be built here. A failed open leaves nothing behind.
        """
        self._reserve(tenant, policy)
        try:
            with self._lock:
                self.capacity.check(tenant, needed=self.capacity.estimate(policy), used=self._used_bytes())
            parts, own = initial_version(policy, self._backbone, seed=seed, stats=stats, owner=tenant)
            slot = TrainingSlot(tenant, policy, parts, seed=seed, stats=own, moments=self._moments)
            with self._lock:
                self.capacity.check(tenant, needed=slot.nbytes, used=self._used_bytes())
                self._selection.add(slot, weight, priority)
                self._slots[tenant] = slot
        finally:
            with self._lock:
                self._opening.discard(tenant)

    def close(self, tenant: str) -> TrainingSlot:
        """Take a slot out; what its tenant has in the prefix store is told by :meth:`take_closed`.

        Raises:
            TenantNotFoundError: If the tenant has none.
        """
        with self._lock:
            slot = self._slots.pop(tenant, None)
            self._selection.remove(tenant)
            self._closed += [] if slot is None else [slot]
        if slot is None:
            raise self.not_found(tenant)
        return slot

    def take_closed(self) -> tuple[list[TrainingSlot], list[TrainingSlot]]:
        """Return, once, the slots that were closed, and those that are open."""
        with self._lock:
            closed, self._closed = self._closed, []
            return closed, list(self._slots.values())

    def all(self) -> list[TrainingSlot]:
        """Return the open slots."""
        with self._lock:
            return list(self._slots.values())

    def get(self, tenant: str) -> TrainingSlot:
        """Return a tenant's slot.

        Raises:
            TenantNotFoundError: If it has none.
        """
        with self._lock:
            slot = self._slots.get(tenant)
        if slot is None:
            raise self.not_found(tenant)
        return slot

    def not_found(self, tenant: str) -> TenantNotFoundError:
        """Say that a tenant has no slot."""
        return TenantNotFoundError(f"tenant {tenant!r}: has no slot under {self._backbone_name!r}. Open one first.")

    # ---- groups

    def choose(self, *, may_wait: bool) -> list[Member]:
        """Choose the calls of the next group; see :meth:`CallSelection.choose`."""
        with self._lock:
            return self._selection.choose(self._slots.values(), may_wait=may_wait)

    def finished(self, members: Sequence[Member]) -> None:
        """Note that calls have run, so that the next ones of their tenants may come."""
        with self._lock:
            self._selection.finished(members)

    @property
    def hold_s(self) -> float | None:
        """For how long calls that wait are put off; None if they are not."""
        return self._selection.hold_s

    # ---- inside

    def _reserve(self, tenant: str, policy: PolicySpec) -> None:
        """Hold a slot while the module is built, which takes too long for a lock."""
        if policy.backbone != self._backbone_name:
            raise AdmissionError(
                f"tenant {tenant!r}: its policy needs backbone {policy.backbone!r}, this engine has "
                f"{self._backbone_name!r}. Open it where that one is resident."
            )
        with self._lock:
            if tenant in self._slots or tenant in self._opening:
                raise TenantExistsError(f"tenant {tenant!r}: has a slot already. Close it first, or take another name.")
            self.capacity.check_slots(tenant, used=len(self._slots) + len(self._opening))
            self._opening.add(tenant)

    def _used_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots.values())
