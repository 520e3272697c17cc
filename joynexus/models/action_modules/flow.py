"""What the field's flow-matching experts share: codes of the flow time, Euler's times, padded widths."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def time_code(time: Float[Tensor, " b"], width: int, *, min_period: float, max_period: float) -> Float[Tensor, "b w"]:
    """Code flow times as sines, then cosines, of ``width // 2`` periods, spaced geometrically.

    Computed in float64, as the reference does, whatever the type of ``time``; answered in that type.
    """
    share = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = min_period * (max_period / min_period) ** share
    angles = (2 * math.pi / period) * time.to(torch.float64)[:, None]
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(time.dtype)


def euler_times(num_steps: int) -> list[float]:
    """Return t of each Euler step from 1 towards 0: 1 + k·dt, rounded to float32 as the reference does.

    Unrounded, the sines of the shortest period move samples by up to 8e-5.
    """
    step = -1.0 / num_steps
    return [float(torch.tensor(1.0 + index * step, dtype=torch.float32)) for index in range(num_steps)]


def widen(values: Float[Tensor, "*b n"], width: int) -> Float[Tensor, "*b w"]:
    """Pad the last axis with 0 to ``width``."""
    return functional.pad(values, (0, width - values.shape[-1]))
