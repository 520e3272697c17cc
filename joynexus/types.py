"""The data that crosses modules and processes: numpy and plain values, never torch, so that it ships cheaply.

Shapes use: ``b`` rows, ``c`` cameras in the policy's order, ``h`` and ``w`` pixels, ``s`` state, ``t`` horizon of an
action chunk, ``a`` action, ``n`` decisions (chunks) of a trajectory, ``p`` prefix positions, ``d`` their width, ``k``
K/V heads and ``e`` their width. Images are uint8 HWC; states and actions are in the environment's own units:
normalisation belongs to the policy and happens beside its module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8

from joynexus.errors import InvalidBatchError
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.tenant import PolicySpec

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:  # jaxtyping checks shapes and types on the bare class
    Array = np.ndarray

Arrays = dict[str, Array]
"""Named arrays of any type; first axis is the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Rows of what a policy looks at."""

    images: UInt8[Array, "b c h w 3"]
    """Cameras in the policy's order; ``c`` is 0 for a policy without vision. ``h`` and ``w`` are 0 where the frames
    were left out, because prefix features travel in their place; see :meth:`without_frames`."""
    image_mask: Bool[Array, "b c"]
    """False where a camera gave no frame; the frame is then ignored."""
    state: Float32[Array, "b s"]
    """Raw, not normalised."""
    instructions: tuple[str, ...]
    """One per row."""

    def __len__(self) -> int:
        return len(self.instructions)

    def rows(self, index: Sequence[int] | slice | Array) -> "Observation":
        """Return the rows that an index, a list of indices or a slice picks."""
        picked = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)]
        return Observation(
            images=self.images[picked],
            image_mask=self.image_mask[picked],
            state=self.state[picked],
            instructions=tuple(self.instructions[int(each)] for each in picked),
        )

    @staticmethod
    def concatenate(parts: "Sequence[Observation]") -> "Observation":
        """Stack the rows of several observations of one shape."""
        return Observation(
            images=np.concatenate([part.images for part in parts]),
            image_mask=np.concatenate([part.image_mask for part in parts]),
            state=np.concatenate([part.state for part in parts]),
            instructions=tuple(text for part in parts for text in part.instructions),
        )

    @property
    def has_frames(self) -> bool:
        """Whether what the cameras gave is here; True for a policy without vision, which lacks nothing."""
        return self.images.shape[1] == 0 or self.images.shape[2] > 0

    def without_frames(self) -> "Observation":
        """Return the same rows with frames of no pixels: to be learnt from only together with prefix features."""
        rows, cameras = self.images.shape[:2]
        return Observation(
            images=np.zeros((rows, cameras, 0, 0, 3), dtype=np.uint8),
            image_mask=self.image_mask,
            state=self.state,
            instructions=self.instructions,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.images.nbytes + self.image_mask.nbytes + self.state.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixArrays:
    """Prefix features as numpy arrays, to be shipped; :mod:`joynexus.models.prefix` converts both ways, exactly.

    Whoever receives them uses them for the tenant that sent them alone: nothing proves what they were computed from.
    """

    arrays: Arrays
    """``hidden`` [b, p, d], ``pad`` [b, p], and per layer ``key/0`` .. and ``value/0`` .. [b, k, p, e]; the numbers of
    ``bfloat16`` as uint16 of the same bits."""
    dtype: str
    """Of the features: ``float32`` or ``bfloat16``."""
    signature: str
    """Schema signature that they were computed under."""

    def __len__(self) -> int:
        return len(self.arrays["hidden"])

    def rows(self, index: Sequence[int] | slice | Array) -> "PrefixArrays":
        """Return copies of the rows that an index, a list of indices or a slice picks."""
        picked = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)]
        arrays = {name: each[picked] for name, each in self.arrays.items()}
        return PrefixArrays(arrays=arrays, dtype=self.dtype, signature=self.signature)

    @staticmethod
    def concatenate(parts: "Sequence[PrefixArrays]") -> "PrefixArrays":
        """Stack the rows of several features of one kind.

        Raises:
            InvalidBatchError: If they differ in signature, dtype, names or shapes.
        """
        first = parts[0]
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            raise InvalidBatchError(
                f"features: of {len(kinds)} kinds, signatures {sorted({part.signature for part in parts})}. "
                "Stack those of one policy and one backbone."
            )
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays}
        return PrefixArrays(arrays=arrays, dtype=first.dtype, signature=first.signature)

    def zeros(self, rows: int) -> "PrefixArrays":
        """Return rows of the same kind that hold nothing but zeros."""
        arrays = {name: np.zeros((rows, *each.shape[1:]), dtype=each.dtype) for name, each in self.arrays.items()}
        return PrefixArrays(arrays=arrays, dtype=self.dtype, signature=self.signature)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        exponent = np.uint16(0x7F80)  # of bfloat16: all ones in what is not finite
        numbers = [each for name, each in self.arrays.items() if name != "pad"]
        if self.dtype == "bfloat16":
            return not any(((each & exponent) == exponent).any() for each in numbers)
        return all(bool(np.isfinite(each).all()) for each in numbers)

    @property
    def kind(self) -> tuple[object, ...]:
        """Signature, dtype, and the names, types and shapes of one row's arrays: only equal kinds can be stacked."""
        shapes = sorted((name, each.dtype.str, each.shape[1:]) for name, each in self.arrays.items())
        return (self.signature, self.dtype, *shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in self.arrays.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewSpec:
    """Which frames a policy wants."""

    cameras: tuple[str, ...]
    """In the policy's order; empty renders nothing."""
    image_size: tuple[int, int]
    """Height and width in pixels."""


def broadcast_instructions(instructions: str | Sequence[str], rows: int) -> tuple[str, ...]:
    """Give every row its instruction: one string serves all, a sequence must have one per row.

    Raises:
        ValueError: If a sequence has another length than ``rows``.
    """
    if isinstance(instructions, str):
        return (instructions,) * rows
    if len(instructions) != rows:
        raise ValueError(f"{len(instructions)} instructions for {rows} rows. Give one per row, or one string for all.")
    return tuple(instructions)


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
class PredictRequest:
    """Rows that want an action chunk each."""

    tenant: str
    observation: Observation
    seeds: tuple[int, ...]
    """One per row: the row's noise depends on it alone, never on the rows beside it."""
    deterministic: bool = False
    """Act without exploration (mode of the distribution; flow modules still start from seeded noise)."""
    version: int | None = None
    """Ask for one resident version, such as 0, the untrained module; None takes the newest."""
    with_features: bool = False
    """Ask for the prefix features of the rows as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionChunk:
    """The answer to a :class:`PredictRequest`."""

    actions: Float32[Array, "b t a"]
    """Raw, in the environment's units and sign conventions."""
    policy_version: int
    """The one version that served all rows."""
    log_prob: Float32[Array, " b"] | None = None
    """Of the whole chunk, summed over its steps and dimensions."""
    value: Float32[Array, " b"] | None = None
    trace: Arrays = field(default_factory=dict[str, Array])
    """What the module needs to evaluate the same decision again (such as the action before its tanh)."""
    features: PrefixArrays | None = None
    """Of each row, where they were asked for."""
    prefix_seconds: float = 0.0
    """Device time of encoding one row on this replica, a moving mean; 0 where it has encoded none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One episode as a sequence of decisions (action chunks); index i of every array is decision i."""

    trajectory_id: str
    """Unique over the tenant's life: workload, episode and attempt."""
    tenant: str
    episode: int
    """Index of the episode in its workload; decides seed and initial state."""
    seed: int
    initial_state: int
    observation: Observation
    """What each decision was made from; n rows."""
    actions: Float32[Array, "n t a"]
    """Whole chunks as predicted; only the first ``num_steps[i]`` of chunk i were executed."""
    num_steps: Int64[Array, " n"]
    """Executed environment steps of each chunk."""
    rewards: Float32[Array, " n"]
    """Summed over the executed steps of each chunk."""
    log_prob: Float32[Array, " n"]
    values: Float32[Array, " n"]
    trace: Arrays
    """Of each decision; first axis n."""
    policy_versions: Int64[Array, " n"]
    """Version that made each decision."""
    terminated: bool
    """The task itself ended; nothing is bootstrapped."""
    truncated: bool
    """A time limit ended the episode; ``final_value`` counts."""
    final_value: float
    """Critic at the final observation (never the next episode's first); 0 if terminated."""
    success_once: bool
    success_at_end: bool
    features: PrefixArrays | None = None
    """Of each decision's observation, whose frames may then be left out; None where the trainer encodes."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def policy_version(self) -> int:
        """The oldest version that made a decision: what staleness is counted from."""
        return int(self.policy_versions.min())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        small = self.actions.nbytes + sum(each.nbytes for each in self.trace.values())
        features = 0 if self.features is None else self.features.nbytes
        return self.observation.nbytes + features + small + self.rewards.nbytes * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeReport:
    """What evaluation keeps of one episode."""

    episode: int
    seed: int
    initial_state: int
    status: Literal["success", "failure", "crash"]
    """``crash`` is an infrastructure fault and enters no success rate."""
    success_once: bool
    success_at_end: bool
    num_steps: int
    episode_return: float
    policy_version: int
    video: str | None = None
    error: str | None = None


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
