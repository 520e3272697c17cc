"""The contract of a backbone: frozen, shared by all tenants, and blind to who they are."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.registry import load_implementation


class Backbone(nn.Module, ABC):
    """A frozen vision-language model that turns prefixes into features.

    Every parameter has ``requires_grad=False`` and the module stays in ``eval()``: calling ``train()`` leaves it
    there. ``prefix`` runs under ``no_grad``, not ``inference_mode``, whose tensors can't enter a trainable graph.
    A row's features do not depend on the other rows, on their order or on their number: implementations give
    the numbers of chunks of exactly ``spec.chunk_size`` rows (see :mod:`joynexus.models.chunks`).
    """

    spec: BackboneSpec
    hidden_dim: int
    """Width of ``PrefixFeatures.hidden``."""
    kv_shape: tuple[int, int, int] = (0, 0, 0)
    """Layers that give K/V, their K/V heads and the width of a head; no layers where it keeps none."""
    num_heads: int = 0
    """Query heads of the language layers; 0 where it keeps no K/V."""
    num_lead_tokens: int = 0
    """Positions in front of the frames, such as the beginning of a chat turn; none of them is padding."""
    num_encoded: int
    """Rows encoded since the start, dummies not counted."""
    num_forwards: int
    """Chunks run since the start."""

    @classmethod
    @abstractmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "Backbone":
        """Build the frozen model on a device. Downloads nothing unless the spec names a hub id."""

    @abstractmethod
    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Turn prompts into token ids and mask, padded to ``max_tokens``: on the right, or all of them on the left.

        Raises:
            InvalidBatchError: If a prompt is longer than the bucket; it is never cut silently.
        """

    @abstractmethod
    def prefix(self, batch: PrefixBatch, signature: str) -> PrefixFeatures:
        """Encode rows of one signature, without gradient."""

    @abstractmethod
    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Push a tenant's own tokens through the frozen layers behind a cached prefix.

        Args:
            prefix: Features with K/V, from :meth:`prefix`.
            tokens: Embeddings, cast to the backbone's type. Each sees all of the prefix that is not padded and all
                the other ``m``; the prefix sees none of them, so its own rows stay as they were.

        Returns:
            The prefix grown by ``m`` positions, whose hidden states, keys and values carry gradient to ``tokens``.

        Raises:
            NotImplementedError: If the backbone keeps no keys and values.
        """

    def adapter_layers(self) -> dict[str, nn.Linear]:
        """Return the layers that a tenant's adapter may change; none where there is no language model to adapt.

        Returns:
            Linear layers of the language layers, by their paths in the family's class of transformers: these name the
            adapter's parameters, and an export of it.
        """
        return {}

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Count the positions of one sample's prefix, padding included; exact, where the spec may estimate."""
        return self.spec.prefix_length(num_cameras, image_size, num_tokens)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> "Backbone":  # noqa: FBT001, FBT002  # torch's signature
        """Stay in evaluation mode, whatever is asked: dropout or batch statistics must never wake up."""
        del mode
        return super().train(mode=False)

    def freeze(self) -> "Backbone":
        """Switch off every gradient and every training behaviour."""
        self.requires_grad_(requires_grad=False)
        return self.eval()

    def checksum(self) -> str:
        """Hash of all parameters and buffers: the same before and after any tenant's life."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def load_backbone(spec: BackboneSpec, device: torch.device | str = "cpu") -> Backbone:
    """Build the backbone that a spec describes.

    Args:
        spec: Any registered backbone spec.
        device: Where the weights go.

    Returns:
        The frozen backbone.
    """
    loaded = load_implementation(spec).load(spec, torch.device(device))
    assert isinstance(loaded, Backbone)
    return loaded.freeze()
