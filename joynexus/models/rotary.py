"""Rotary position embedding, for backbones and the experts beside them.

Su et al. 2021, https://arxiv.org/abs/2104.09864, in the form of Llama: dimension i turns together with i + e/2.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def rotary_angles(
    positions: Int64[Tensor, "b q"], head_dim: int, *, base: float
) -> tuple[Float[Tensor, "b 1 q e"], Float[Tensor, "b 1 q e"]]:
    """Return cosines and sines of position / base^(2i/e), in float32, for all heads alike.

    Args:
        positions: Of each token in its row.
        head_dim: Width of a head, e; even.
        base: Longest of the wavelengths, over 2π.
    """
    exponents = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device) * (2.0 / head_dim)
    angles = positions[:, None, :, None].to(torch.float32) / base**exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: Float[Tensor, "b n q e"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b n q e"]:
    """Turn queries or keys by their angles, computing in the wider of the two types; the states' type stays."""
    first, second = states.chunk(2, dim=-1)
    return (states * cos + torch.cat([-second, first], dim=-1) * sin).to(states.dtype)
