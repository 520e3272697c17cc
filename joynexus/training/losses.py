"""Losses: from one tenant's prefix features and batch to one number per row, with gradient.

A loss gives its rows apart and never their mean. The engine sums them, and divides by all rows of the accumulated
micro-batches when the optimizer steps, so that two micro-batches weigh exactly as much as their union. Where a family
weighs its rows, it sums them times their weights, and divides by the sum of these.

A loss never sees a masked row: rows whose ``valid`` is False are taken out before, and actions at padded steps are
set to 0, because NaN times 0 is NaN. Nor does it see another tenant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from joynexus.errors import InvalidBatchError, UnknownComponentError
from joynexus.models.action_module import ActionModule
from joynexus.models.prefix import PrefixFeatures
from joynexus.types import Loss

MAX_LOG_RATIO = 20.0
"""Beyond this the ratio of two policies is clipped: its exponential overflows, and infinity times 0 is NaN."""
TRACE = "trace/"
"""Extras with this prefix are what ``ActionModule.evaluate`` needs."""
VALID = "valid"
"""Extra that masks rows: False rows are taken out before anything is computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One tenant's rows; every row counts."""

    prefix: PrefixFeatures
    state: Float[Tensor, "b s"]
    """Normalised."""
    actions: Float[Tensor, "b t a"]
    """Normalised; 0 at padded steps."""
    steps: Bool[Tensor, "b t"]
    """False at padded steps."""
    extras: Mapping[str, Tensor]
    """First axis b."""
    generator: torch.Generator
    """The tenant's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRows:
    """What a loss answers."""

    loss: Float[Tensor, " b"]
    """With gradient."""
    weights: Float[Tensor, " b"] | None = None
    """How much each row counts in the mean; None where all count alike."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values per row [b], without gradient; reported as means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFunction:
    """A loss and what it reads; anything else in a batch is refused, so that no mask is ignored by misspelling it."""

    compute: Callable[[ActionModule, LossInputs, Mapping[str, float]], LossRows]
    extras: tuple[str, ...] = ()
    """Extras [b] float32 that a batch must hold."""
    parameters: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Parameters with their defaults; None switches a part off."""
    scores_trace: bool = False
    """Whether it reads ``trace/...`` and needs a module that gives log-probabilities."""
    supervises_actions: bool = True
    """Whether a row without one unpadded step is left out."""


def supervised(module: ActionModule, inputs: LossInputs, parameters: Mapping[str, float]) -> LossRows:
    """The module's own loss against the actions."""
    del parameters
    rows = module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator)
    return LossRows(loss=rows, weights=module.row_weights(inputs.steps))


def weighted(module: ActionModule, inputs: LossInputs, parameters: Mapping[str, float]) -> LossRows:
    """The module's own loss, each row times its ``weights``; the mean stays over rows, not over weights.

    Reward-weighted and advantage-weighted regression: Peng et al. 2019, https://arxiv.org/abs/1910.00177.
    """
    rows = supervised(module, inputs, parameters)
    loss = rows.loss * inputs.extras["weights"]
    return LossRows(loss=loss, weights=rows.weights, metrics={"unweighted_loss": rows.loss.detach()})


def ppo(module: ActionModule, inputs: LossInputs, parameters: Mapping[str, float]) -> LossRows:
    """Clipped policy loss, clipped value loss and entropy bonus, one decision per action chunk.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347. ``kl`` is the k3 estimate of KL(old, new), see
    http://joschu.net/blog/kl-approx.html.
    """
    extras = inputs.extras
    trace = {name.removeprefix(TRACE): value for name, value in extras.items() if name.startswith(TRACE)}
    now = module.evaluate(inputs.prefix, inputs.state, trace)
    log_ratio = (now.log_prob - extras["old_log_prob"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = 1.0 - parameters["clip_low"], 1.0 + parameters["clip_high"]
    advantages = extras["advantages"]
    policy_loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    value_loss = _value_loss(now.value, extras["old_value"], extras["returns"], parameters.get("value_clip"))
    loss = policy_loss + parameters["value_coefficient"] * value_loss - parameters["entropy_coefficient"] * now.entropy
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": now.entropy,
        "kl": (ratio - 1.0) - log_ratio,
        "clip_fraction": ((ratio < low) | (ratio > high)).float(),
    }
    return LossRows(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


def _value_loss(
    value: Float[Tensor, " b"], old: Float[Tensor, " b"], returns: Float[Tensor, " b"], clip: float | None
) -> Float[Tensor, " b"]:
    """Half the squared error; with a clip, of the value or its clipped move, whichever is worse."""
    loss = 0.5 * (value - returns).square()
    if clip is None:
        return loss
    clipped = old + (value - old).clamp(-clip, clip)
    return torch.maximum(loss, 0.5 * (clipped - returns).square())


LOSSES: dict[str, LossFunction] = {
    "supervised": LossFunction(compute=supervised),
    "weighted": LossFunction(compute=weighted, extras=("weights",)),
    "ppo": LossFunction(
        compute=ppo,
        extras=("advantages", "returns", "old_log_prob", "old_value"),
        parameters={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "value_coefficient": 0.5,
            "value_clip": None,
            "entropy_coefficient": 0.0,
        },
        scores_trace=True,
        supervises_actions=False,
    ),
}
"""Losses by the name that a call gives. A learner of a third party may add its own."""


def find_loss(loss: Loss) -> tuple[LossFunction, dict[str, float]]:
    """Look a loss up, and complete its parameters.

    Args:
        loss: Name and parameters as the call gives them.

    Returns:
        The function, and its parameters without those that are switched off.

    Raises:
        UnknownComponentError: If there is no such loss, naming those that there are.
        InvalidBatchError: If it has no such parameter.
    """
    function = LOSSES.get(loss.name)
    if function is None:
        raise UnknownComponentError(f"loss {loss.name!r}: unknown. Use one of {sorted(LOSSES)}.")
    unknown = sorted(set(loss.parameters) - set(function.parameters))
    if unknown:
        raise InvalidBatchError(
            f"loss {loss.name!r}: unknown parameters {unknown}. Use some of {sorted(function.parameters)}."
        )
    complete = {**function.parameters, **loss.parameters}
    return function, {name: value for name, value in complete.items() if value is not None}
