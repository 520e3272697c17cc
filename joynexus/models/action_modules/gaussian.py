"""A tanh-squashed Normal over the whole chunk, with a value head: the policy for PPO.

Haarnoja et al. 2018, App. C, https://arxiv.org/abs/1801.01290. A decision is one chunk: u ~ N(μ, std), a = tanh(u),

    log π(a) = Σ over steps and dimensions of [ log N(u; μ, std) - log(1 - tanh²(u)) ].

The trace of a decision is u itself: going back from a would lose all precision near ±1. Actor and critic are two
networks with tanh units and orthogonal weights, the last layer of the actor near 0 (Andrychowicz et al. 2021,
https://arxiv.org/abs/2006.05990). std does not depend on the observation; its logarithm is kept in [-5, 2].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import (
    ActionModule,
    Decision,
    Evaluation,
    ModuleDims,
    masked_row_mean,
    randn_rows,
)
from joynexus.models.action_modules.layers import PrefixMlp, steady_softplus
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec, GaussianModuleSpec

PRE_TANH = "pre_tanh"
"""Name of u, [b t a], in a trace."""
LOG_STD_RANGE = (-5.0, 2.0)
LOG_2PI = math.log(2 * math.pi)


class GaussianModule(ActionModule):
    """Actor, critic and log std."""

    reads_keys_values: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, GaussianModuleSpec)
        self.actor = _mlp(spec, dims, dims.horizon * dims.action_dim)
        self.critic = _mlp(spec, dims, 1)
        self.log_std = nn.Parameter(torch.empty(dims.horizon, dims.action_dim))
        self._initial_log_std = spec.initial_log_std

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew; the first policy is a Normal around 0 with the spec's std."""
        self.actor.reset_parameters(generator, output_gain=0.01)
        self.critic.reset_parameters(generator, output_gain=1.0)
        nn.init.constant_(self.log_std, self._initial_log_std)

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the squared distance of tanh(μ), the deterministic action, over each row's valid steps.

        Not the likelihood: targets at or past ±1, which normalised demonstrations hold, have none. Critic and std get
        no gradient. Nothing is drawn.
        """
        del generator
        predicted = torch.tanh(self._mean(prefix, state))
        target = torch.where(valid[..., None], actions, predicted.detach())
        return masked_row_mean((predicted - target).square(), valid)

    @torch.no_grad()
    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        """Sample a chunk per row, or take tanh(μ); log-probability, value and trace are of the chunk taken."""
        mean, log_std = self._mean(prefix, state), self._log_std()
        pre_tanh = mean
        if not deterministic:
            noise = randn_rows(generators, *mean.shape[1:]).to(mean.device)
            pre_tanh = mean + log_std.exp() * noise
        return Decision(
            actions=torch.tanh(pre_tanh),
            log_prob=squashed_log_prob(pre_tanh, mean, log_std, softplus=steady_softplus),
            value=self.critic(prefix, state).squeeze(1),
            trace={PRE_TANH: pre_tanh},
        )

    def evaluate(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], trace: Mapping[str, Tensor]) -> Evaluation:
        """Score chunks taken earlier, with gradient.

        Args:
            prefix: Features that each decision was made from.
            state: Normalised state that each decision was made from.
            trace: As :meth:`act` gave it.

        Returns:
            ``entropy`` is that of the Normal before the tanh, which has a closed form; the entropy after it does not.
        """
        mean, log_std = self._mean(prefix, state), self._log_std()
        entropy = (log_std + 0.5 * (1 + LOG_2PI)).sum()
        return Evaluation(
            log_prob=squashed_log_prob(trace[PRE_TANH], mean, log_std),
            entropy=entropy.expand(len(prefix)),
            value=self.critic(prefix, state).squeeze(1),
        )

    def _mean(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Float[Tensor, "b t a"]:
        return self.actor(prefix, state).view(-1, self.dims.horizon, self.dims.action_dim)

    def _log_std(self) -> Float[Tensor, "*r t a"]:
        return self.log_std.clamp(*LOG_STD_RANGE)


def squashed_log_prob(
    pre_tanh: Float[Tensor, "b t a"],
    mean: Float[Tensor, "b t a"],
    log_std: Float[Tensor, "*r t a"],
    *,
    softplus: Callable[[Tensor], Tensor] = functional.softplus,
) -> Float[Tensor, " b"]:
    """Log-density of tanh(u) for u ~ N(μ, std), summed over steps and dimensions.

    log(1 - tanh²(u)) is taken as 2·(log 2 - u - softplus(-2u)), which is exact where tanh(u) has rounded to ±1.
    """
    normal = -0.5 * (((pre_tanh - mean) / log_std.exp()).square() + LOG_2PI) - log_std
    log_slope = 2 * (math.log(2) - pre_tanh - softplus(-2 * pre_tanh))
    return (normal - log_slope).sum(dim=(1, 2))


def _mlp(spec: GaussianModuleSpec, dims: ModuleDims, outputs: int) -> PrefixMlp:
    return PrefixMlp(
        dims,
        token_dim=spec.token_dim,
        max_tokens=spec.max_prefix_tokens,
        width=spec.hidden_dim,
        num_layers=spec.num_layers,
        outputs=outputs,
    )
