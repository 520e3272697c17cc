"""The vision towers of Qwen2.5-VL and Qwen3-VL, all frames of one size at once.

The weights are those of transformers' classes; the blocks are driven by hand, because the library's own loop runs the
attention frame by frame. Bai et al. 2025, https://arxiv.org/abs/2502.13923 (windowed attention) and 2025,
https://arxiv.org/abs/2511.21631 (deepstack: Meng et al. 2024, https://arxiv.org/abs/2406.04334).

Frames are resized so that both sides are multiples of the merged patch and the number of pixels is in range, the aspect
kept as well as that allows; four neighbouring patches that become one token lie side by side.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import InvalidBatchError
from joynexus.models.pauses import pause

LONGEST_ASPECT = 200
"""Longest side over shortest that Qwen takes."""
WHITE = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameScaling:
    """How frames become pixels."""

    factor: int
    """Both sides become multiples of it: the side of a merged patch, in pixels."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """Of each colour in [0, 1], taken off."""
    std: tuple[float, float, float]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a frame is resized to.

        Raises:
            InvalidBatchError: If the frame is longer than any that the family takes.
        """
        if max(height, width) > LONGEST_ASPECT * min(height, width):
            raise InvalidBatchError(
                f"frames: {height} x {width} pixels are longer than 1:{LONGEST_ASPECT}. Take squarer frames."
            )
        rows, columns = (round(side / self.factor) * self.factor for side in (height, width))
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            return tuple(max(self.factor, self._floor(side / shrink)) for side in (height, width))  # pyright: ignore[reportReturnType]
        if rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return tuple(-self._floor(-side * grow) for side in (height, width))  # pyright: ignore[reportReturnType]
        return rows, columns

    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 r c"]:
        """Resize frames and bring their colours to the tower's range.

        Bicubic with antialiasing, rounded to bytes: Qwen's processor resizes bytes. Where torch can't, on a GPU, the
        numbers are rounded afterwards, and some bytes differ by 1.
        """
        size = self.size(images.shape[1], images.shape[2])
        frames = images.permute(0, 3, 1, 2)
        if size != tuple(frames.shape[2:]):
            frames = _resize(frames, size)
        mean, std = (torch.tensor(each, device=frames.device)[:, None, None] * WHITE for each in (self.mean, self.std))
        return (frames.float() - mean) / std

    def _floor(self, side: float) -> int:
        return math.floor(side / self.factor) * self.factor


def to_patches(pixels: Float[Tensor, "n 3 r c"], *, side: int, merge: int, frames: int) -> Float[Tensor, "n p d"]:
    """Cut pixels into flat patches, those of one merged token side by side.

    Args:
        pixels: Sides are multiples of ``side * merge``.
        side: Of a patch, in pixels.
        merge: Patches per token along each axis.
        frames: How often a still frame is repeated: the tower's patches have a depth in time.
    """
    rows, columns = pixels.shape[2] // side // merge, pixels.shape[3] // side // merge
    cells = pixels.view(len(pixels), 3, rows, merge, side, columns, merge, side).permute(0, 2, 5, 3, 6, 1, 4, 7)
    deep = cells[:, :, :, :, :, :, None].expand(-1, -1, -1, -1, -1, -1, frames, -1, -1)
    return deep.reshape(len(pixels), rows * columns * merge * merge, -1)


