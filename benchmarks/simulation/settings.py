"""How the simulated service is set up, and what its devices did for whom."""

from dataclasses import dataclass, field
from typing import Literal

from benchmarks.simulation.costs import DeviceCosts
from joynexus.scheduling.cost import Measured
from joynexus.scheduling.shipping import ShippingMode, ShippingRates, is_worth_shipping
from joynexus.specs.service import InferenceSpec, QueueSpec, TrainingSpec

Kind = Literal["prefix", "head", "optimizer", "copy"]
"""``head`` is loss and backward, or acting; ``copy`` is looking up stored rows and bringing carried ones."""

TRAINING = TrainingSpec(device_bytes=135 << 30, slots=48)
INFERENCE = InferenceSpec()
NO_FAULTS = QueueSpec(lease_s=1e6)
"""The product's queue, with leases that outlast any run: nobody dies here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The operator's choices; defaults are the product's where it has them."""

    gpus: int = 1
    """Each with a trainer and a replica."""
    slots: int = 48
    """Tenants of one GPU at once: 0.1 B parameters with gradients and moments take 1.6 GB of 139."""
    training: TrainingSpec = TRAINING
    inference: InferenceSpec = INFERENCE
    queue: QueueSpec = NO_FAULTS
    store_bytes: int = 40 << 30
    """Of one GPU's prefix store."""
    ship_features: ShippingMode = "auto"
    """Whether RL's features travel from the replica to the trainer; ``auto`` asks the product's rule."""
    module_bytes: int = 1_600_000_000
    """Device memory of one tenant's slot."""

    def carries(self, costs: DeviceCosts) -> bool:
        """Whether features travel at such costs; decided once, where the product measures and may change its mind."""
        if self.ship_features != "auto":
            return self.ship_features == "always"
        rates = ShippingRates(
            feature_bytes=float(costs.row_bytes),
            frame_bytes=float(costs.frame_bytes),
            seconds_per_byte=costs.hop_byte_s,
            encode_seconds=costs.encode_s(costs.chunk_rows) / costs.chunk_rows,
        )
        return is_worth_shipping(rates, is_shipping=None)


class Spent:
    """What an engine has measured of each tenant: what the product's choices settle their estimates with."""

    def __init__(self) -> None:
        self._sums: dict[str, Measured] = {}

    def of(self, tenant: str) -> Measured:
        """Return the sums of a tenant."""
        return self._sums.get(tenant, Measured())

    def add(self, tenant: str, cost: Measured) -> None:
        """Add to them."""
        before = self.of(tenant)
        self._sums[tenant] = Measured(
            rows=before.rows + cost.rows,
            encoded=before.encoded + cost.encoded,
            prefix_s=before.prefix_s + cost.prefix_s,
            head_s=before.head_s + cost.head_s,
        )


@dataclass(slots=True)
class Ledger:
    """Device-seconds and waits of one run."""

    seconds: dict[str, dict[Kind, float]] = field(default_factory=dict[str, dict[Kind, float]])
    """By tenant, then :data:`Kind`."""
    predict_waits_s: list[float] = field(default_factory=list[float])
    """From a request's arrival at the replica to the start of its batch."""
    group_waits_s: list[float] = field(default_factory=list[float])
    """From the moment in which a training call could begin to the start of its group."""
    batches: int = 0
    batch_rows: int = 0
    groups: int = 0
    group_tenants: int = 0
    encoded: int = 0
    reused: int = 0
    carried: int = 0
    trained_rows: int = 0

    def charge(self, tenant: str, kind: Kind, seconds: float) -> None:
        """Book device-seconds."""
        kinds = self.seconds.setdefault(tenant, {})
        kinds[kind] = kinds.get(kind, 0.0) + seconds

    @property
    def total_s(self) -> float:
        """Device-seconds of all tenants."""
        return sum(sum(kinds.values()) for kinds in self.seconds.values())
