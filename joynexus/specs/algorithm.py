"""Learning rules: optimizer, learning-rate schedule and RL algorithms."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from joynexus.specs.base import Component, Fraction, Spec
from joynexus.specs.registry import OneOf


class ScheduleSpec(Spec):
    """Learning-rate schedule, stepped once per optimizer step (never per micro-batch)."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    total_steps: int | None = Field(default=None, ge=1)
    """Step at which the decay ends; None takes the workload's own length."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end as a fraction of ``lr``."""


class OptimizerSpec(Spec):
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), fused where torch has it."""

    lr: float = Field(default=3e-4, gt=0.0)
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Clip the tenant's whole gradient to this 2-norm; None never clips."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Learning rate over steps."""


class AlgorithmSpec(Component):
    """What every RL algorithm declares. ``implementation`` names its learner."""

    needs_log_prob: ClassVar[bool] = True
    """Whether the action module must give log-probability and value."""
    reads_features: ClassVar[bool] = False
    """Whether its learner hands on the prefix features of trajectories; they then come without frames."""

    def batch_rows(self) -> int:
        """Return the most rows of one gradient step, for the estimate of its memory."""
        return 64


class PpoSpec(AlgorithmSpec):
    """Proximal policy optimisation at the level of action chunks: one decision per chunk.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347.
    """

    implementation: ClassVar[str] = "joynexus.training.learners.ppo:PpoLearner"
    reads_features: ClassVar[bool] = True
    type: Literal["ppo"] = "ppo"
    num_epochs: int = Field(default=4, ge=1, le=100)
    """Passes over an iteration's chunks."""
    minibatch_size: int = Field(default=64, ge=1)
    """Chunks per gradient step; the last minibatch of an epoch may be smaller."""
    discount: Fraction = 0.99
    """Per chunk, not per environment step."""
    gae_lambda: Fraction = 0.95
    """0 is one-step TD, 1 is Monte Carlo."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio is clipped above at ``1 + clip_high``."""
    value_coefficient: float = Field(default=0.5, ge=0.0)
    """Weight of the value loss."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Clip the value's move from its old one; None does not clip."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Per tenant and iteration, never across tenants."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Of the whole action module, critic included."""

    def batch_rows(self) -> int:  # noqa: D102
        return self.minibatch_size


AnyAlgorithm = Annotated[AlgorithmSpec, OneOf("algorithms")]
"""Any registered RL algorithm, by ``type``."""
