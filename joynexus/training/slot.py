"""A tenant's place in the training engine: all that is its own, and nothing else.

Everything in a slot changes under its lock, in one piece per call, after the forward: a call that fails, or that is
overtaken by ``load_state``, has changed nothing. A checkpoint taken at any time is the state between two calls.
"""

import hashlib
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from joynexus.models.backbone import Backbone
from joynexus.models.policy_parts import PolicyParts
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.training.ahead import RowMaker
from joynexus.training.call_queue import CallQueue, QueuedCall
from joynexus.training.initial import initial_version
from joynexus.training.optimizer import Moments, TenantOptimizer
from joynexus.training.schedule import learning_rate
from joynexus.types import PolicySnapshot, PolicyStats

COPIES_PER_PARAMETER = 3
"""Of a float32 number: parameter, accumulated gradient, the gradient being computed. The two moments come on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """A gradient that waits for its optimizer step: the *sum* over rows, with their number and weight.

    Dividing at the step, by the weight of all rows, makes micro-batches of any sizes weigh as much as their union.
    """

    gradient: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By parameter name; without those that no loss has reached. The tensors are never changed in place."""
    rows: int = 0
    weight: float = 0.0
    """The number of rows, where all count alike."""

    def plus(self, gradient: dict[str, Tensor], rows: int, weight: float) -> "Accumulated":
        """Return the sum, leaving this one as it is; the gradient that is added is consumed, tensor by tensor."""
        total = dict(self.gradient)
        for name in list(gradient):
            more = gradient.pop(name)
            total[name] = total[name] + more if name in total else more
        return Accumulated(gradient=total, rows=self.rows + rows, weight=self.weight + weight)

    def take_mean(self) -> dict[str, Tensor]:
        """Turn the sum into the gradient of the mean over rows; this one holds no gradient any more.

        Each tensor of the sum is let go before the next is divided, so that both are never held at once. None is
        divided in place: autograd may give one tensor for two parameters, or a view of a smaller one.
        """
        return {name: self.gradient.pop(name) / self.weight for name in list(self.gradient)}


class TrainableState:
    """What training changes: parameters, moments, accumulated gradient, generator and counters."""

    def __init__(
        self, parts: PolicyParts, *, seed: int, fused: bool | None = None, moments: Moments = "float32"
    ) -> None:
        """Start at step 0.

        Args:
            parts: Freshly built.
            seed: The tenant's; the generator's is derived from it.
            fused: Kernel of AdamW; None takes the fused one where torch has it.
            moments: Type that AdamW's moments are kept in.
        """
        self.parts = parts
        self.parameters: dict[str, nn.Parameter] = parts.parameters()
        self.optimizer = TenantOptimizer(self.parameters, fused=fused, moments=moments)
        self.generator = torch.Generator().manual_seed(_training_seed(seed))
        self.accumulated = Accumulated()
        self.optimizer_steps = 0
        """Over the tenant's life."""
        self.schedule_step = 0
        """Under the present schedule; a new workload starts again at 0."""

    def apply(self, accumulated: Accumulated, spec: OptimizerSpec, schedule_steps: int | None) -> dict[str, float]:
        """Make one optimizer step, and forget the accumulated gradient.

        Args:
            accumulated: The gradient to apply, which is consumed, whether the step succeeds or not, and so must be
                nobody else's, as what :meth:`Accumulated.plus` gives. Without rows the step is skipped and not counted.
            spec: Optimizer of this step.
            schedule_steps: Length of the schedule where the spec leaves it open.

        Returns:
            ``lr``, ``grad_norm`` (before clipping), ``accumulated_rows``, and ``skipped``: 1 where nothing counted.

        Raises:
            NonFiniteError: If the gradient is not finite; nothing was changed.
        """
        lr = learning_rate(spec, self.schedule_step, schedule_steps)
        skipped = accumulated.rows == 0
        norm = 0.0 if skipped else self.optimizer.step(accumulated.take_mean(), spec, lr)
        self.accumulated = Accumulated()
        if not skipped:
            self.optimizer_steps += 1
            self.schedule_step += 1
        return {"lr": lr, "grad_norm": norm, "accumulated_rows": accumulated.rows, "skipped": float(skipped)}

    def reset_optimizer(self) -> None:
        """Forget moments, accumulated gradient and the place in the schedule, as a new workload does."""
        last = self.optimizer
        self.optimizer = TenantOptimizer(self.parameters, fused=last.fused, moments=last.moments)
        self.accumulated = Accumulated()
        self.schedule_step = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotStatus:
    """What the engine tells of a slot."""

    tenant: str
    signature: str
    """Schema signature: slots that share it share forwards."""
    version: int
    optimizer_steps: int
    """Over the tenant's life."""
    schedule_step: int
    """Under the present learning-rate schedule."""
    accumulated_rows: int
    """Rows whose gradient waits for an optimizer step."""
    next_sequence: int
    """Number that the next call must have."""
    queued_calls: int
    num_parameters: int
    slot_bytes: int
    """Device memory at its peak, activations apart."""


