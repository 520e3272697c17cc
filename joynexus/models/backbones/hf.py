"""Any image-text-to-text model of transformers as a frozen prefix encoder: hidden states, no keys and values.

The library's own forward runs, so that every family works whose base model takes token ids with a placeholder for each
image token, pixels, and an attention mask. What differs from family to family are fields of the spec.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import InvalidBatchError, SpecError
from joynexus.models.adapters import linear_layers
from joynexus.models.backbone import Backbone
from joynexus.models.backbones.pretrained import build_model
from joynexus.models.chunks import FixedChunks, Rows, rows_that_pay
from joynexus.models.images import resize_with_pad
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.tokens import PromptTable
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.vlm_backbones import HfBackboneSpec

NOT_ZERO = 1e-6
"""Stands for a pixel of exactly 0: some families take a frame of zeros for one that is not there, and drop it."""
IMAGE_TYPE = 1
"""Kind of a token that stands for a part of an image."""


class HfBackbone(Backbone):
    """A base model of transformers, without its language-model head."""

    def __init__(self, spec: HfBackboneSpec, model: Any, prompts: PromptTable) -> None:  # noqa: ANN401  # untyped
        """Take over a model.

        Args:
            spec: What the model was built from.
            model: What ``AutoModel`` makes of an image-text-to-text checkpoint.
            prompts: The model's tokenizer.

        Raises:
            SpecError: If the model does not say which id stands for an image token, or its vocabulary lacks it.
        """
        super().__init__()
        self.spec = spec
        self._settings = spec
        self._model = model
        self._takes = set(inspect.signature(model.forward).parameters)
        self._begin = prompts.ids("")
        self._prompts = PromptTable(lambda prompt: self._without_begin(prompts.ids(prompt)), pad_id=prompts.pad_id)
        text = model.config.get_text_config()
        self._image_id = _image_id(spec, model.config, int(text.vocab_size))
        self._header = prompts.ids(spec.header)
        start, end = (self._without_begin(prompts.ids(each)) for each in (spec.image_start, spec.image_end))
        self._frame = (*start, *[self._image_id] * spec.tokens_per_image, *end)
        self._chunks = FixedChunks(self._encode_chunk, spec.chunk_size)
        self.hidden_dim = int(text.hidden_size)
        self.num_lead_tokens = len(self._header)
        self.num_encoded = 0
        self.num_forwards = 0

    @classmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "HfBackbone":
        """Build from a folder, a hub id or a random initialisation, and try one frame.

        Args:
            spec: A :class:`HfBackboneSpec`.
            device: Where the weights go.

        Returns:
            The frozen backbone. torch's global random state is left as it was.

        Raises:
            SpecError: If nothing is found at ``path``, or a frame of the spec's is none of the model's.
        """
        assert isinstance(spec, HfBackboneSpec)
        model, prompts = build_model(spec, model_class="AutoModel", config_class="AutoConfig")
        backbone = cls(spec, model, prompts)
        backbone.to(device).freeze()
        backbone.try_frame()
        return backbone

    @torch.no_grad()
    def try_frame(self) -> None:
        """Run one row with a frame and an empty prompt.

        Raises:
            SpecError: If the model refuses it, with what it says.
        """
        side = self._settings.image_side
        tokens, mask = self.tokenize(["a"], 8)
        rows = (
            torch.full((1, 1, side, side, 3), 100, dtype=torch.uint8),
            torch.ones(1, 1, dtype=torch.bool),
            tokens,
            mask,
        )
        try:
            self._encode_chunk(tuple(each.to(self.device) for each in rows))
        except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            raise SpecError(
                f"hf: the model takes no frame of image_side {side} as {self._settings.tokens_per_image} tokens, "
                f"frames_by_row {str(self._settings.frames_by_row).lower()}: {error}. "
                "Take image_side, tokens_per_image and frames_by_row from its processor."
            ) from error

    def adapter_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers of the language layers; see :meth:`Backbone.adapter_layers`."""
        for name in ("text_model", "language_model"):
            layers = getattr(getattr(self._model, name, None), "layers", None)
            if isinstance(layers, nn.ModuleList):
                return linear_layers(f"{name}.layers", layers)
        return {}

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Count the positions of one sample's prefix."""
        del image_size  # every frame becomes a square of image_side
        return len(self._header) + num_cameras * len(self._frame) + num_tokens

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Turn prompts into token ids and mask, without the tokenizer's own beginning, which is in the header.

        Raises:
            InvalidBatchError: If a prompt is longer than the bucket, or holds the text that stands for an image.
        """
        ids, mask = self._prompts.rows(prompts, max_tokens)
        if bool((ids == self._image_id).any()):
            raise InvalidBatchError("prompts: one holds the token that stands for an image. Leave it out.")
        return ids, mask

    @torch.no_grad()
    def prefix(self, batch: PrefixBatch, signature: str) -> PrefixFeatures:
        """Encode rows of one signature, in chunks of ``spec.chunk_size`` rows, fewer for long prefixes on a CPU."""
        length = self.prefix_length(batch.images.shape[1], (0, 0), batch.tokens.shape[1])
        hidden, pad = self._chunks.run(
            (batch.images, batch.image_mask, batch.tokens, batch.token_mask),
            max_rows=rows_that_pay(length, self.device),
        )
        self.num_encoded += len(batch)
        self.num_forwards = self._chunks.num_forwards
        return PrefixFeatures(hidden=hidden, pad=pad, signature=signature)

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Refuse: there are no keys and values to attend to."""
        raise NotImplementedError("backbone 'hf' keeps no keys and values. Take 'smolvlm' for modules that extend.")

    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 s s"]:
        """Turn frames of one size into what the model sees, in float32."""
        spec = self._settings
        if spec.fit == "pad":
            scaled = (resize_with_pad(images, spec.image_side) + 1) / 2
        else:
            frames = images.permute(0, 3, 1, 2).float() / 255
            size = (spec.image_side, spec.image_side)
            scaled = functional.interpolate(frames, size=size, mode=spec.resample, antialias=True).clamp(0, 1)
        mean, std = (
            torch.tensor(each, device=images.device)[:, None, None] for each in (spec.image_mean, spec.image_std)
        )
        return (scaled - mean) / std

    def _encode_chunk(self, rows: Rows) -> Rows:
        """Encode images, camera masks, token ids and token masks to hidden states and padding."""
        images, image_mask, tokens, token_mask = rows
        count, cameras = images.shape[:2]
        lead = torch.tensor((*self._header, *self._frame * cameras), device=tokens.device).expand(count, -1)
        shown = image_mask.repeat_interleave(len(self._frame), dim=1)
        valid = torch.cat([token_mask.new_ones(count, len(self._header)), shown, token_mask], dim=1)
        ids = torch.cat([lead, tokens], dim=1)
        kinds = torch.where(ids == self._image_id, IMAGE_TYPE, 0)
        optional = {
            "position_ids": (valid.cumsum(dim=1) - 1).clamp(min=0),
            "token_type_ids": kinds,
            "mm_token_type_ids": kinds,
        }
        given = {name: value for name, value in optional.items() if name in self._takes}
        if cameras:
            pixels = self.pixels(images.flatten(0, 1))
            pixels = torch.where(pixels == 0, NOT_ZERO, pixels).to(next(self._model.parameters()).dtype)
            given["pixel_values"] = (
                pixels.view(count, cameras, *pixels.shape[1:]) if self._settings.frames_by_row else pixels
            )
        answer = self._model(
            input_ids=ids, attention_mask=valid.long(), use_cache=False, output_hidden_states=True, **given
        )
        layer = self._settings.hidden_layer
        hidden = answer.last_hidden_state if layer == -1 else answer.hidden_states[layer]
        return torch.where(valid[..., None], hidden, torch.zeros_like(hidden)), ~valid

    def _without_begin(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids[len(self._begin) :] if ids[: len(self._begin)] == self._begin else ids


def _image_id(spec: HfBackboneSpec, config: Any, vocabulary: int) -> int:  # noqa: ANN401
    """Return the id that stands for one image token."""
    named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    found = next((int(each) for each in named if each is not None), None)
    if found is None:
        raise SpecError(
            f"hf: {config.model_type!r} names no image_token_id in its config. Take a model that reads images in place "
            "of tokens, or a backbone of its family."
        )
    if found >= vocabulary and spec.init == "random":
        raise SpecError(
            f"hf: config.image_token_id is {found}, the vocabulary has {vocabulary} ids. Set it to an id that it has."
        )
    return found
