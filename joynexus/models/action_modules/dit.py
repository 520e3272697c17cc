"""The diffusion transformer of GR00T, with the parameter names of its reference code.

Peebles and Xie 2023, https://arxiv.org/abs/2212.09748: attention and MLP behind layer norms that the flow time
modulates. The layers of even index attend to the prefix, those of odd index to the transformer's own tokens.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

TIME_FEATURES = 256
"""Sines and cosines that code the time for the adaptive norms."""
LONGEST_WAVE = 10_000.0
"""Longest of the wavelengths that code times, over 2π."""

KeysValues = tuple[Tensor, Tensor]
"""Each [b, heads, tokens, head_dim]."""


class Attention(nn.Module):
    """Multi-head attention whose keys and values may be computed ahead of the queries."""

    def __init__(self, width: int, *, num_heads: int, memory_dim: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(memory_dim, width)
        self.to_v = nn.Linear(memory_dim, width)
        self.to_out = nn.Sequential(nn.Linear(width, width))

    def keys_values(self, memory: Float[Tensor, "b n d"]) -> KeysValues:
        """Return keys and values of tokens to attend to."""
        return self._split(self.to_k(memory)), self._split(self.to_v(memory))

    def forward(
        self, tokens: Float[Tensor, "b t w"], seen: KeysValues, mask: Bool[Tensor, "b 1 1 n"] | None
    ) -> Float[Tensor, "b t w"]:
        """Attend from ``tokens`` to what ``seen`` holds, where ``mask`` is True."""
        mixed = functional.scaled_dot_product_attention(self._split(self.to_q(tokens)), *seen, attn_mask=mask)
        return self.to_out(mixed.transpose(1, 2).flatten(2))

    def _split(self, tokens: Float[Tensor, "b n w"]) -> Float[Tensor, "b h n e"]:
        return tokens.view(*tokens.shape[:2], self._num_heads, -1).transpose(1, 2)


class AdaptiveNorm(nn.Module):
    """norm(x)·(1 + scale(τ)) + shift(τ), τ the code of the flow time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, tokens: Float[Tensor, "b t w"], time: Float[Tensor, "b w"]) -> Float[Tensor, "b t w"]:
        """Normalise ``tokens``."""
        scale, shift = self.linear(functional.silu(time))[:, None].chunk(2, dim=-1)
        return self.norm(tokens) * (1 + scale) + shift


class GeluProjection(nn.Module):
    """gelu(W·x), the tanh form."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, outputs)

    def forward(self, tokens: Float[Tensor, "b t w"]) -> Float[Tensor, "b t o"]:
        """Map ``tokens``."""
        return functional.gelu(self.proj(tokens), approximate="tanh")


class FeedForward(nn.Module):
    """W₂·gelu(W₁·x); the empty place in the middle is the reference's dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GeluProjection(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, tokens: Float[Tensor, "b t w"]) -> Float[Tensor, "b t w"]:
        """Map ``tokens``."""
        return self.net(tokens)


class DitBlock(nn.Module):
    """x + attention(adaptive norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, *, num_heads: int, memory_dim: int) -> None:
        super().__init__()
        self.norm1 = AdaptiveNorm(width)
        self.attn1 = Attention(width, num_heads=num_heads, memory_dim=memory_dim)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=False)
        self.ff = FeedForward(width)

    def forward(
        self,
        tokens: Float[Tensor, "b t w"],
        time: Float[Tensor, "b w"],
        memory: KeysValues | None,
        mask: Bool[Tensor, "b 1 1 n"],
    ) -> Float[Tensor, "b t w"]:
        """Run the block; without ``memory`` the tokens attend to each other."""
        normed = self.norm1(tokens, time)
        seen, allowed = (self.attn1.keys_values(normed), None) if memory is None else (memory, mask)
        tokens = tokens + self.attn1(normed, seen, allowed)
        return tokens + self.ff(self.norm3(tokens))


class TimestepEncoder(nn.Module):
    """Code of the time bucket for the adaptive norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.ModuleDict(
            {"linear_1": nn.Linear(TIME_FEATURES, width), "linear_2": nn.Linear(width, width)}
        )

    def forward(self, bucket: Int64[Tensor, " b"]) -> Float[Tensor, "b w"]:
        """Return τ."""
        half = TIME_FEATURES // 2
        waves = waves_of(bucket, half, last=half - 1)
        code = torch.cat([waves.cos(), waves.sin()], dim=-1)
        return self.timestep_embedder["linear_2"](functional.silu(self.timestep_embedder["linear_1"](code)))


