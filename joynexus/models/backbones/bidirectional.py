"""Vision-language models whose frames and prompt all see each other, as the language models of SmolVLA and π0 do.

The weights are those of transformers' own classes; their language layers are driven by hand: padding is masked, and
the position of a token is the number of real tokens before it. Driving the layers keeps K/V in our own tensors, and
lets a tenant's tokens through the frozen layers with gradient (:meth:`BidirectionalVlm.extend`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from joynexus.models.backbone import Backbone
from joynexus.models.backbones.decoder import run_layers
from joynexus.models.chunks import FixedChunks, Rows, rows_that_pay
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.tokens import PromptTable
from joynexus.specs.vlm_backbones import VlmBackboneSpec


class BidirectionalVlm(Backbone):
    """A language model behind a vision tower; a family says how frames and prompt are embedded."""

    def __init__(
        self,
        spec: VlmBackboneSpec,
        text: Any,  # noqa: ANN401  # transformers is untyped
        prompts: PromptTable,
        *,
        image_side: int,
        tokens_per_image: int,
    ) -> None:
        """Take over the language model.

        Args:
            spec: What the model was built from.
            text: transformers' language model, with the layers that are kept.
            prompts: The model's tokenizer.
            image_side: Height and width of what the vision tower sees, in pixels.
            tokens_per_image: Tokens that it makes of a frame.
        """
        super().__init__()
        self.spec = spec
        self._embed: Any = text.embed_tokens
        self._layers: Any = text.layers[: spec.num_layers]
        self._norm: Any = text.norm
        self._rotary: Any = text.rotary_emb
        self._prompts = prompts
        self._chunks = FixedChunks(self._encode_chunk, spec.chunk_size)
        self._image_side = image_side
        self._tokens_per_image = tokens_per_image
        sizes = text.config
        self.hidden_dim = int(sizes.hidden_size)
        self.num_heads = int(sizes.num_attention_heads)
        head_dim = int(self._layers[0].self_attn.head_dim)
        self.kv_shape = (len(self._layers), int(sizes.num_key_value_heads), head_dim)
        self.num_encoded = 0
        self.num_forwards = 0

    @abstractmethod
    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 s s"]:
        """Turn frames of one size into what the vision tower sees, in float32."""

    @abstractmethod
    def embed(
        self,
        pixels: Float[Tensor, "b c 3 s s"] | None,
        image_mask: Bool[Tensor, "b c"],
        tokens: Int64[Tensor, "b l"],
        token_mask: Bool[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b p d"], Bool[Tensor, "b p"]]:
        """Return the embeddings of the prefix, cameras in order before the prompt, and which of them are seen."""

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Count the positions of one sample's prefix, from the sizes of the loaded model."""
        del image_size  # every frame is resized to the vision tower's own size
        return num_cameras * self._tokens_per_image + num_tokens

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Turn prompts into token ids and mask; see :meth:`Backbone.tokenize`."""
        return self._prompts.rows(prompts, max_tokens)

    @torch.no_grad()
    def prefix(self, batch: PrefixBatch, signature: str) -> PrefixFeatures:
        """Encode rows of one signature, in chunks of ``spec.chunk_size`` rows, fewer for long prefixes on a CPU."""
        size = (batch.images.shape[2], batch.images.shape[3])
        length = self.prefix_length(batch.images.shape[1], size, batch.tokens.shape[1])
        answer = self._chunks.run(
            (batch.images, batch.image_mask, batch.tokens, batch.token_mask),
            max_rows=rows_that_pay(length, self.device),
        )
        self.num_encoded += len(batch)
        self.num_forwards = self._chunks.num_forwards
        layers = len(self._layers)
        hidden, pad, keys, values = answer[0], answer[1], answer[2 : 2 + layers], answer[2 + layers :]
        return PrefixFeatures(hidden=hidden, pad=pad, keys=keys, values=values, signature=signature)

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Push a tenant's tokens through the frozen layers behind a cached prefix; see :meth:`Backbone.extend`."""
        count = tokens.shape[1]
        positions = (~prefix.pad).sum(dim=1, keepdim=True) + torch.arange(count, device=tokens.device)
        seen = torch.cat([~prefix.pad, prefix.pad.new_ones(len(prefix), count)], dim=1)
        hidden, keys, values = self._run(tokens.to(prefix.hidden.dtype), positions, seen, prefix.keys, prefix.values)
        return prefix.grow(hidden, keys, values)

    def encode_pixels(
        self,
        pixels: Float[Tensor, "b c 3 s s"] | None,
        image_mask: Bool[Tensor, "b c"],
        tokens: Int64[Tensor, "b l"],
        token_mask: Bool[Tensor, "b l"],
    ) -> Rows:
        """Encode a chunk of rows whose frames are pixels already.

        Returns:
            Hidden states after the final norm, padding, and K and V per layer.
        """
        embedded, valid = self.embed(pixels, image_mask, tokens, token_mask)
        # A row with nothing to see attends to its padding: softmax over an empty set is NaN.
        seen = valid | ~valid.any(dim=1, keepdim=True)
        positions = (seen.cumsum(dim=1) - 1).clamp(min=0)
        hidden, keys, values = self._run(embedded, positions, seen, (), ())
        return (hidden, ~valid, *keys, *values)

    def _encode_chunk(self, rows: Rows) -> Rows:
        """Encode images, camera masks, token ids and token masks to hidden states, padding, K and V per layer."""
        images, image_mask, tokens, token_mask = rows
        pixels: Tensor | None = None
        if images.shape[1]:
            side = self._image_side
            pixels = self.pixels(images.flatten(0, 1)).view(*images.shape[:2], 3, side, side)
        return self.encode_pixels(pixels, image_mask, tokens, token_mask)

    def _run(
        self,
        hidden: Float[Tensor, "b q d"],
        positions: Int64[Tensor, "b q"],
        seen: Bool[Tensor, "b k"],
        past_keys: Sequence[Tensor],
        past_values: Sequence[Tensor],
    ) -> tuple[Float[Tensor, "b q d"], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run all layers and the final norm; see :func:`run_layers`."""
        rotary = self._angles(hidden, positions)
        hidden, keys, values = run_layers(self._layers, hidden, rotary, seen, past_keys, past_values)
        return self._norm(hidden), keys, values

    def _angles(self, hidden: Float[Tensor, "b q d"], positions: Int64[Tensor, "b q"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding [b q e]."""
        return self._rotary(hidden, positions)
