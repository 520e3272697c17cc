"""A policy version: what the trainer publishes and the replicas serve."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float32

from joynexus.specs.tenant import PolicySpec
from joynexus.types.arrays import Array, Arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalizationStats:
    """Per-dimension statistics over all frames of a dataset, in raw units."""

    mean: Float32[Array, " d"]
    std: Float32[Array, " d"]
    minimum: Float32[Array, " d"]
    maximum: Float32[Array, " d"]
    q01: Float32[Array, " d"]
    q99: Float32[Array, " d"]
    count: int
    """Frames that the statistics were computed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStats:
    """The statistics that travel with a policy, in its checkpoints, its publications and its export."""

    state: NormalizationStats | None
    """None: the state enters as it is."""
    action: NormalizationStats | None
    """None: actions leave as they are."""
    source: str
    """Where they were computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySnapshot:
    """One immutable policy version: what the trainer publishes and the replicas serve."""

    tenant: str
    version: int
    """0 is the base: the module as it was initialised."""
    policy: PolicySpec
    parameters: Arrays
    """The action module's state, by parameter name; never the backbone's."""
    stats: PolicyStats | None
    seed: int
    """The tenant's."""
    weight: float = 1.0
    """Fair share of the replicas against other tenants."""
    priority: Literal["low", "normal", "high"] = "normal"

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(each.nbytes for each in self.parameters.values())