class TrainingSlot:
    """One tenant's slot."""

    def __init__(
        self,
        tenant: str,
        policy: PolicySpec,
        parts: PolicyParts,
        *,
        seed: int,
        stats: PolicyStats | None,
        moments: Moments = "float32",
    ) -> None:
        self.tenant = tenant
        self.policy = policy
        self.seed = seed
        self.stats = stats
        self.signature = parts.signature
        self.lock = threading.Lock()
        """Held while something changes or is copied; never during a forward."""
        self.calls = CallQueue()
        self.state = TrainableState(parts, seed=seed, moments=moments)
        """Replaced as a whole by ``load_state``."""
        self.version = 0
        self.is_closed = False
        self.prefix_keys: set[bytes] = set()
        """Rows of the prefix store that this tenant has used; only the thread in ``step`` touches it."""
        self.seconds_per_row: float | None = None
        """Measured cost of the tenant's own part, to serve short parts of a group first."""

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(each.numel() for each in self.state.parameters.values())

    @property
    def nbytes(self) -> int:
        """Device memory of the slot at its peak, activations apart."""
        return slot_bytes(self.num_parameters, self.state.optimizer.moments)

    def row_maker(self, backbone: Backbone) -> RowMaker:
        """Return what turns the tenant's observations into prefixes now."""
        parts = self.state.parts
        return RowMaker(backbone=backbone, policy=self.policy, normalizer=parts.normalizer, signature=self.signature)

    def head(self) -> QueuedCall | None:
        """Return the call that is next."""
        with self.lock:
            return self.calls.head

    def status(self) -> SlotStatus:
        """Describe the slot."""
        with self.lock:
            return SlotStatus(
                tenant=self.tenant,
                signature=self.signature,
                version=self.version,
                optimizer_steps=self.state.optimizer_steps,
                schedule_step=self.state.schedule_step,
                accumulated_rows=self.state.accumulated.rows,
                next_sequence=self.calls.next_sequence,
                queued_calls=len(self.calls),
                num_parameters=self.num_parameters,
                slot_bytes=self.nbytes,
            )

    def expected_seconds(self, rows: int) -> float:
        """Estimate the cost of this tenant's own part of a group; from the size of the module until measured."""
        per_row = self.seconds_per_row
        return rows * (self.num_parameters * 1e-9 if per_row is None else per_row)

    def measured(self, seconds: float, rows: int) -> None:
        """Learn from the cost of a part."""
        latest = seconds / max(rows, 1)
        known = self.seconds_per_row
        self.seconds_per_row = latest if known is None else 0.7 * known + 0.3 * latest

    def snapshot(self) -> PolicySnapshot:
        """Copy the present parameters under the present version."""
        with self.lock:
            return make_snapshot(self, self.state.parts, self.version)


def make_snapshot(slot: TrainingSlot, parts: PolicyParts, version: int) -> PolicySnapshot:
    """Copy all that a version is made of to host memory."""
    return PolicySnapshot(
        tenant=slot.tenant,
        version=version,
        policy=slot.policy,
        parameters={name: each.detach().cpu().numpy().copy() for name, each in parts.tensors().items()},
        stats=slot.stats,
        seed=slot.seed,
    )


def base_snapshot(slot: TrainingSlot, backbone: Backbone) -> PolicySnapshot:
    """Build version 0 again, from the seed or from what the policy started from, with the slot's statistics.

    Raises:
        SpecError: If ``policy.init_from`` is gone.
        CheckpointError: If it is damaged.
    """
    parts, _ = initial_version(slot.policy, backbone, seed=slot.seed, stats=slot.stats, owner=slot.tenant)
    return make_snapshot(slot, parts, version=0)


def slot_bytes(num_parameters: int, moments: Moments) -> int:
    """Device memory of a slot with so many parameters, at its peak, activations apart."""
    return num_parameters * (4 * COPIES_PER_PARAMETER + 2 * (4 if moments == "float32" else 2))


def _training_seed(seed: int) -> int:
    """Derive the generator's seed, so that its draws are not those of the initial parameters."""
    return int.from_bytes(hashlib.sha256(f"training/{seed}".encode()).digest()[:7], "big")
