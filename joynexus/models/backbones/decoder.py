"""Decoder layers of transformers' Llama-like language models, driven by hand.

Driving them keeps keys and values in our own tensors, lets all tokens of a prefix see each other, and lets a tenant's
tokens through the frozen layers with gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from joynexus.models.pauses import pause
from joynexus.models.rotary import rotate


def run_layers(
    layers: Iterable[Any],
    hidden: Float[Tensor, "b q d"],
    rotary: tuple[Float[Tensor, "b q e"], Float[Tensor, "b q e"]],
    seen: Bool[Tensor, "b k"],
    past_keys: Sequence[Float[Tensor, "b n p e"]],
    past_values: Sequence[Float[Tensor, "b n p e"]],
) -> tuple[Float[Tensor, "b q d"], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run layers over ``q`` tokens that see all of ``k`` = past + ``q`` where ``seen`` is True.

    Args:
        layers: Each with ``self_attn``, ``mlp`` and the two norms before them.
        hidden: Of the new tokens.
        rotary: Cosines and sines of their positions.
        seen: Past before new.
        past_keys: Per layer, after rotary embedding; empty where there is no past.
        past_values: As the keys.

    Returns:
        Hidden states before the final norm, and K (after rotary embedding) and V of past and new tokens per layer.
    """
    cos, sin = (each[:, None] for each in rotary)
    mask = seen[:, None, None, :]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for index, layer in enumerate(layers):
        pause()
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        heads = (*normed.shape[:2], -1, attention.head_dim)
        query = rotate(attention.q_proj(normed).view(heads).transpose(1, 2), cos, sin)
        key = rotate(attention.k_proj(normed).view(heads).transpose(1, 2), cos, sin)
        value = attention.v_proj(normed).view(heads).transpose(1, 2)
        if past_keys:
            key, value = torch.cat([past_keys[index], key], dim=2), torch.cat([past_values[index], value], dim=2)
        keys.append(key)
        values.append(value)
        groups = query.shape[1] // key.shape[1]
        mixed = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1), attn_mask=mask
        )
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden, tuple(keys), tuple(values)
