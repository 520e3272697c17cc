"""One group step: rows of many tenants through the backbone together, then each tenant's own part alone.

    prepare (each tenant)  ->  encode (all tenants of one signature, once)  ->  forward_backward (each tenant)

Rows whose features came with the call (:mod:`joynexus.training.carried`) are not hashed, looked up or encoded, and
what a tenant brought never enters the store that all share.

Nothing here changes a slot: a part that fails has done nothing. Every part begins and ends with the tenant's own
tensors, so that the numbers it computes are those that it would compute alone.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from joynexus.errors import JoyNexusError, NonFiniteError, TenantFailedError
from joynexus.models.adapters import adapting
from joynexus.models.backbone import Backbone
from joynexus.models.policy import encode
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.prefix_store import PrefixStore
from joynexus.observability.engine_usage import Kind
from joynexus.training.call_queue import QueuedCall
from joynexus.training.carried import GivenFeatures, given_features
from joynexus.training.losses import LossInputs, LossRows, find_loss
from joynexus.training.optimizer import gradient_norm
from joynexus.training.slot import TrainableState, TrainingSlot
from joynexus.training.validation import check_finite, counted_rows, counting_rows
from joynexus.types import Array, TrainingBatch

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Member:
    """One tenant's call in a group."""

    slot: TrainingSlot
    queued: QueuedCall
    state: TrainableState
    """The state it was prepared with: what it computes belongs to this one alone."""
    batch: TrainingBatch | None = None
    """Rows that count."""
    prefix: PrefixBatch | None = None
    """Rows that need features; None where all came with the call."""
    keys: list[bytes] = field(default_factory=list[bytes])
    ahead_s: float = 0.0
    """CPU seconds that another thread spent on prefix and keys."""
    given: GivenFeatures | None = None
    """Features that came with the call."""
    features: PrefixFeatures | None = None
    """Of all rows that count."""
    encoded: int = 0
    reused: int = 0
    carried: int = 0
    """Rows whose features came with the call."""
    began_at: float = 0.0
    """What its tenant had spent in this step before this call."""
    error: JoyNexusError | None = None
    """Why it takes no further part."""

    @property
    def num_rows(self) -> int:
        """Rows that count."""
        return 0 if self.batch is None else len(self.batch)

    @property
    def is_adapted(self) -> bool:
        """Whether it has rows whose prefixes are computed with its own adapter."""
        return self.error is None and self.prefix is not None and self.state.parts.adapter is not None

    @property
    def num_looked_up(self) -> int:
        """Rows whose features the store or the backbone has to give."""
        return 0 if self.prefix is None else len(self.prefix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """What a tenant's part came to, before anything of it takes effect."""

    gradient: dict[str, Tensor]
    """Of the *sum* of the row losses, each times its weight, by parameter name; emptied when it takes effect."""
    rows: int
    weight: float
    """Sum of the rows' weights; their number where all count alike."""
    generator: torch.Generator
    """The tenant's generator after this part's draws."""
    metrics: Mapping[str, float]
    features: tuple[Tensor | None, ...] = ()
    """Gradient of hidden states, keys and values, where an adapter needs it; see :mod:`joynexus.training.adapted`."""


def prepare(member: Member, backbone: Backbone) -> None:
    """Pick a call's rows, check them and bring them to the device; a failure is noted in the member."""
    call = member.queued.call
    assert call.batch is not None
    assert call.loss is not None
    try:
        function, _ = find_loss(call.loss)
        batch, counts = counted_rows(call.batch, function), counting_rows(call.batch, function)
        if len(batch) > 0:
            check_finite(batch)
            if member.queued.features is None:
                _prepare_features(member, batch, counts, backbone)
            else:
                held = [row for row, keep in zip(member.queued.features, counts, strict=True) if keep]
                member.features, member.reused = _gather(held, backbone.device), len(held)
        member.batch = batch
    except Exception as error:  # noqa: BLE001  # the tenant's boundary
        member.error = tenant_error(member.slot, error)


def _prepare_features(member: Member, batch: TrainingBatch, counts: Array, backbone: Backbone) -> None:
    """Take the features that a tenant brought with its call, and note the rows that have none.

    Args:
        member: Its call.
        batch: The rows that count.
        counts: Of all rows of the call, which count.
        backbone: What the rows are for.
    """
    seen, slot = batch.observation, member.slot
    if batch.num_featured:
        given = given_features(batch, slot.policy, slot.signature, backbone)
        member.carried = len(given.features)
        if member.carried == len(batch):
            member.features = given.features
            return
        member.given, seen = given, seen.rows(np.flatnonzero(~given.rows))
    maker, ahead = slot.row_maker(backbone), member.queued.ahead
    made = None if ahead is None or member.given is not None else ahead.take(maker)
    rows = maker.prepare(seen) if made is None else made.pick(np.flatnonzero(counts))
    member.prefix, member.keys, member.ahead_s = rows.prefix, rows.keys, rows.cpu_s
    if slot.policy.adapter is not None:  # its prefixes are of this version alone: nobody may find them
        member.keys, member.encoded = [], len(rows.keys)


def encode_group(members: Sequence[Member], backbone: Backbone, store: PrefixStore | None) -> None:
    """Give every member its features; those of all together where that works, else each alone.

    Args:
        members: Of one signature; those with an adapter are left out.
        backbone: Runs over what the store lacks, once for all.
        store: Where features are kept; None for members who reuse none.
    """
    waiting = [
        member for member in members if member.error is None and member.num_looked_up > 0 and not member.is_adapted
    ]
    if not waiting:
        return
    try:
        _encode(waiting, backbone, store)
    except Exception as error:
        if len(waiting) == 1:
            waiting[0].error = tenant_error(waiting[0].slot, error)
            return
        log.exception("joint forward of %d tenants failed; encoding each alone", len(waiting))
        for member in waiting:
            encode_group([member], backbone, store)


def _encode(members: Sequence[Member], backbone: Backbone, store: PrefixStore | None) -> None:
    prefixes = [member.prefix for member in members if member.prefix is not None]
    keys = [key for member in members for key in member.keys]
    features, count = encode(backbone, store, stack_prefixes(prefixes), keys, members[0].slot.signature)
    start = 0
    for member in members:
        stop = start + member.num_looked_up
        # A copy of its own: no module can reach a neighbour's rows, and memory is aligned as it would be alone.
        own = features if len(members) == 1 else features.slice(start, stop).map(Tensor.clone)
        member.features = own if member.given is None else member.given.merge(own)
        member.encoded = sum(count.encoded[start:stop])
        member.reused = member.num_looked_up - member.encoded
        start = stop


def forward_backward(member: Member, span: Callable[[Kind], AbstractContextManager[object]] = nullcontext) -> Computed:
    """Compute a tenant's loss and gradient, without changing anything of it.

    Args:
        member: Prepared, with features.
        span: Entered around the loss and around the gradient, to time them apart.

    Returns:
        The gradient of the sum over rows; without rows, none. With an adapter, its part is that of the module's own
        tokens alone, and the gradient of the features comes beside it.

    Raises:
        NonFiniteError: If a row's loss or the gradient is not finite.
    """
    state, batch, features = member.state, member.batch, member.features
    generator = torch.Generator()
    generator.set_state(state.generator.get_state())
    if batch is None or features is None:
        return Computed(gradient={}, rows=0, weight=0.0, generator=generator, metrics={"rows": 0.0})
    loss = member.queued.call.loss
    assert loss is not None
    function, parameters = find_loss(loss)
    leaves = [each for each in (features.hidden, *features.keys, *features.values) if each.requires_grad]
    with span("head_forward"), torch.enable_grad(), adapting(state.parts.adapter):
        rows = function.compute(state.parts.module, _inputs(state, batch, features, generator), parameters)
        total = rows.loss.sum() if rows.weights is None else (rows.loss * rows.weights).sum()
    if rows.loss.shape != (len(batch),):
        raise TenantFailedError(f"loss {loss.name!r}: gave {list(rows.loss.shape)}, need one number for each row.")
    _check_loss(rows.loss, batch)
    with span("backward"):
        gradients = torch.autograd.grad(total, [*state.parameters.values(), *leaves], allow_unused=True)
    gradient = _reached(state.parameters, gradients[: len(state.parameters)])
    norm = gradient_norm(gradient)
    if not norm < float("inf"):
        raise NonFiniteError(f"loss {loss.name!r}: the norm of its gradient is {norm}. Lower lr or check the data.")
    through = gradients[len(state.parameters) :]
    return Computed(
        gradient=gradient,
        rows=len(batch),
        weight=float(len(batch)) if rows.weights is None else float(rows.weights.sum()),
        generator=generator,
        metrics=_means(rows),
        features=through,
    )


def tenant_error(slot: TrainingSlot, error: Exception) -> JoyNexusError:
    """Turn whatever a tenant's part raised into a typed error, and log it with tenant and version.

    The error is made anew: the answer is kept, and a traceback would keep the tensors of its frames with it.
    """
    if isinstance(error, JoyNexusError):
        log.warning("tenant %s at version %d: %s", slot.tenant, slot.version, error)
        return type(error)(f"tenant {slot.tenant!r}: {error}")
    log.warning("tenant %s at version %d failed", slot.tenant, slot.version, exc_info=error)
    if isinstance(error, torch.OutOfMemoryError) and torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return TenantFailedError(
        f"tenant {slot.tenant!r}: its part of the step raised {type(error).__name__}: {error}. "
        "Nothing of it took effect; correct the call and submit it under the next number."
    )


def _inputs(
    state: TrainableState, batch: TrainingBatch, features: PrefixFeatures, generator: torch.Generator
) -> LossInputs:
    normalizer, device = state.parts.normalizer, features.hidden.device
    steps = ~torch.tensor(batch.action_is_pad, device=device)
    actions = normalizer.actions(torch.tensor(batch.actions, device=device))
    return LossInputs(
        prefix=features,
        state=normalizer.state(torch.tensor(batch.observation.state, device=device)),
        actions=torch.where(steps[..., None], actions, torch.zeros((), device=device)),
        steps=steps,
        extras={name: torch.tensor(value, device=device) for name, value in batch.extras.items()},
        generator=generator,
    )


def _reached(names: Iterable[str], gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Name the gradients, without those of parameters that the loss does not read."""
    return {name: each for name, each in zip(names, gradients, strict=True) if each is not None}


def _check_loss(rows: Tensor, batch: TrainingBatch) -> None:
    finite = torch.isfinite(rows.detach())
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"loss: {int((~finite).sum())} of {len(batch)} rows are not finite, first sample "
            f"{batch.sample_ids[first]!r}. Lower lr or check the data."
        )


def _means(rows: LossRows) -> dict[str, float]:
    loss, weights = rows.loss.detach(), rows.weights
    mean = loss.mean() if weights is None else (loss * weights).sum() / weights.sum()
    means = {"loss": float(mean), "rows": float(len(loss))}
    return means | {name: float(value.mean()) for name, value in rows.metrics.items()}


def stack_prefixes(parts: Sequence[PrefixBatch]) -> PrefixBatch:
    """Put the rows of several members together."""
    return PrefixBatch(
        images=torch.cat([part.images for part in parts]),
        image_mask=torch.cat([part.image_mask for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        token_mask=torch.cat([part.token_mask for part in parts]),
    )


def _gather(rows: Sequence[PrefixFeatures], device: torch.device) -> PrefixFeatures:
    """Copy single rows, wherever the store kept each, into one batch on the device."""
    return PrefixFeatures.concatenate([row.map(lambda each: each.to(device)) for row in rows])
