"""A service: what the operator runs and shares among tenants."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from joynexus.specs.backbone import AnyBackbone, BackboneSpec, LiteBackboneSpec
from joynexus.specs.base import Name, Resources, Spec


class PrefixStoreSpec(Spec):
    """Byte budget of the store of prefix features."""

    device_bytes: int = Field(default=256 << 20, ge=0)
    """Kept on the device of the backbone; 0 keeps none."""
    host_bytes: int = Field(default=512 << 20, ge=0)
    """Kept in host memory after leaving the device tier; on a CPU the two tiers are one."""


class TrainingSpec(Spec):
    """The TrainingActor of each backbone."""

    slots: int = Field(default=8, ge=1, le=4096)
    """Tenants that can be trained at once."""
    device_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Memory for backbone, slots and store; a tenant that does not fit is refused."""
    max_group_samples: int = Field(default=256, ge=1)
    """Samples of one group step."""
    max_wait_ms: float = Field(default=20.0, ge=0.0)
    """How long a group waits for further tenants once one is ready."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type that AdamW's two moments are kept in; the step is computed in float32 either way. ``bfloat16`` saves 4 of a
    slot's 20 bytes per parameter; take a second beta of 0.99 or less with it (:mod:`joynexus.training.optimizer`)."""
    light_epochs: bool = True
    """Whether demonstrations go without their frames once the prefix store has what they were encoded to."""
    prefix_store: PrefixStoreSpec = PrefixStoreSpec()
    num_threads: int = Field(default=1, ge=1)
    """Torch threads."""
    resources: Resources = Resources(num_cpus=0.5)


class InferenceSpec(Spec):
    """The replicas of each backbone."""

    num_replicas: int = Field(default=1, ge=1, le=1024)
    """Processes that serve a backbone's policies, each with a copy of the backbone."""
    max_batch_size: int = Field(default=32, ge=1, le=4096)
    """Rows of one forward."""
    max_wait_ms: float = Field(default=5.0, ge=0.0)
    """How long an idle replica waits for further rows after the first, at most: only while that is worth it."""
    device_second_worth: float = Field(default=4.0, ge=1.0, le=1000.0)
    """Seconds of a caller's waiting that a second of the device may cost. At 1 a replica waits only where callers have
    their answers sooner for it, on average; more makes fewer and fuller forwards, and callers wait longer."""
    max_queued_rows: int = Field(default=1024, ge=1)
    """Rows that wait at most; further callers get a back-pressure error."""
    stack_heads: Literal["never", "auto", "always"] = "auto"
    """Whether same-shaped action modules of several tenants act as one (``docs/decisions/0017``): ``auto`` only where
    this machine then gives the very numbers of each module by itself, ``always`` also where they agree within 1e-5."""
    prefix_store: PrefixStoreSpec = PrefixStoreSpec(device_bytes=64 << 20, host_bytes=0)
    num_threads: int = Field(default=1, ge=1)
    """Torch threads."""
    resources: Resources = Resources(num_cpus=0.25)


class QueueSpec(Spec):
    """The training queue beside each TrainingActor."""

    lane_items: int = Field(default=32, ge=1)
    """Items (SFT micro-batches, trajectories) that wait in one tenant's lane; a put beyond it answers ``full``."""
    lane_bytes: int = Field(default=512 << 20, ge=1)
    """Bytes that wait in one tenant's lane."""
    max_in_flight: int = Field(default=64, ge=1)
    """Items of one tenant that are leased and not yet acknowledged; a workload that uses more between two checkpoints
    gets as many as it needs."""
    lease_s: float = Field(default=120.0, gt=0.0)
    """A lease that is not renewed for this long returns its items to the head of their lanes."""
    ageing_s: float = Field(default=10.0, gt=0.0)
    """Waiting this long lifts a lane by one priority class."""
    resources: Resources = Resources(num_cpus=0.05)


class HealthSpec(Spec):
    """How dead and hung roles are found and replaced."""

    period_s: float = Field(default=1.0, gt=0.0)
    """Between two pings of a role."""
    timeout_s: float = Field(default=10.0, gt=0.0)
    """A ping that takes longer is missed."""
    missed_pings: int = Field(default=2, ge=1)
    """Missed in a row before a role counts as hung."""
    startup_s: float = Field(default=180.0, gt=0.0)
    """A role that has not answered its first ping for this long counts as hung."""
    max_restarts: int = Field(default=5, ge=0)
    """Of one role within ``restart_window_s``; beyond it the role's tenant fails."""
    restart_window_s: float = Field(default=300.0, gt=0.0)
    """Over which restarts are counted."""
    stall_s: float = Field(default=600.0, gt=0.0)
    """A workload with no progress for this long is FAILED, never left running."""


class StorageSpec(Spec):
    """Where runs are written."""

    root: Path = Path("outputs")
    """Folder of all runs; a relative one is taken from the folder where the service is started."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept per tenant."""


class QuotaSpec(Spec):
    """What one tenant may take at most."""

    max_env_workers: int = Field(default=64, ge=1)
    """EnvironmentActors of one workload."""
    max_module_bytes: int = Field(default=4 << 30, ge=1)
    """Of parameters, gradients and optimizer state."""


class ServiceSpec(Spec):
    """The operator's description of one service."""

    service: Name = "joynexus"
    """Name, also of the Ray namespace."""
    backbones: dict[Name, AnyBackbone] = Field(min_length=1)
    """Resident backbones by the name that tenants use."""
    training: TrainingSpec = TrainingSpec()
    inference: InferenceSpec = InferenceSpec()
    queue: QueueSpec = QueueSpec()
    health: HealthSpec = HealthSpec()
    storage: StorageSpec = StorageSpec()
    quotas: QuotaSpec = QuotaSpec()
    placement_timeout_s: float = Field(default=30.0, gt=0.0)
    """How long a placement group may stay pending before its tenant is refused."""

    def resolve_paths(self, folder: Path) -> "ServiceSpec":
        """Return the same spec with the backbones' paths that begin with a dot made absolute against ``folder``.

        Others may be hub ids, which look like relative paths.
        """
        return self.model_copy(
            update={"backbones": {name: _resolved(each, folder) for name, each in self.backbones.items()}}
        )


def _resolved(backbone: BackboneSpec, folder: Path) -> BackboneSpec:
    path: object = getattr(backbone, "path", None)
    if not isinstance(path, str) or not path.startswith((".", "~")):
        return backbone
    return backbone.model_copy(update={"path": str((folder / Path(path).expanduser()).resolve())})


def default_service() -> ServiceSpec:
    """Return the service that is taken where none is given: the backbone ``lite`` under its own name."""
    return ServiceSpec(backbones={"lite": LiteBackboneSpec()})
