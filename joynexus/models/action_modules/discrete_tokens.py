"""Binned action tokens: each number of the chunk is one of N tokens, all decoded in parallel; with a value head.

Tokens as in RT-2 (Brohan et al. 2023, https://arxiv.org/abs/2307.15818) and OpenVLA (Kim et al. 2024,
https://arxiv.org/abs/2406.09246): bins of equal width over the normalised range [-1, 1],

    k = ⌊(a + 1)/2 · N⌋ in 0 … N-1        a = (2k + 1)/N - 1, the middle of bin k,

and cross-entropy. Decoding is parallel as in OpenVLA-OFT (Kim et al. 2025, https://arxiv.org/abs/2502.19645, Sec. 4.1):
given the observation, the tokens are independent,

    log π(a | o) = Σ over steps and dimensions of log softmax(z)[k],

so that log-probability and entropy are exact, and one forward gives the chunk. As there is no language model to train,
each token has a vector of its own, and all share one output layer, as the words of a language model do.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import (
    ActionModule,
    Decision,
    Evaluation,
    ModuleDims,
    masked_row_mean,
)
from joynexus.models.action_modules.layers import PrefixMlp, reset_layers
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.more_modules import DiscreteTokensModuleSpec

TOKENS = "tokens"
"""Name of k, [b t a], in a trace."""


def tokens_of(actions: Float[Tensor, "*b a"], num_bins: int) -> Int64[Tensor, "*b a"]:
    """Return the bin of each normalised number; what lies beyond [-1, 1] is in the first or last one."""
    return ((actions + 1) / 2 * num_bins).nan_to_num().clamp(0, num_bins - 1).floor().long()


def actions_of(tokens: Int64[Tensor, "*b a"], num_bins: int) -> Float[Tensor, "*b a"]:
    """Return the middle of each bin: a number is at most 1/N off."""
    return (2 * tokens + 1).to(torch.float32) / num_bins - 1


class DiscreteTokensModule(ActionModule):
    """Actor, its output layer for all tokens, and critic."""

    reads_keys_values: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, DiscreteTokensModuleSpec)
        self._num_bins = spec.num_bins

        def mlp(outputs: int) -> PrefixMlp:
            return PrefixMlp(
                dims,
                token_dim=spec.token_dim,
                max_tokens=spec.max_prefix_tokens,
                width=spec.hidden_dim,
                num_layers=spec.num_layers,
                outputs=outputs,
            )

        self.actor = mlp(dims.horizon * dims.action_dim * spec.slot_dim)
        self.token_norm = nn.LayerNorm(spec.slot_dim)
        self.token_out = nn.Linear(spec.slot_dim, spec.num_bins)
        self.critic = mlp(1)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew; the first policy is nearly uniform over the tokens."""
        self.actor.reset_parameters(generator, output_gain=1.0)
        reset_layers(self.token_norm, generator)
        reset_layers(self.token_out, generator)
        nn.init.orthogonal_(self.token_out.weight, gain=0.01, generator=generator)
        self.critic.reset_parameters(generator, output_gain=1.0)

    def logits(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Float[Tensor, "b t a n"]:
        """Return z: for each number of the chunk, one logit per token."""
        slots = self.actor(prefix, state).view(len(prefix), self.dims.horizon, self.dims.action_dim, -1)
        return self.token_out(functional.gelu(self.token_norm(slots)))

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the cross-entropy of each row's tokens over its valid steps; the critic gets no gradient.

        Nothing is drawn.
        """
        del generator
        # Padded targets leave before the arithmetic: a NaN among them reaches neither the loss nor a gradient.
        target = torch.where(valid[..., None], actions, torch.zeros((), dtype=actions.dtype, device=actions.device))
        scores = self.logits(prefix, state).log_softmax(dim=-1)
        picked = scores.gather(-1, tokens_of(target, self._num_bins)[..., None])[..., 0]
        return masked_row_mean((target - target) - picked, valid)  # a NaN has no bin, but it has to be seen

    @torch.no_grad()
    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        """Sample a chunk per row, or take the likeliest tokens; log-probability, value and trace are of that chunk."""
        scores = self.logits(prefix, state).log_softmax(dim=-1)
        if deterministic:
            tokens = scores.argmax(dim=-1)
        else:  # the token whose share of [0, 1] holds a uniform number
            shape = (self.dims.horizon, self.dims.action_dim, 1)
            uniform = torch.stack([torch.rand(shape, generator=each) for each in generators]).to(scores.device)
            passed = scores.exp().cumsum(dim=-1) <= uniform
            tokens = passed.sum(dim=-1).clamp(max=self._num_bins - 1)  # the shares may sum to less than 1
        return Decision(
            actions=actions_of(tokens, self._num_bins),
            log_prob=_log_prob(scores, tokens),
            value=self.critic(prefix, state).squeeze(1),
            trace={TOKENS: tokens},
        )

    def evaluate(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], trace: Mapping[str, Tensor]) -> Evaluation:
        """Score chunks taken earlier, with gradient.

        Args:
            prefix: Features that each decision was made from.
            state: Normalised state that each decision was made from.
            trace: As :meth:`act` gave it.
        """
        scores = self.logits(prefix, state).log_softmax(dim=-1)
        return Evaluation(
            log_prob=_log_prob(scores, trace[TOKENS]),
            entropy=-(scores.exp() * scores).sum(dim=(1, 2, 3)),
            value=self.critic(prefix, state).squeeze(1),
        )


def _log_prob(scores: Float[Tensor, "b t a n"], tokens: Int64[Tensor, "b t a"]) -> Float[Tensor, " b"]:
    return scores.gather(-1, tokens[..., None]).sum(dim=(1, 2, 3))
