"""The action expert of π0 and π0.5: Gemma layers, each beside a layer of the frozen PaliGemma.

Black et al. 2024, https://arxiv.org/abs/2410.24164. In every layer the tokens of the suffix (state, noisy actions) and
of the prefix attend jointly, each with its own weights. No prefix token sees the suffix, so what the frozen layer gives
to it are keys and values that do not depend on the tenant; they are computed once, and the expert's part is

    out = softmax(q_suffix · [K_prefix; k_suffix]ᵀ / √d) · [V_prefix; v_suffix]

exactly as in the joint pass. The position of a suffix token is the number of valid tokens before it.

Gemma (Gemma Team 2024, https://arxiv.org/abs/2403.08295): RMS norms with gain 1 + w, a gated MLP with the tanh form of
GELU, rotary positions of base 10000. π0.5 makes the norms adaptive (adaRMS): scale, shift and gate of each come from
the flow time, as in DiT (https://arxiv.org/abs/2212.09748).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import SpecError
from joynexus.models.action_module import ModuleDims
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.rotary import rotate
from joynexus.specs.vla_modules import GemmaExpertSpec

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the expert reads of the prefix, the same for all Euler steps."""

    keys: tuple[Float[Tensor, "b k p e"], ...]
    """Per layer, in float32."""
    values: tuple[Float[Tensor, "b k p e"], ...]
    seen: Bool[Tensor, "b p"]
    """True at positions that hold something."""


def remember(prefix: PrefixFeatures) -> Memory:
    """Bring the prefix's keys and values to the expert's precision."""
    keys, values = (tuple(each.to(torch.float32) for each in part) for part in (prefix.keys, prefix.values))
    return Memory(keys=keys, values=values, seen=~prefix.pad)


class RmsNorm(nn.Module):
    """x / rms(x) · (1 + w)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(
        self, hidden: Float[Tensor, "b q w"], condition: Float[Tensor, "b w"] | None
    ) -> tuple[Float[Tensor, "b q w"], Tensor | float]:
        """Return the normed tokens and the gate of what is made of them: 1."""
        del condition
        return _over_rms(hidden) * (1 + self.weight), 1.0


class AdaRmsNorm(nn.Module):
    """x / rms(x) · (1 + scale(c)) + shift(c), and gate(c)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(
        self, hidden: Float[Tensor, "b q w"], condition: Float[Tensor, "b w"] | None
    ) -> tuple[Float[Tensor, "b q w"], Tensor | float]:
        """Return the normed tokens and the gate of what is made of them."""
        assert condition is not None
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return _over_rms(hidden) * (1 + scale) + shift, gate


class Attention(nn.Module):
    """Queries of the suffix against keys of prefix and suffix; several query heads share a K/V head."""

    def __init__(self, spec: GemmaExpertSpec) -> None:
        super().__init__()
        width, head_dim = spec.hidden_dim, spec.head_dim
        self._kv_heads, self._head_dim = spec.num_kv_heads, head_dim
        self.q_proj = nn.Linear(width, spec.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, spec.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, spec.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * head_dim, width, bias=False)

    def forward(
        self,
        normed: Float[Tensor, "b q w"],
        past: tuple[Float[Tensor, "b k p e"], Float[Tensor, "b k p e"]],
        rotary: tuple[Float[Tensor, "b 1 q e"], Float[Tensor, "b 1 q e"]],
        mask: Bool[Tensor, "b 1 q n"],
    ) -> Float[Tensor, "b q w"]:
        """Attend from the suffix to ``n`` = prefix + suffix tokens, where ``mask`` is True."""
        query = rotate(self._heads(self.q_proj(normed)), *rotary)
        key = torch.cat([past[0], rotate(self._heads(self.k_proj(normed)), *rotary)], dim=2)
        value = torch.cat([past[1], self._heads(self.v_proj(normed))], dim=2)
        # The query heads of one K/V head as more queries: no copies of the prefix's keys and values.
        groups, count = query.shape[1] // self._kv_heads, query.shape[2]
        folded = query.reshape(len(query), self._kv_heads, groups * count, self._head_dim)
        mixed = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(1, 1, groups, 1))
        return self.o_proj(mixed.reshape(query.shape).transpose(1, 2).flatten(2))

    def _heads(self, tokens: Float[Tensor, "b q n"]) -> Float[Tensor, "b h q e"]:
        return tokens.view(*tokens.shape[:2], -1, self._head_dim).transpose(1, 2)