class VisionTower(nn.Module):
    """A tower of transformers, driven over frames of one size."""

    def __init__(self, tower: Any, *, attn_heads: int) -> None:  # noqa: ANN401  # transformers is untyped
        """Take over a tower.

        Args:
            tower: transformers' ``Qwen3VLVisionModel`` or ``Qwen2_5_VisionTransformerPretrainedModel``.
            attn_heads: Attention heads.
        """
        super().__init__()
        self._tower = tower
        self._heads = attn_heads
        self._merge = int(tower.spatial_merge_size)
        self._patch = int(tower.patch_size)
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = {}

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many tokens a frame of so many pixels has along each axis."""
        return size[0] // (self._patch * self._merge), size[1] // (self._patch * self._merge)

    def forward(self, pixels: Float[Tensor, "n 3 r c"]) -> tuple[Float[Tensor, "n k d"], list[Float[Tensor, "n k d"]]]:
        """Return the tokens of each frame, and what deepstack adds to them behind the first language layers."""
        tower, count = self._tower, len(pixels)
        frames = int(tower.patch_embed.temporal_patch_size)
        patches = to_patches(pixels, side=self._patch, merge=self._merge, frames=frames)
        hidden = tower.patch_embed(patches.flatten(0, 1)).view(count, patches.shape[1], -1)
        cos, sin, places, same_window = self._tables_for((pixels.shape[2], pixels.shape[3]), hidden)
        if places is not None:
            hidden = hidden + places
        taps: list[Tensor] = []
        deepstack: list[int] = list(getattr(tower, "deepstack_visual_indexes", ()))
        windowed = same_window is not None
        for index, block in enumerate(tower.blocks):
            pause()
            mask = same_window if windowed and index not in tower.fullatt_block_indexes else None
            hidden = self._block(block, hidden, cos, sin, mask)
            if index in deepstack:
                taps.append(self._merged(tower.deepstack_merger_list[deepstack.index(index)], hidden))
        return self._merged(tower.merger, hidden), taps

    def _block(self, block: Any, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ANN401
        mixed = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = mixed.unbind(0)
        query, key = (rotate(each.float(), cos, sin).to(value.dtype) for each in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + block.attn.proj(attended.transpose(1, 2).flatten(2))
        return hidden + block.mlp(block.norm2(hidden))

    def _merged(self, merger: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401
        return merger(hidden.flatten(0, 1)).view(len(hidden), hidden.shape[1] // self._merge**2, -1)

    def _tables_for(
        self, size: tuple[int, int], like: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Bool[Tensor, "p p"] | None]:
        """Return cosine, sine, learned places and window mask of a size of pixels; computed once for each."""
        key = (*size, like.device, like.dtype)
        if key not in self._tables:
            rows, columns = (side // self._patch for side in size)
            order = self._order(rows, columns).to(like.device)
            places = torch.stack([order // columns, order % columns], dim=1)
            cos, sin = self._tower.rotary_pos_emb(like, places)
            self._tables[key] = (
                cos,
                sin,
                self._learned_places(rows, columns, order),
                self._windows(rows, columns, like),
            )
        return self._tables[key]

    def _order(self, rows: int, columns: int) -> Int64[Tensor, " p"]:
        """Return the index of each patch in reading order, those of one merged token side by side."""
        merge = self._merge
        reading = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
        return reading.transpose(1, 2).flatten()

    def _learned_places(self, rows: int, columns: int, order: Int64[Tensor, " p"]) -> Float[Tensor, "p d"] | None:
        """Stretch Qwen3-VL's square table of places over the frame."""
        if not hasattr(self._tower, "pos_embed"):
            return None
        weight = self._tower.pos_embed.weight
        side = math.isqrt(weight.shape[0])
        table = weight[: side * side].float().view(1, side, side, -1).permute(0, 3, 1, 2)
        stretched = functional.interpolate(table, size=(rows, columns), mode="bilinear", align_corners=True)
        return stretched[0].flatten(1).T[order].to(weight.dtype)

    def _windows(self, rows: int, columns: int, like: Tensor) -> Bool[Tensor, "p p"] | None:
        """Return which patches are in one window of Qwen2.5-VL; None where all are, or the family has none."""
        if not hasattr(self._tower, "window_size"):
            return None
        side = self._tower.window_size // self._merge // self._patch
        down, across = torch.arange(rows // self._merge) // side, torch.arange(columns // self._merge) // side
        window = (down[:, None] * len(across) + across).flatten().repeat_interleave(self._merge**2).to(like.device)
        mask = window[:, None] == window
        return None if bool(mask.all()) else mask


def rotate(states: Float[Tensor, "b n q e"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b n q e"]:
    """Turn the pairs (i, i + e/2) of each head by their angles (rotary embedding)."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _resize(frames: UInt8[Tensor, "n 3 h w"], size: tuple[int, int]) -> UInt8[Tensor, "n 3 r c"]:
    if frames.device.type == "cpu":
        packed = frames.contiguous(memory_format=torch.channels_last)
        return functional.interpolate(packed, size=size, mode="bicubic", antialias=True)
    resized = functional.interpolate(frames.float(), size=size, mode="bicubic", antialias=True)
    return resized.clamp(0, WHITE).round().to(torch.uint8)
