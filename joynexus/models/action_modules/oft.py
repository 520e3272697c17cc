"""Parallel decoding of the whole chunk by regression: the recipe of OpenVLA-OFT on a frozen backbone.

Kim et al. 2025, https://arxiv.org/abs/2502.19645, Sec. 4: no tokens, no diffusion, one forward to all actions of the
chunk, L1 loss. As there, the head is a residual MLP with layer norms before each layer; other than there, the
backbone is frozen, so the head reads its tokens directly in place of trained action queries.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import ActionModule, Decision, ModuleDims, masked_row_mean
from joynexus.models.action_modules.layers import PrefixReader, reset_layers
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec, OftModuleSpec


class ResidualBlock(nn.Module):
    """x + gelu(W·norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Float[Tensor, "b w"]) -> Float[Tensor, "b w"]:
        """Run the block."""
        return hidden + functional.gelu(self.linear(self.norm(hidden)))


class OftModule(ActionModule):
    """Prefix tokens and state → residual MLP → chunk."""

    reads_keys_values: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, OftModuleSpec)
        width = spec.hidden_dim
        self.reader = PrefixReader(dims, token_dim=spec.token_dim, max_tokens=spec.max_prefix_tokens, width=width)
        self.blocks = nn.ModuleList([ResidualBlock(width) for _ in range(spec.num_layers - 1)])
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, dims.horizon * dims.action_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew; the last layer starts small, so that the first chunk is near the mean action."""
        reset_layers(self, generator)
        self.reader.balance(generator)
        nn.init.xavier_uniform_(self.leave.weight, gain=0.1, generator=generator)

    def predict(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Float[Tensor, "b t a"]:
        """Return the chunk of each row."""
        hidden = functional.gelu(self.reader(prefix, state))
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(self.norm(hidden)).view(-1, self.dims.horizon, self.dims.action_dim)

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the L1 distance of each row over its valid steps; nothing is drawn."""
        del generator
        predicted = self.predict(prefix, state)
        # Padded targets leave before the arithmetic: a NaN among them reaches neither the loss nor a gradient.
        target = torch.where(valid[..., None], actions, predicted.detach())
        return masked_row_mean((predicted - target).abs(), valid)

    @torch.no_grad()
    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        """Return the predicted chunk; the module has no noise, so both modes are the same."""
        del generators, deterministic
        return Decision(actions=self.predict(prefix, state))
