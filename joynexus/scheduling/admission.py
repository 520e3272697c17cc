"""Whether a service has room for one more tenant. Pure: no Ray, no clock, no I/O.

What is used follows from the plans of the living tenants, and is counted nowhere: a refused, failed or departed
tenant can't leave anything behind in a counter.
"""

from dataclasses import dataclass

from joynexus.errors import AdmissionError, TenantExistsError
from joynexus.scheduling.plan import TenantPlan
from joynexus.specs.service import ServiceSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneLoad:
    """How full the training actor of one backbone is."""

    slots: int
    used_slots: int
    capacity_bytes: int
    """For slots: the device's budget less backbone and prefix store."""
    used_bytes: int

    @property
    def free_slots(self) -> int:
        """Slots without a tenant."""
        return self.slots - self.used_slots

    @property
    def free_bytes(self) -> int:
        """Bytes for further slots."""
        return self.capacity_bytes - self.used_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceState:
    """A service and the tenants that live in it."""

    service: ServiceSpec
    tenants: tuple[TenantPlan, ...] = ()

    def load(self, backbone: str) -> BackboneLoad:
        """Return how full a backbone's training actor is."""
        training = self.service.training
        resident = [each for each in self.tenants if each.backbone == backbone]
        fixed = self.service.backbones[backbone].parameter_bytes() + training.prefix_store.device_bytes
        return BackboneLoad(
            slots=training.slots,
            used_slots=len(resident),
            capacity_bytes=max(0, training.device_bytes - fixed),
            used_bytes=sum(each.memory.total for each in resident),
        )

    def having(self, plan: TenantPlan) -> "ServiceState":
        """Return the state with one more tenant."""
        return ServiceState(service=self.service, tenants=(*self.tenants, plan))


def admit(plan: TenantPlan, state: ServiceState) -> None:
    """Refuse a tenant that the service can't hold now; return nothing if it can.

    Args:
        plan: The tenant, compiled for this service.
        state: The service with its living tenants.

    Raises:
        TenantExistsError: If a living tenant has its name.
        AdmissionError: If no slot or not enough device memory is free, with what is needed and what is free.
    """
    if any(each.tenant == plan.tenant for each in state.tenants):
        raise TenantExistsError(f"tenant {plan.tenant!r}: a tenant of this name lives. Stop it, or take another name.")
    load, needed = state.load(plan.backbone), plan.memory.total
    if needed > load.capacity_bytes:
        raise AdmissionError(
            f"tenant {plan.tenant!r}: its slot needs {needed} bytes, and backbone {plan.backbone!r} has "
            f"{load.capacity_bytes} bytes for slots in all. Take a smaller action module or batch size, or raise "
            "training.device_bytes."
        )
    if load.free_slots < 1 or needed > load.free_bytes:
        raise AdmissionError(
            f"tenant {plan.tenant!r}: no room at backbone {plan.backbone!r}: needed are 1 slot and {needed} bytes, "
            f"free are {load.free_slots} of {load.slots} slots and {load.free_bytes} of {load.capacity_bytes} bytes. "
            "Resubmit when a tenant leaves, or raise training.slots or training.device_bytes."
        )
