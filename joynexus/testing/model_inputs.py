"""Fake inputs of any size for backbones and action modules, drawn from a seed."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from joynexus.models.action_module import ModuleDims
from joynexus.models.backbone import Backbone
from joynexus.models.normalizer import PolicyNormalizer
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.specs.tenant import ObservationSpec
from joynexus.types import Observation

UNCHANGED = PolicyNormalizer(None, "identity")
"""Leaves states and actions as they are: for policies without statistics."""
WORDS = ("pick", "place", "push", "the", "red", "blue", "cube", "cup", "left", "on")


def fake_instructions(rows: int, *, seed: int = 0) -> tuple[str, ...]:
    """Return instructions of one to three words, so that their lengths differ."""
    draw = np.random.default_rng(seed)
    return tuple(" ".join(draw.choice(WORDS, size=1 + row % 3)) for row in range(rows))


def fake_observation(spec: ObservationSpec, rows: int, *, seed: int = 0) -> Observation:
    """Return what a policy looks at: random frames, states and instructions; nothing is masked."""
    draw = np.random.default_rng(seed)
    cameras = len(spec.cameras)
    return Observation(
        images=draw.integers(0, 256, (rows, cameras, *spec.image_size, 3), dtype=np.uint8),
        image_mask=np.ones((rows, cameras), dtype=np.bool_),
        state=draw.standard_normal((rows, spec.state_dim), dtype=np.float32),
        instructions=fake_instructions(rows, seed=seed),
    )


def fake_prefix_batch(
    backbone: Backbone, rows: int, *, cameras: int = 2, side: int = 64, num_tokens: int = 24, seed: int = 0
) -> PrefixBatch:
    """Return rows for a backbone: random square frames, prompts of several lengths, the last camera of row 0 missing.

    Args:
        backbone: Tokenises the prompts.
        rows: Number of rows.
        cameras: Frames per row.
        side: Height and width of a frame, in pixels.
        num_tokens: Token bucket.
        seed: Of frames and prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, token_mask = backbone.tokenize(fake_instructions(rows, seed=seed), num_tokens)
    images = torch.randint(256, (rows, cameras, side, side, 3), dtype=torch.uint8, generator=generator)
    image_mask = torch.ones(rows, cameras, dtype=torch.bool)
    image_mask[:1, -1:] = False
    images[~image_mask] = 0
    device = backbone.device
    return PrefixBatch(
        images=images.to(device),
        image_mask=image_mask.to(device),
        tokens=tokens.to(device),
        token_mask=token_mask.to(device),
    )


def fake_prefix(dims: ModuleDims, rows: int, *, length: int = 12, seed: int = 0) -> PrefixFeatures:
    """Return prefix features for an action module: Normal numbers, the last third of row 0 padded.

    Args:
        dims: Sizes of the module; ``kv_shape`` says how many layers of keys and values there are.
        rows: Number of rows.
        length: Positions of the prefix.
        seed: Of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    pad = torch.zeros(rows, length, dtype=torch.bool)
    pad[:1, -(length // 3) :] = True
    hidden = torch.randn(rows, length, dims.prefix_dim, generator=generator)
    layers, heads, width = dims.kv_shape
    keys, values = (
        tuple(torch.randn(rows, heads, length, width, generator=generator) for _ in range(layers)) for _ in range(2)
    )
    return PrefixFeatures(hidden=hidden, pad=pad, keys=keys, values=values, signature="fake")


class FakeFrozenLayers:
    """Stands for a backbone that a module's tokens are pushed through: fixed random projections of each token."""

    def __init__(self, dims: ModuleDims, *, seed: int = 0) -> None:
        """Draw the projections.

        Args:
            dims: Sizes of the module; ``kv_shape`` says how many layers of keys and values there are.
            seed: Of the projections.
        """
        generator = torch.Generator().manual_seed(seed)
        layers, self._heads, width = dims.kv_shape
        self._hidden = torch.randn(dims.prefix_dim, dims.prefix_dim, generator=generator)
        shape = (2 * layers, dims.prefix_dim, self._heads * width)
        self._projections = torch.randn(shape, generator=generator) / dims.prefix_dim**0.5

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Grow a prefix by the projections of tokens; see :meth:`joynexus.models.backbone.Backbone.extend`."""
        dtype = prefix.hidden.dtype
        made = [
            torch.cat([past, (tokens @ weights).to(dtype).unflatten(2, (self._heads, -1)).transpose(1, 2)], dim=2)
            for past, weights in zip((*prefix.keys, *prefix.values), self._projections, strict=True)
        ]
        layers = len(prefix.keys)
        return prefix.grow((tokens @ self._hidden).to(dtype), made[:layers], made[layers:])
