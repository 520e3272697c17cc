"""PaliGemma as a frozen prefix encoder: hidden states and every layer's keys and values.

The weights are those of transformers' own class; the Gemma layers are driven by hand, as π0 does (Black et al. 2024,
https://arxiv.org/abs/2410.24164): the image tokens of all cameras in order, then the prompt, all of which see each
other; padding is masked, and the position of a token is the number of real tokens before it. Token embeddings are
scaled by √d, image tokens are not. There are no image placeholders and no separator but what the prompt's template has.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from joynexus.errors import SpecError
from joynexus.models.adapters import linear_layers
from joynexus.models.backbones.bidirectional import BidirectionalVlm
from joynexus.models.backbones.pretrained import build_model
from joynexus.models.images import resize_with_pad
from joynexus.models.pauses import pause_before
from joynexus.models.tokens import PromptTable
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.vlm_backbones import PaliGemmaBackboneSpec


class PaliGemmaBackbone(BidirectionalVlm):
    """PaliGemma without its language-model head."""

    def __init__(self, spec: PaliGemmaBackboneSpec, model: Any, prompts: PromptTable) -> None:  # noqa: ANN401
        """Take over a model.

        Args:
            spec: What the model was built from.
            model: transformers' ``PaliGemmaModel``, in the dtype of the spec, with the layers that are kept.
            prompts: The model's tokenizer.
        """
        text, vision = model.language_model, model.config.vision_config
        side = int(vision.image_size)
        per_image = (side // int(vision.patch_size)) ** 2
        super().__init__(spec, text, prompts, image_side=side, tokens_per_image=per_image)
        self._vision: Any = model.vision_tower
        pause_before(self._vision.encoder.layers)
        self._projector: Any = model.multi_modal_projector

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

    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 s s"]:
        """Fit frames into the vision tower's square: aspect kept, black on both sides, in [-1, 1]."""
        return resize_with_pad(images, self._image_side, centred=True)

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
