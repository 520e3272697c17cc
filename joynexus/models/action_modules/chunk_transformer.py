"""A transformer over the steps of the action chunk that sees the prefix: the network of flow matching and diffusion.

DiT (Peebles and Xie 2023, https://arxiv.org/abs/2212.09748): self-attention over the steps of the chunk and an MLP,
both modulated by the time through adaLN-zero; between them cross-attention to the prefix tokens and a state token, with
a plain norm and an output that starts at 0 (PixArt-alpha, https://arxiv.org/abs/2310.00426).
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import ActionModule, ModuleDims
from joynexus.models.action_modules.layers import reset_layers, sinusoids, visible_tokens
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec

LONGEST_WAVE = 10_000.0
"""Longest of the wavelengths that code positions and times, over 2π."""
TIME_SCALE = 1000.0
"""Times in [0, 1] are coded as positions in [0, 1000], as in DiT."""

KeysValues = tuple[Tensor, Tensor]
"""Each [b, heads, tokens, head_dim]."""


class Attention(nn.Module):
    """Multi-head attention whose keys and values may be computed ahead of the queries."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def keys_values(self, tokens: Float[Tensor, "b n w"]) -> KeysValues:
        """Return keys and values of tokens to attend to."""
        key, value = self.key_value(tokens).chunk(2, dim=-1)
        return self._split(key), self._split(value)

    def forward(
        self, tokens: Float[Tensor, "b t w"], seen: KeysValues, mask: Bool[Tensor, "b 1 1 n"] | None
    ) -> Float[Tensor, "b t w"]:
        """Attend from ``tokens`` to what ``seen`` holds, where ``mask`` is True."""
        mixed = functional.scaled_dot_product_attention(self._split(self.query(tokens)), *seen, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, tokens: Float[Tensor, "b n w"]) -> Float[Tensor, "b h n e"]:
        return tokens.view(*tokens.shape[:2], self._num_heads, -1).transpose(1, 2)


class Block(nn.Module):
    """adaLN self-attention, cross-attention, adaLN MLP; the identity at the start."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.self_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.self_attention = Attention(width, num_heads)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def zero_gates(self) -> None:
        """Make the block the identity."""
        for layer in (self.modulation, self.cross_attention.output):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        tokens: Float[Tensor, "b t w"],
        time: Float[Tensor, "b 1 w"],
        memory: KeysValues,
        mask: Bool[Tensor, "b 1 1 n"],
    ) -> Float[Tensor, "b t w"]:
        """Run the block over the action tokens.

        Args:
            tokens: One per step of the chunk.
            time: Code of the flow time.
            memory: Keys and values of prefix and state.
            mask: True at those that may be seen.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(functional.silu(time)).chunk(6, dim=-1)
        normed = self.self_norm(tokens) * (1 + scale) + shift
        tokens = tokens + gate * self.self_attention(normed, self.self_attention.keys_values(normed), None)
        tokens = tokens + self.cross_attention(self.cross_norm(tokens), memory, mask)
        normed = self.mlp_norm(tokens) * (1 + mlp_scale) + mlp_shift
        return tokens + mlp_gate * self.mlp(normed)


class ChunkTransformer(ActionModule):
    """f(x_t, t | prefix, state) over the chunk; what it stands for is up to the module that derives from it."""

    reads_keys_values: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    def __init__(
        self, spec: ActionModuleSpec, dims: ModuleDims, *, width: int, num_layers: int, num_heads: int
    ) -> None:
        """Size the layers.

        Args:
            spec: The module's own.
            dims: Sizes of prefix, state and action.
            width: Of the transformer.
            num_layers: Blocks.
            num_heads: Attention heads of a block; divides ``width``.
        """
        super().__init__(spec, dims)
        self._width = width
        self.prefix_norm = nn.LayerNorm(dims.prefix_dim)
        self.prefix_in = nn.Linear(dims.prefix_dim, width)
        self.state_in = nn.Linear(dims.state_dim, width) if dims.state_dim else None
        self.action_in = nn.Linear(dims.action_dim, width)
        self.step_code = nn.Parameter(torch.empty(dims.horizon, width))
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.final_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.action_out = nn.Linear(width, dims.action_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew; the answer starts at 0."""
        reset_layers(self, generator)
        nn.init.normal_(self.step_code, std=0.02, generator=generator)
        for block in self._blocks():
            block.zero_gates()
        for layer in (self.final_modulation, self.action_out):
            nn.init.zeros_(layer.weight)

    def remember(
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]
    ) -> tuple[list[KeysValues], Bool[Tensor, "b 1 1 n"]]:
        """Compute what the cross-attentions see, once for all steps of sampling.

        Args:
            prefix: Features; their place in the prefix is coded with sinusoids, so that image tokens keep theirs.
            state: Normalised state, one more token where there is one.

        Returns:
            Keys and values per block, and the mask of what may be seen.
        """
        places = torch.arange(prefix.length, dtype=torch.float32, device=prefix.hidden.device)
        tokens = self.prefix_in(self.prefix_norm(visible_tokens(prefix)))
        tokens = tokens + sinusoids(places, self._width, longest=LONGEST_WAVE)
        seen = ~prefix.pad
        if self.state_in is not None:
            tokens = torch.cat([tokens, self.state_in(state)[:, None]], dim=1)
            seen = torch.cat([seen, seen.new_ones(len(prefix), 1)], dim=1)
        seen = seen | ~seen.any(dim=1, keepdim=True)  # softmax over an empty set is NaN
        return [block.cross_attention.keys_values(tokens) for block in self._blocks()], seen[:, None, None]

    def denoise(
        self,
        noisy: Float[Tensor, "b t a"],
        time: Float[Tensor, " b"],
        memory: Sequence[KeysValues],
        mask: Bool[Tensor, "b 1 1 n"],
    ) -> Float[Tensor, "b t a"]:
        """Evaluate f at x_t and t in [0, 1], given what :meth:`remember` returned."""
        time_code = self.time_mlp(sinusoids(time * TIME_SCALE, self._width, longest=LONGEST_WAVE))[:, None]
        tokens = self.action_in(noisy) + self.step_code
        for block, seen in zip(self._blocks(), memory, strict=True):
            tokens = block(tokens, time_code, seen, mask)
        shift, scale = self.final_modulation(functional.silu(time_code)).chunk(2, dim=-1)
        return self.action_out(self.final_norm(tokens) * (1 + scale) + shift)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]


def hold_last_valid(actions: Float[Tensor, "b t a"], valid: Bool[Tensor, "b t"]) -> Float[Tensor, "b t a"]:
    """Replace every step that is not valid by the last valid one before it, or by 0 where there is none."""
    steps = torch.arange(actions.shape[1], device=actions.device)
    last = torch.where(valid, steps, -1).cummax(dim=1).values
    held = actions.gather(1, last.clamp(min=0)[..., None].expand_as(actions))
    return torch.where((last >= 0)[..., None], held, torch.zeros((), dtype=actions.dtype, device=actions.device))
