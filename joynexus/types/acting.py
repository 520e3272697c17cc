"""Decisions, and the episodes that they make up."""

from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float32, Int64

from joynexus.types.arrays import Array, Arrays
from joynexus.types.observation import Observation, PrefixArrays


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
