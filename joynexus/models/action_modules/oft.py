"""Parallel decoding of the whole chunk by regression: the recipe of OpenVLA-OFT on a frozen backbone.

Kim et al. 2025, https://arxiv.org/abs/2502.19645, Sec. 4: no tokens, no diffusion, one forward to all actions of the
chunk, L1 loss. As there, the head is a residual MLP with layer norms before each layer; other than there, the
backbone is frozen, so the head reads its tokens directly in place of trained action queries.

``reads: queries`` keeps the queries: the prompt ends with one action token per step, and one MLP turns the hidden state
of each into one action, as in StarVLA's QwenOFT, whose parameter names it has.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import InvalidBatchError
from joynexus.models.action_module import ActionModule, Decision, ModuleDims, masked_row_mean
from joynexus.models.action_modules.layers import PrefixReader, reset_layers, visible_tokens
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


class QueryBlock(nn.Module):
    """x + relu(W·norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, hidden: Float[Tensor, "b t w"]) -> Float[Tensor, "b t w"]:
        """Run the block."""
        return self.ffn(hidden) + hidden


class QueryMlp(nn.Module):
    """Hidden state of an action token → action of its step."""

    def __init__(self, inputs: int, *, width: int, num_blocks: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList([QueryBlock(width) for _ in range(num_blocks)])
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, queries: Float[Tensor, "b t d"]) -> Float[Tensor, "b t a"]:
        """Run the MLP on each query by itself."""
        hidden = functional.relu(self.fc1(self.layer_norm1(queries)))
        for block in self.mlp_resnet_blocks:
            hidden = block(hidden)
        return self.fc2(self.layer_norm2(hidden))


class OftModule(ActionModule):
    """Prefix tokens and state → residual MLP → chunk, or action tokens → MLP → one action each."""

    reads_keys_values: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, OftModuleSpec)
        width = spec.hidden_dim
        self._reads_queries, self._tail = spec.reads == "queries", spec.query_tail
        if self._reads_queries:
            self.model = QueryMlp(dims.prefix_dim, width=width, num_blocks=spec.num_layers, outputs=dims.action_dim)
            return
        self.reader = PrefixReader(dims, token_dim=spec.token_dim, max_tokens=spec.max_prefix_tokens, width=width)
        self.blocks = nn.ModuleList([ResidualBlock(width) for _ in range(spec.num_layers - 1)])
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, dims.horizon * dims.action_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew; the last layer starts small, so that the first chunk is near the mean action."""
        reset_layers(self, generator)
        if not self._reads_queries:
            self.reader.balance(generator)
        last = self.model.fc2 if self._reads_queries else self.leave
        nn.init.xavier_uniform_(last.weight, gain=0.1, generator=generator)

    def predict(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Float[Tensor, "b t a"]:
        """Return the chunk of each row."""
        if self._reads_queries:
            return self.model(self.queries(prefix))
        hidden = functional.gelu(self.reader(prefix, state))
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(self.norm(hidden)).view(-1, self.dims.horizon, self.dims.action_dim)

    def queries(self, prefix: PrefixFeatures) -> Float[Tensor, "b t d"]:
        """Return the hidden states of the action tokens: those ``query_tail`` in front of a row's last real token.

        Raises:
            InvalidBatchError: If the prefix is shorter than queries and tail.
        """
        needed = self.dims.horizon + self._tail
        if prefix.length < needed:
            raise InvalidBatchError(
                f"prefix: it has {prefix.length} tokens, the action tokens and what is behind them are {needed}. "
                "Write one action token per step into prompt_template, and count query_tail anew."
            )
        places = torch.arange(prefix.length, device=prefix.pad.device)
        last = torch.where(prefix.pad, -1, places).amax(
            dim=1
        )  # the end of the prompt, on whichever side its padding is
        steps = torch.arange(1 - needed, 1 - self._tail, device=last.device)
        chosen = (last[:, None] + steps).clamp(min=0)
        tokens = visible_tokens(prefix)
        return tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[-1]))

    def loss_elements(
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], actions: Float[Tensor, "b t a"]
    ) -> Float[Tensor, "b t a"]:
        """Return |prediction - target| per element."""
        return (self.predict(prefix, state) - actions).abs()

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
