"""Whether a slot fits into the device memory that the service gives to training."""

from joynexus.errors import AdmissionError
from joynexus.models.adapters import num_adapter_parameters
from joynexus.models.backbone import Backbone
from joynexus.models.policy import module_dims
from joynexus.specs.service import TrainingSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.training.optimizer import Moments
from joynexus.training.slot import slot_bytes


class Capacity:
    """Device memory: the backbone's, the prefix store's, and what is left for slots."""

    def __init__(self, backbone: Backbone, spec: TrainingSpec) -> None:
        self._backbone = backbone
        self._total = spec.device_bytes
        self._slots = spec.slots
        self._moments: Moments = spec.moments
        self.fixed = sum(each.nbytes for each in backbone.state_dict().values()) + spec.prefix_store.device_bytes
        """Bytes that no slot can have."""

    def check_slots(self, tenant: str, *, used: int) -> None:
        """Refuse one more slot than the service gives.

        Raises:
            AdmissionError: If all are in use.
        """
        if used >= self._slots:
            raise AdmissionError(
                f"tenant {tenant!r}: all {self._slots} slots are in use. Retry when a tenant leaves, or raise "
                "training.slots of the service."
            )

    def estimate(self, policy: PolicySpec) -> int:
        """Estimate a slot's bytes before its module is built: a huge one must not be allocated to be refused."""
        dims = module_dims(policy, self._backbone)
        numbers = policy.action_module.num_parameters(
            prefix_dim=dims.prefix_dim,
            state_dim=dims.state_dim,
            action_dim=dims.action_dim,
            horizon=dims.horizon,
        )
        if policy.adapter is not None:
            numbers += num_adapter_parameters(policy.adapter, self._backbone)
        return slot_bytes(numbers, self._moments)

    def check(self, tenant: str, *, needed: int, used: int) -> None:
        """Refuse a slot that does not fit.

        Args:
            tenant: Who asks.
            needed: Bytes of its slot.
            used: Bytes of the slots that there are.

        Raises:
            AdmissionError: Saying what is needed, what is free, and what to do.
        """
        free = self._total - self.fixed - used
        if needed > free:
            raise AdmissionError(
                f"tenant {tenant!r}: its slot needs {needed} bytes, {max(free, 0)} of {self._total} are free "
                f"({self.fixed} are the backbone's and the prefix store's). Take a smaller action module, or raise "
                "training.device_bytes of the service."
            )
