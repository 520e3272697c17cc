"""Action modules of the literature that come with no checkpoint of their own: binned tokens and diffusion."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from joynexus.specs.action_module import ActionModuleSpec


class DiscreteTokensModuleSpec(ActionModuleSpec):
    """Binned action tokens, all of a chunk decoded in parallel, with a value head; cross-entropy loss.

    Brohan et al. 2023 (RT-2), https://arxiv.org/abs/2307.15818; Kim et al. 2024 (OpenVLA),
    https://arxiv.org/abs/2406.09246. Actions have to be normalised to [-1, 1]: what lies beyond is in the last bin.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.discrete_tokens:DiscreteTokensModule"
    type: Literal["discrete_tokens"] = "discrete_tokens"
    gives_log_prob: ClassVar[bool] = True
    num_bins: int = Field(default=256, ge=2, le=4096)
    """Tokens of each dimension: bins of equal width over [-1, 1]."""
    hidden_dim: int = Field(default=256, ge=8, le=8192)
    """Width of the two MLPs (actor and critic)."""
    num_layers: int = Field(default=2, ge=1, le=16)
    """Hidden layers of each MLP."""
    slot_dim: int = Field(default=64, ge=1, le=4096)
    """Width of an action token's own vector, which all tokens turn into logits with the same weights."""
    token_dim: int = Field(default=32, ge=1, le=1024)
    """Each prefix token is projected to this width and kept apart."""
    max_prefix_tokens: int = Field(default=64, ge=1, le=4096)
    """Longest prefix that the module reads; longer ones are refused."""

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        inputs = self.token_dim * self.max_prefix_tokens + state_dim
        body = inputs * self.hidden_dim + (self.num_layers - 1) * self.hidden_dim**2
        tokens = self.hidden_dim * action_dim * horizon * self.slot_dim + self.slot_dim * self.num_bins
        return 2 * (prefix_dim * self.token_dim + body) + tokens + self.hidden_dim

    def longest_prefix(self) -> int | None:  # noqa: D102
        return self.max_prefix_tokens


class DiffusionModuleSpec(ActionModuleSpec):
    """Diffusion Policy: a transformer that takes noise off the action chunk, sampled with DDIM.

    Chi et al. 2023, https://arxiv.org/abs/2303.04137; Song et al. 2021, https://arxiv.org/abs/2010.02502.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.diffusion:DiffusionModule"
    type: Literal["diffusion"] = "diffusion"
    hidden_dim: int = Field(default=128, ge=16, le=4096)
    """Width of the transformer."""
    num_layers: int = Field(default=4, ge=1, le=64)
    """Blocks, each self-attention, cross-attention and MLP."""
    num_heads: int = Field(default=4, ge=1, le=64)
    """Attention heads; divides ``hidden_dim``."""
    num_noise_levels: int = Field(default=100, ge=2, le=10_000)
    """Steps of the noise schedule in training."""
    num_sampling_steps: int = Field(default=10, ge=1, le=10_000)
    """DDIM steps from noise to actions, at most ``num_noise_levels``."""
    clip_range: float = Field(default=1.0, gt=0.0)
    """While sampling, normalised actions are kept in [-clip_range, clip_range]: 1 is for ``min_max``; take more with
    ``quantile`` or ``mean_std``, or actions beyond it can't be given."""

    @model_validator(mode="after")
    def _check(self) -> "DiffusionModuleSpec":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide hidden_dim {self.hidden_dim}")
        if self.num_sampling_steps > self.num_noise_levels:
            raise ValueError(
                f"num_sampling_steps {self.num_sampling_steps} is more than num_noise_levels {self.num_noise_levels}"
            )
        return self

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        width = self.hidden_dim
        block = 22 * width * width  # self- and cross-attention 8, MLP 8, adaptive norms 6
        ends = width * (prefix_dim + state_dim + 2 * action_dim + horizon + 2 * width)
        return self.num_layers * block + ends
