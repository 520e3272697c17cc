"""PaliGemma as a frozen prefix encoder: hidden states and every layer's keys and values.

The weights are those of transformers' own class; the Gemma layers are driven by hand, as π0 does (Black et al. 2024,
https://arxiv.org/abs/2410.24164): the image tokens of all cameras in order, then the prompt, all of which see each
other; padding is masked, and the position of a token is the number of real tokens before it. Token embeddings are
scaled by √d, image tokens are not. There are no image placeholders and no separator but what the prompt's template has.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from joynexus.errors import SpecError
from joynexus.models.adapters import linear_layers
from joynexus.models.backbone import Backbone
from joynexus.models.backbones.decoder import run_layers
from joynexus.models.backbones.pretrained import build_model
from joynexus.models.chunks import FixedChunks, Rows, rows_that_pay
from joynexus.models.images import resize_with_pad
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.tokens import PromptTable
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.vlm_backbones import PaliGemmaBackboneSpec


class PaliGemmaBackbone(Backbone):
    """PaliGemma without its language-model head."""

    def __init__(self, spec: PaliGemmaBackboneSpec, model: Any, prompts: PromptTable) -> None:  # noqa: ANN401
        """Take over a model.

        Args:
            spec: What the model was built from.
            model: transformers' ``PaliGemmaModel``, in the dtype of the spec, with the layers that are kept.
            prompts: The model's tokenizer.
        """
        super().__init__()
        self.spec = spec
        text, vision = model.language_model, model.config.vision_config
        self._vision: Any = model.vision_tower
        self._projector: Any = model.multi_modal_projector
        self._embed: Any = text.embed_tokens
        self._layers: Any = text.layers
        self._norm: Any = text.norm
        self._rotary: Any = text.rotary_emb
        self._prompts = prompts
        self._chunks = FixedChunks(self._encode_chunk, spec.chunk_size)
        self._image_side = int(vision.image_size)
        self._tokens_per_image = (self._image_side // int(vision.patch_size)) ** 2
        sizes = text.config
        self.hidden_dim = int(sizes.hidden_size)
        self.num_heads = int(sizes.num_attention_heads)
        self.kv_shape = (len(self._layers), int(sizes.num_key_value_heads), int(sizes.head_dim))
        self.num_encoded = 0
        self.num_forwards = 0

    @classmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "PaliGemmaBackbone":
        """Build from a folder, a hub id or a random initialisation.

        Args:
            spec: A :class:`PaliGemmaBackboneSpec`.
            device: Where the weights go.

        Returns:
            The frozen backbone. torch's global random state is left as it was.

        Raises:
            SpecError: If nothing is found at ``path``, its language model is not Gemma's first generation, or the spec
                asks for more layers than the model has.
        """
        assert isinstance(spec, PaliGemmaBackboneSpec)
        model, prompts = build_model(spec, model_class="PaliGemmaModel", config_class="PaliGemmaConfig")
        family = model.config.text_config.model_type
        if family != "gemma":
            raise SpecError(
                f"paligemma: the language model is {family!r}, need 'gemma'. Take a PaliGemma 1 checkpoint."
            )
        backbone = cls(spec, model, prompts)
        backbone.to(device).freeze()
        return backbone

    def adapter_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers of the language layers; see :meth:`Backbone.adapter_layers`."""
        return linear_layers("language_model.layers", self._layers)

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
        length = batch.images.shape[1] * self._tokens_per_image + batch.tokens.shape[1]
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

    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 s s"]:
        """Fit frames into the vision tower's square: aspect kept, black on both sides, in [-1, 1]."""
        return resize_with_pad(images, self._image_side, centred=True)

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

    def embed(
        self,
        pixels: Float[Tensor, "b c 3 s s"] | None,
        image_mask: Bool[Tensor, "b c"],
        tokens: Int64[Tensor, "b l"],
        token_mask: Bool[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b p d"], Bool[Tensor, "b p"]]:
        """Return the embeddings of the prefix, cameras in order before the prompt, and which of them are seen."""
        embedded = self._embed(tokens)  # scaled by √d, in transformers' own embedding
        if pixels is None:
            return embedded, token_mask
        seen = self._vision(pixel_values=pixels.flatten(0, 1).to(embedded.dtype)).last_hidden_state
        images = self._projector(seen).reshape(len(pixels), pixels.shape[1] * self._tokens_per_image, -1)
        shown = image_mask.repeat_interleave(self._tokens_per_image, dim=1)
        return torch.cat([images.to(embedded.dtype), embedded], dim=1), torch.cat([shown, token_mask], dim=1)

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
        rotary = self._rotary(hidden, positions)
        hidden, keys, values = run_layers(self._layers, hidden, rotary, seen, past_keys, past_values)
        return self._norm(hidden), keys, values
