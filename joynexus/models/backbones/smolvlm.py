"""SmolVLM as a frozen prefix encoder: hidden states and every layer's keys and values.

The weights are those of transformers' own class; the language layers are driven by hand, as SmolVLA does (Shukor et
al. 2025, https://arxiv.org/abs/2506.01844): image and language tokens see each other in both directions, padding is
masked, and the position of a token is the number of real tokens before it.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional
from transformers import SmolVLMModel

from joynexus.errors import SpecError
from joynexus.models.adapters import linear_layers
from joynexus.models.backbones.bidirectional import BidirectionalVlm
from joynexus.models.backbones.pretrained import build_model
from joynexus.models.images import resize_with_pad
from joynexus.models.pauses import pause_before
from joynexus.models.rotary import rotary_angles
from joynexus.models.tokens import PromptTable
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec


class SmolVlmBackbone(BidirectionalVlm):
    """SmolVLM without its language-model head."""

    def __init__(self, spec: SmolVlmBackboneSpec, model: SmolVLMModel, prompts: PromptTable) -> None:
        """Take over a model.

        Args:
            spec: What the model was built from.
            model: transformers' model, in the dtype of the spec; its language layers are cut to ``num_layers``.
            prompts: The model's tokenizer.
        """
        parts: Any = model
        config, text = parts.config, parts.text_model
        side = int(config.vision_config.image_size)
        per_image = (side // int(config.vision_config.patch_size) // config.scale_factor) ** 2
        super().__init__(spec, text, prompts, image_side=side, tokens_per_image=per_image)
        self._vision: Any = parts.vision_model
        pause_before(self._vision.encoder.layers)
        self._connector: Any = parts.connector
        self._positions = spec.positions
        self._rope_base, self._pad_to = spec.rope_base, spec.pad_prefix_to or 0
        self._image_frame = _image_frame(prompts) if spec.image_special_tokens else None
        self._scale = self.hidden_dim**0.5 if spec.embedding_scale == "sqrt_dim" else None

    @classmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "SmolVlmBackbone":
        """Build from a folder, a hub id or a random initialisation.

        Args:
            spec: A :class:`SmolVlmBackboneSpec`.
            device: Where the weights go.

        Returns:
            The frozen backbone. torch's global random state is left as it was.

        Raises:
            SpecError: If nothing is found at ``path``, or the spec asks for more than the model has.
        """
        assert isinstance(spec, SmolVlmBackboneSpec)
        model, prompts = build_model(spec, model_class="SmolVLMModel", config_class="SmolVLMConfig")
        backbone = cls(spec, model, prompts)
        backbone.to(device).freeze()
        return backbone

    def adapter_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers of the language layers; see :meth:`Backbone.adapter_layers`."""
        return linear_layers("text_model.layers", self._layers)

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Count the positions of one sample's prefix, from the sizes of the loaded model."""
        del image_size  # every frame is resized to the vision tower's own size
        return self._positions(num_cameras, self._tokens_per_image, num_tokens)

    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 s s"]:
        """Turn frames of one size into what the vision tower sees, in float32."""
        return resize_with_pad(images, self._image_side)

    def embed(
        self,
        pixels: Float[Tensor, "b c 3 s s"] | None,
        image_mask: Bool[Tensor, "b c"],
        tokens: Int64[Tensor, "b l"],
        token_mask: Bool[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b p d"], Bool[Tensor, "b p"]]:
        """Return the embeddings of the prefix, cameras in order before the language, and which of them are seen."""
        embedded, valid = self._scaled(self._embed(tokens)), token_mask
        if pixels is not None:
            seen = self._image_tokens(pixels).to(embedded.dtype)
            shown = image_mask[..., None].expand(*image_mask.shape, seen.shape[2])
            if self._image_frame is not None:  # not scaled, and seen even where the camera is missing
                frame = self._embed(torch.tensor(self._image_frame, device=tokens.device))
                start, end = (each.expand(*seen.shape[:2], -1, -1) for each in (frame[:-1], frame[-1:]))
                seen = torch.cat([start, seen, end], dim=2)
                around = shown.new_ones(())
                shown = torch.cat([around.expand(start.shape[:3]), shown, around.expand(end.shape[:3])], dim=2)
            embedded = torch.cat([seen.flatten(1, 2), embedded], dim=1)
            valid = torch.cat([shown.flatten(1, 2), valid], dim=1)
        missing = max(self._pad_to - embedded.shape[1], 0)
        return functional.pad(embedded, (0, 0, 0, missing)), functional.pad(valid, (0, missing))

    def _image_tokens(self, pixels: Float[Tensor, "b c 3 s s"]) -> Float[Tensor, "b c n d"]:
        """Tokens of each camera.

        The tower and the connector are called by themselves: the model's own ``get_image_features`` drops images
        whose pixels are all 0, which a uniformly grey frame is after scaling.
        """
        frames = pixels.flatten(0, 1).to(self._embed.weight.dtype)
        seen = self._connector(self._vision(pixel_values=frames).last_hidden_state)
        return self._scaled(seen.reshape(*pixels.shape[:2], self._tokens_per_image, -1))

    def _scaled(self, embedded: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return embedded if self._scale is None else embedded * self._scale

    def _angles(self, hidden: Float[Tensor, "b q d"], positions: Int64[Tensor, "b q"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding [b q e]; in float32 where the spec gives its base."""
        if self._rope_base is None:
            return super()._angles(hidden, positions)
        cos, sin = rotary_angles(positions, self.kv_shape[2], base=self._rope_base)
        return cos[:, 0], sin[:, 0]


def _image_frame(prompts: PromptTable) -> tuple[int, int, int]:
    """Ids of the two tokens before and the one after each image, as SmolVLM's own processor puts them."""
    names = ("fake_image_token", "global_image_token")
    missing = [name for name in names if name not in prompts.special_ids]
    if missing:
        raise SpecError(
            f"smolvlm: image_special_tokens is true, the tokenizer knows no {missing}. Take a SmolVLM tokenizer."
        )
    fake, whole = (prompts.special_ids[name] for name in names)
    return fake, whole, fake