class GatedMlp(nn.Module):
    """W_down(gelu(W_gate·x) ⊙ W_up·x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, tokens: Float[Tensor, "b q w"]) -> Float[Tensor, "b q w"]:
        """Run the network."""
        gate = functional.gelu(self.gate_proj(tokens), approximate="tanh")
        return self.down_proj(gate * self.up_proj(tokens))


class ExpertLayer(nn.Module):
    """x + g₁·attention(norm(x)), then x + g₂·mlp(norm(x)); the gates are 1 where the norms are plain."""

    def __init__(self, spec: GemmaExpertSpec, norm: type[RmsNorm] | type[AdaRmsNorm]) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = GatedMlp(spec.hidden_dim, spec.mlp_dim)
        self.input_layernorm = norm(spec.hidden_dim)
        self.post_attention_layernorm = norm(spec.hidden_dim)

    def forward(
        self,
        hidden: Float[Tensor, "b q w"],
        past: tuple[Float[Tensor, "b k p e"], Float[Tensor, "b k p e"]],
        rotary: tuple[Float[Tensor, "b 1 q e"], Float[Tensor, "b 1 q e"]],
        mask: Bool[Tensor, "b 1 q n"],
        condition: Float[Tensor, "b w"] | None,
    ) -> Float[Tensor, "b q w"]:
        """Run the layer."""
        normed, gate = self.input_layernorm(hidden, condition)
        hidden = hidden + gate * self.self_attn(normed, past, rotary, mask)
        normed, gate = self.post_attention_layernorm(hidden, condition)
        return hidden + gate * self.mlp(normed)


class ExpertLayers(nn.Module):
    """All layers and the final norm."""

    def __init__(self, spec: GemmaExpertSpec, norm: type[RmsNorm] | type[AdaRmsNorm]) -> None:
        super().__init__()
        self._head_dim = spec.head_dim
        self.layers = nn.ModuleList([ExpertLayer(spec, norm) for _ in range(spec.num_layers)])
        self.norm = norm(spec.hidden_dim)

    def forward(
        self,
        tokens: Float[Tensor, "b q w"],
        memory: Memory,
        sees: Bool[Tensor, "q q"],
        condition: Float[Tensor, "b w"] | None,
    ) -> Float[Tensor, "b q w"]:
        """Run the suffix behind a prefix; see :meth:`GemmaExpert.forward`."""
        rows, count = tokens.shape[:2]
        positions = memory.seen.sum(dim=1, keepdim=True) + torch.arange(count, device=tokens.device)
        rotary = gemma_angles(positions, self._head_dim)
        prefix = memory.seen[:, None].expand(rows, count, -1)
        mask = torch.cat([prefix, sees.expand(rows, count, count)], dim=2)[:, None]
        hidden = tokens
        for layer, *past in zip(self.layers, memory.keys, memory.values, strict=True):
            hidden = layer(hidden, tuple(past), rotary, mask, condition)
        return self.norm(hidden, condition)[0]


class GemmaExpert(nn.Module):
    """The layers under the name that the reference's checkpoints give them."""

    def __init__(self, spec: GemmaExpertSpec, dims: ModuleDims, *, adaptive: bool) -> None:
        """Size the layers.

        Args:
            spec: Sizes of the expert.
            dims: Sizes of what it stands beside.
            adaptive: Whether the norms are conditioned.

        Raises:
            SpecError: If the backbone's layers and heads are not those that the expert stands beside.
        """
        super().__init__()
        found = (*dims.kv_shape, dims.num_heads)
        need = (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.num_heads)
        if found != need:
            raise SpecError(
                f"action_module {spec.type!r}: (num_layers, num_kv_heads, head_dim, num_heads) are {need}, the "
                f"backbone's are {found}. Give the module the backbone's, and cut the backbone with its num_layers."
            )
        self.model = ExpertLayers(spec, AdaRmsNorm if adaptive else RmsNorm)

    def forward(
        self,
        tokens: Float[Tensor, "b q w"],
        memory: Memory,
        sees: Bool[Tensor, "q q"],
        condition: Float[Tensor, "b w"] | None = None,
    ) -> Float[Tensor, "b q w"]:
        """Run the suffix behind a prefix.

        Args:
            tokens: Of the suffix; each sees the whole valid prefix.
            memory: Of the prefix.
            sees: Which token of the suffix (row) sees which (column).
            condition: Of the adaptive norms.

        Returns:
            Hidden states after the final norm.
        """
        return self.model(tokens, memory, sees, condition)


def reset_expert(module: nn.Module, generator: torch.Generator) -> None:
    """Draw all linear layers inside a module anew, with variance 1 / inputs; plain norms become the identity.

    Adaptive norms start with gates of 0, so that each layer is the identity at first (adaLN-zero in DiT).
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            if "bias" in dict(layer.named_parameters()):
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, RmsNorm):
            nn.init.zeros_(layer.weight)
    for layer in module.modules():
        if isinstance(layer, AdaRmsNorm):
            nn.init.zeros_(layer.dense.weight)


def gemma_angles(
    positions: Int64[Tensor, "b q"], head_dim: int
) -> tuple[Float[Tensor, "b 1 q e"], Float[Tensor, "b 1 q e"]]:
    """Cosines and sines of the rotary embedding, rounded as the frozen layers' are, whose keys stand beside these."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].to(torch.float32) * (1.0 / ROTARY_BASE**pairs)
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def _over_rms(hidden: Float[Tensor, "b q w"]) -> Float[Tensor, "b q w"]:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + NORM_EPSILON)
