"""Frames to the pixels of a vision tower: resizing that needs no torchvision."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional


def resize_with_pad(images: UInt8[Tensor, "n h w 3"], side: int, *, centred: bool = False) -> Float[Tensor, "n 3 s s"]:
    """Fit frames into a square: bilinear without antialiasing, aspect kept, the rest black, then to [-1, 1].

    Args:
        images: Frames of one size.
        side: Height and width of the square, in pixels.
        centred: Where the black goes: on both sides as π0 does (an odd line at the bottom or right), or else at the
            left and top as SmolVLA does.
    """
    height, width = images.shape[1:3]
    ratio = max(height / side, width / side)
    size = (int(height / ratio), int(width / ratio))
    pixels = images.permute(0, 3, 1, 2).to(torch.float32) / 255
    if size != (height, width):
        pixels = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    rows, columns = side - size[0], side - size[1]
    after = (rows - rows // 2, columns - columns // 2) if centred else (0, 0)
    padded = functional.pad(pixels, (columns - after[1], after[1], rows - after[0], after[0]))
    return padded * 2 - 1