class Dit(nn.Module):
    """Diffusion transformer: blocks, then an adaptive norm and a projection."""

    def __init__(self, width: int, *, num_layers: int, num_heads: int, memory_dim: int, output_dim: int) -> None:
        """Size the layers.

        Args:
            width: Of a token.
            num_layers: Number of blocks.
            num_heads: Attention heads; divides ``width``.
            memory_dim: Width of a prefix token.
            output_dim: Width of what comes out.
        """
        super().__init__()
        self.timestep_encoder = TimestepEncoder(width)
        dims = [width if index % 2 else memory_dim for index in range(num_layers)]
        self.transformer_blocks = nn.ModuleList(
            [DitBlock(width, num_heads=num_heads, memory_dim=each) for each in dims]
        )
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, output_dim)

    def keys_values(self, prefix: Float[Tensor, "b p d"]) -> list[KeysValues | None]:
        """Return what each block sees of the prefix; None where it looks at the tokens themselves."""
        return [None if index % 2 else block.attn1.keys_values(prefix) for index, block in enumerate(self._blocks())]

    def forward(
        self,
        tokens: Float[Tensor, "b t w"],
        bucket: Int64[Tensor, " b"],
        memory: Sequence[KeysValues | None],
        mask: Bool[Tensor, "b 1 1 p"],
    ) -> Float[Tensor, "b t h"]:
        """Run all blocks over state, future and action tokens."""
        time = self.timestep_encoder(bucket)
        for block, seen in zip(self._blocks(), memory, strict=True):
            tokens = block(tokens, time, seen, mask)
        shift, scale = self.proj_out_1(functional.silu(time))[:, None].chunk(2, dim=-1)
        return self.proj_out_2(self.norm_out(tokens) * (1 + scale) + shift)

    def _blocks(self) -> list[DitBlock]:
        return [block for block in self.transformer_blocks if isinstance(block, DitBlock)]


class PrefixBlock(nn.Module):
    """Self-attention over the prefix tokens and an MLP, both behind a layer norm: what GR00T N1.5 and N1.7 add."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, num_heads=num_heads, memory_dim=width)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, tokens: Float[Tensor, "b p d"], mask: Bool[Tensor, "b 1 1 p"]) -> Float[Tensor, "b p d"]:
        """Run the block."""
        normed = self.norm1(tokens)
        tokens = tokens + self.attn1(normed, self.attn1.keys_values(normed), mask)
        return tokens + self.ff(self.norm3(tokens))


class PrefixTransformer(nn.Module):
    """Self-attention layers over the prefix tokens."""

    def __init__(self, width: int, *, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([PrefixBlock(width, num_heads=num_heads) for _ in range(num_layers)])

    def forward(self, tokens: Float[Tensor, "b p d"], mask: Bool[Tensor, "b 1 1 p"]) -> Float[Tensor, "b p d"]:
        """Run all layers."""
        for block in self.transformer_blocks:
            tokens = block(tokens, mask)
        return tokens


def waves_of(bucket: Int64[Tensor, " b"], half: int, *, last: int) -> Float[Tensor, "b n"]:
    """Return the angles t·10000^(-i / ``last``) for i = 0 to ``half - 1``."""
    exponents = torch.arange(half, dtype=torch.float32, device=bucket.device) / last
    return bucket.float()[:, None] * torch.exp(-math.log(LONGEST_WAVE) * exponents)
