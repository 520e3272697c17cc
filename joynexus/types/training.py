"""What is learnt from, and what comes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32

from joynexus.errors import InvalidBatchError
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.types.acting import Trajectory
from joynexus.types.arrays import Array
from joynexus.types.observation import Observation, PrefixArrays


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """Rows that a tenant learns from in one micro-batch."""

    observation: Observation
    actions: Float32[Array, "b t a"]
    """Whole chunks, raw; all ``horizon`` steps are supervised, however few are executed."""
    action_is_pad: Bool[Array, "b t"]
    """True past the end of the episode; such steps never enter a loss."""
    sample_ids: tuple[str, ...]
    """Identity of each row, for exactly-once accounting and the record of what was seen."""
    extras: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """What the loss needs beyond, first axis b: ``advantages``, ``old_log_prob``, ``weights``, ``trace/...``."""
    features: PrefixArrays | None = None
    """Of each row, in place of encoding it; private to the tenant, and never kept beyond the call."""
    featured: Bool[Array, " b"] | None = None
    """Rows whose features count, where some do not: those are encoded from their frames. None: all of them."""

    def __len__(self) -> int:
        return len(self.observation)

    @property
    def num_featured(self) -> int:
        """Rows that bring their features."""
        if self.features is None:
            return 0
        return len(self) if self.featured is None else int(self.featured.sum())

    def rows(self, index: Sequence[int] | slice | Array) -> "TrainingBatch":
        """Return the rows that an index, a list of indices or a slice picks."""
        picked = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)]
        return TrainingBatch(
            observation=self.observation.rows(picked),
            actions=self.actions[picked],
            action_is_pad=self.action_is_pad[picked],
            sample_ids=tuple(self.sample_ids[int(each)] for each in picked),
            extras={name: value[picked] for name, value in self.extras.items()},
            features=None if self.features is None else self.features.rows(picked),
            featured=None if self.featured is None else self.featured[picked],
        )

    @staticmethod
    def concatenate(parts: "Sequence[TrainingBatch]") -> "TrainingBatch":
        """Stack the rows of several batches with the same extras, which all bring features or none.

        Raises:
            InvalidBatchError: If only some bring features.
        """
        features = [part.features for part in parts if part.features is not None]
        if features and (len(features) < len(parts) or any(part.featured is not None for part in parts)):
            raise InvalidBatchError(f"{len(features)} of {len(parts)} batches bring features. Stack all or none.")
        return TrainingBatch(
            observation=Observation.concatenate([part.observation for part in parts]),
            actions=np.concatenate([part.actions for part in parts]),
            action_is_pad=np.concatenate([part.action_is_pad for part in parts]),
            sample_ids=tuple(each for part in parts for each in part.sample_ids),
            extras={name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
            features=PrefixArrays.concatenate(features) if features else None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        own = self.observation.nbytes + self.actions.nbytes + sum(each.nbytes for each in self.extras.values())
        return own + (0 if self.features is None else self.features.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneItem:
    """What producers put into a tenant's lane of the training queue."""

    item_id: str
    """Unique over the tenant's life; a second put of the same id is answered ``duplicate``."""
    tenant: str
    workload: int
    """Index of the workload that it belongs to; items of an ended workload are dropped as stale."""
    ordinal: int
    """SFT: index of the micro-batch; RL: index of the episode."""
    policy_version: int
    """RL: version that sampled it; SFT: the largest int64, never stale."""
    payload: TrainingBatch | Trajectory

    @property
    def cost(self) -> int:
        """Samples: rows of a batch, decisions of a trajectory."""
        return len(self.payload)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.nbytes


NEVER_STALE = 2**63 - 1
"""``policy_version`` of data that no policy sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Which loss a training call uses; an unknown name is refused, never replaced by a default."""

    name: str
    """A key of ``joynexus.training.losses.LOSSES``: ``supervised``, ``weighted``, ``ppo``."""
    parameters: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCall:
    """One call of a tenant to its training slot.

    ``batch`` with ``loss`` accumulates a gradient (``forward_backward``), ``optimizer`` applies it (``optim_step``),
    both together are ``train_batch``. A tenant's calls take effect in the order of their sequence numbers.
    """

    tenant: str
    sequence: int
    """0, 1, 2, ... per tenant; a repeated number returns the first answer and does nothing."""
    batch: TrainingBatch | None = None
    loss: Loss | None = None
    optimizer: OptimizerSpec | None = None
    schedule_steps: int | None = None
    """Length of the learning-rate schedule where the optimizer spec leaves it to the workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """The answer to a :class:`TrainingCall`."""

    tenant: str
    sequence: int
    metrics: Mapping[str, float]
    """``loss``, ``grad_norm``, ``lr``, and what the loss adds."""
    optimizer_steps: int
    """Applied to the slot so far."""
    group_id: int
    """Group step that served it; calls with one id shared a forward where their signature agrees."""
    group_tenants: int
    """Tenants in that group."""
    group_samples: int
    encoded: int
    """Prefixes that this call caused to be encoded."""
    reused: int
    """Prefixes that this call found in the store."""
    device_seconds: float
    """Charged to the tenant for this call."""
    carried: int = 0
    """Prefixes whose features came with the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadProgress:
    """How far a training workload has come."""

    tenant: str
    workload: int
    kind: Literal["sft", "rl"]
    steps: int
    """Optimizer steps of this workload."""
    iterations: int
    """RL: updates finished; SFT: equal to ``steps``."""
    target: int
    """Steps (SFT) or iterations (RL) that finish it."""
    next_ordinal: int
    """SFT: first micro-batch not yet received; RL: first episode index not yet seen."""
    policy_version: int
    loss_first: float | None = None
    loss_last: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Newest values by name (``return_mean``, ``success_once``, ``kl``, ...)."""
    episodes: tuple[int, ...] = ()
    """RL: indices of the episodes that the newest update learnt from; none is ever in two updates."""
    dropped_stale: int = 0
    finished: bool = False
    error: str | None = None
    """Set when the workload failed: ``ErrorClass: message``."""
