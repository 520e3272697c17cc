"""Qwen2.5-VL and Qwen3-VL as frozen prefix encoders: hidden states and every layer's keys and values.

Bai et al. 2025, https://arxiv.org/abs/2502.13923 and https://arxiv.org/abs/2511.21631. The weights are those of
transformers' classes; the language layers are driven by hand, as in :mod:`joynexus.models.backbones.smolvlm`. A row is

    beginning of the turn | frame of each camera between two tokens | padding, prompt, end of the turn

with causal attention, so that a prompt's tokens see the frames, and its last ones see all. Padding stands in front of
the prompt: what is read at the prompt's end (action tokens) is at the same place in every row. Tokens are placed along
three axes (time, height, width): a text token stands at one number on all three, a frame's tokens spread over height
and width from there on, and what follows goes on behind the longest side. Padding and missing cameras take no place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import SpecError
from joynexus.models.adapters import linear_layers
from joynexus.models.backbone import Backbone
from joynexus.models.backbones.pretrained import build_model
from joynexus.models.backbones.qwen_vision import FrameScaling, VisionTower, rotate
from joynexus.models.chunks import FixedChunks, Rows, rows_that_pay
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.tokens import PromptTable
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.vlm_backbones import QwenVlBackboneSpec

LONGEST_HEADER = 1024
"""Tokens at most in front of the frames."""
AXES = 3
"""Time, height and width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CameraTokens:
    """What one camera gives to a chunk of rows."""

    tokens: Float[Tensor, "b n d"]
    taps: tuple[Float[Tensor, "b n d"], ...]
    """Per language layer from the first on: added to the tokens behind it (deepstack)."""
    grid: tuple[int, int]
    """Tokens along height and width."""


class QwenVlBackbone(Backbone):
    """What both families have in common; without the language-model head."""

    model_class: ClassVar[str]
    config_class: ClassVar[str]
    chat_header: ClassVar[str]
    """The family's own text in front of the frames."""
    chat_footer: ClassVar[str] = "<|im_end|>\n<|im_start|>assistant\n"

    def __init__(self, spec: QwenVlBackboneSpec, model: Any, prompts: PromptTable) -> None:  # noqa: ANN401  # untyped
        """Take over a model.

        Args:
            spec: What the model was built from.
            model: transformers' ``Qwen3VLModel`` or ``Qwen2_5_VLModel``, in the dtype of the spec.
            prompts: The model's tokenizer.
        """
        super().__init__()
        self.spec = spec
        self._reads_normed = spec.hidden_state == "normed"
        config, text = model.config, model.language_model
        self._vision = VisionTower(model.visual, attn_heads=int(config.vision_config.num_heads))
        self._embed: Any = text.embed_tokens
        self._layers: Any = text.layers
        self._norm: Any = text.norm
        self._rotary: Any = text.rotary_emb
        self._scaling = FrameScaling(
            factor=int(config.vision_config.patch_size) * int(config.vision_config.spatial_merge_size),
            min_pixels=spec.min_pixels,
            max_pixels=spec.max_pixels,
            mean=spec.image_mean,
            std=spec.image_std,
        )
        self._patches_per_token = int(config.vision_config.spatial_merge_size) ** 2
        self._prompts = prompts
        own = ("", "") if spec.init == "random" else (type(self).chat_header, type(self).chat_footer)
        header = spec.chat_header if spec.chat_header is not None else own[0]
        self._footer = spec.chat_footer if spec.chat_footer is not None else own[1]
        ids, real = prompts.rows([header], LONGEST_HEADER)
        self._header: list[int] = ids[real].tolist()
        self.num_lead_tokens = len(self._header)
        self._around = (int(config.vision_start_token_id), int(config.vision_end_token_id))
        if max(self._around) >= self._embed.num_embeddings:
            raise SpecError(
                f"{spec.type}: config has vision_start_token_id and vision_end_token_id {list(self._around)}, "
                f"the vocabulary {self._embed.num_embeddings} ids. Set them to ids that it has."
            )
        self._chunks = FixedChunks(self._encode_chunk, spec.chunk_size)
        self.hidden_dim = int(config.text_config.hidden_size)
        self.num_heads = int(config.text_config.num_attention_heads)
        heads, head_dim = int(config.text_config.num_key_value_heads), int(self._layers[0].self_attn.head_dim)
        self.kv_shape = (len(self._layers), heads, head_dim)
        self.num_encoded = 0
        self.num_forwards = 0

    @classmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "QwenVlBackbone":
        """Build from a folder, a hub id or a random initialisation.

        Args:
            spec: The family's.
            device: Where the weights go.

        Returns:
            The frozen backbone. torch's global random state is left as it was.

        Raises:
            SpecError: If nothing is found at ``path``, or the spec asks for more than the model has.
        """
        assert isinstance(spec, QwenVlBackboneSpec)
        model, prompts = build_model(spec, model_class=cls.model_class, config_class=cls.config_class)
        backbone = cls(spec, model, prompts)
        backbone.to(device).freeze()
        return backbone

    def adapter_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers of the language layers; see :meth:`Backbone.adapter_layers`."""
        return linear_layers("language_model.layers", self._layers)

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Count the positions of one sample's prefix, from the sizes of the loaded model."""
        if num_cameras == 0:
            return len(self._header) + num_tokens
        rows, columns = self._vision.grid(self._scaling.size(*image_size))
        return len(self._header) + num_cameras * (rows * columns + len(self._around)) + num_tokens

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Turn prompts, each with the end of the turn behind it, into ids and mask, padded on the left.

        Raises:
            InvalidBatchError: If a prompt and the end of the turn are longer than the bucket.
        """
        ids, mask = self._prompts.rows([f"{prompt}{self._footer}" for prompt in prompts], max_tokens)
        order = mask.long().argsort(dim=1, stable=True)  # padding first, real tokens in their order
        return ids.gather(1, order), mask.gather(1, order)

    @torch.no_grad()
    def prefix(self, batch: PrefixBatch, signature: str) -> PrefixFeatures:
        """Encode rows of one signature, in chunks of ``spec.chunk_size`` rows, fewer for long prefixes on a CPU."""
        cameras = batch.images.shape[1]
        size = (batch.images.shape[2], batch.images.shape[3])
        length = self.prefix_length(cameras, size, batch.tokens.shape[1])
        patches = self._patches_per_token * (length - batch.tokens.shape[1])
        answer = self._chunks.run(
            (batch.images, batch.image_mask, batch.tokens, batch.token_mask),
            max_rows=rows_that_pay(max(length, patches), self.device),
        )
        self.num_encoded += len(batch)
        self.num_forwards = self._chunks.num_forwards
        layers = len(self._layers)
        hidden, pad, keys, values = answer[0], answer[1], answer[2 : 2 + layers], answer[2 + layers :]
        return PrefixFeatures(hidden=hidden, pad=pad, keys=keys, values=values, signature=signature)

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Push a tenant's tokens through the frozen layers behind a cached prefix; see :meth:`Backbone.extend`.

        They are placed from the number of real tokens on. That is where the next text token would stand but for
        frames, whose tokens share places: behind those it leaves a gap.
        """
        count = tokens.shape[1]
        num_valid = (~prefix.pad).sum(dim=1, keepdim=True)
        positions = (num_valid + torch.arange(count, device=tokens.device)).expand(AXES, -1, -1)
        seen = torch.cat([~prefix.pad, prefix.pad.new_ones(len(prefix), count)], dim=1)
        hidden, keys, values = self._run_layers(
            tokens.to(prefix.hidden.dtype), positions, seen[:, None, None], past=(prefix.keys, prefix.values)
        )
        return prefix.grow(hidden, keys, values)

    def pixels(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 3 r c"]:
        """Turn frames of one size into what the vision tower sees, in float32."""
        return self._scaling.pixels(images)

    def look(self, pixels: Float[Tensor, "n 3 r c"]) -> CameraTokens:
        """Run the vision tower over frames of one size."""
        tokens, taps = self._vision(pixels)
        return CameraTokens(tokens=tokens, taps=tuple(taps), grid=self._vision.grid((pixels.shape[2], pixels.shape[3])))

    def encode(
        self,
        cameras: Sequence[CameraTokens],
        image_mask: Bool[Tensor, "b c"],
        tokens: Int64[Tensor, "b l"],
        token_mask: Bool[Tensor, "b l"],
    ) -> Rows:
        """Encode a chunk of rows whose frames went through the tower already; cameras may differ in size.

        Returns:
            Hidden states as ``spec.hidden_state`` says, padding, and K and V per layer.
        """
        hidden = self.embed(cameras, tokens)
        lengths = [each.tokens.shape[1] + len(self._around) for each in cameras]
        shown = [image_mask[:, index, None].expand(-1, length) for index, length in enumerate(lengths)]
        valid = torch.cat([token_mask.new_ones(len(tokens), len(self._header)), *shown, token_mask], dim=1)
        causal = valid.new_ones(valid.shape[1], valid.shape[1]).tril()
        # A padded position sees itself: softmax over an empty set is NaN.
        mask = causal & valid[:, None, None] | torch.eye(len(causal), dtype=torch.bool, device=valid.device)
        positions = self.positions([each.grid for each in cameras], image_mask, token_mask)
        num_taps = len(cameras[0].taps) if cameras else 0
        added = [self._beside(cameras, index, tokens.shape[1]) for index in range(num_taps)]
        hidden, keys, values = self._run_layers(hidden, positions, mask, past=((), ()), added=added)
        return (hidden, ~valid, *keys, *values)

    def embed(self, cameras: Sequence[CameraTokens], tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b p d"]:
        """Return what the first language layer sees."""
        fixed = torch.tensor((*self._header, *self._around), device=tokens.device)
        lead, start, end = self._embed(fixed).expand(len(tokens), -1, -1).tensor_split([-2, -1], dim=1)
        frames = [part for each in cameras for part in (start, each.tokens.to(lead.dtype), end)]
        return torch.cat([lead, *frames, self._embed(tokens)], dim=1)

    def positions(
        self, grids: Sequence[tuple[int, int]], image_mask: Bool[Tensor, "b c"], token_mask: Bool[Tensor, "b l"]
    ) -> Int64[Tensor, "3 b p"]:
        """Return the places of all tokens along time, height and width.

        Args:
            grids: Tokens of each camera along height and width.
            image_mask: Cameras that gave a frame.
            token_mask: Real tokens of the bucket.
        """
        device, rows = token_mask.device, len(token_mask)
        parts = [torch.arange(len(self._header), device=device).expand(AXES, rows, -1)]
        start = torch.full((rows,), len(self._header), device=device)
        for camera, (height, width) in enumerate(grids):
            offsets = _frame_places(height, width).to(device)
            parts.append(start[:, None] + offsets[:, None])
            start = start + torch.where(image_mask[:, camera], max(height, width) + len(self._around), 0)
        text = start[:, None] + (token_mask.cumsum(dim=1) - 1).clamp(min=0)
        return torch.cat([*parts, text.expand(AXES, -1, -1)], dim=2)

    def _encode_chunk(self, rows: Rows) -> Rows:
        """Encode images, camera masks, token ids and token masks to hidden states, padding, K and V per layer."""
        images, image_mask, tokens, token_mask = rows
        if not images.shape[1]:
            return self.encode((), image_mask, tokens, token_mask)
        seen = self.look(self.pixels(images.flatten(0, 1)))
        rows_cameras = (images.shape[0], images.shape[1], -1, self.hidden_dim)
        frames, taps = seen.tokens.view(rows_cameras), [each.view(rows_cameras) for each in seen.taps]
        cameras = [
            CameraTokens(tokens=frames[:, index], taps=tuple(each[:, index] for each in taps), grid=seen.grid)
            for index in range(images.shape[1])
        ]
        return self.encode(cameras, image_mask, tokens, token_mask)

    def _beside(self, cameras: Sequence[CameraTokens], layer: int, num_tokens: int) -> Float[Tensor, "b p d"]:
        """Put what deepstack adds behind a language layer at the frames' positions, and 0 at all others."""
        inside = [functional.pad(each.taps[layer].to(each.tokens.dtype), (0, 0, 1, 1)) for each in cameras]
        return functional.pad(torch.cat(inside, dim=1), (0, 0, len(self._header), num_tokens))

    def _run_layers(
        self,
        hidden: Float[Tensor, "b q d"],
        positions: Int64[Tensor, "3 b q"],
        mask: Bool[Tensor, "b 1 #q k"],
        *,
        past: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        added: Sequence[Float[Tensor, "b q d"]] = (),
    ) -> tuple[Float[Tensor, "b q d"], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the decoder layers over ``q`` tokens that see those of ``k`` = past + ``q`` where ``mask`` is True.

        Returns:
            Hidden states, and K (after rotary embedding) and V of past and new tokens per layer.
        """
        cos, sin = (each[:, None] for each in self._rotary(hidden, positions))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            pause()
            attention = layer.self_attn
            query, key, value = self._project(attention, layer.input_layernorm(hidden))
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            if past[0]:
                key, value = torch.cat([past[0][index], key], dim=2), torch.cat([past[1][index], value], dim=2)
            keys.append(key)
            values.append(value)
            groups = query.shape[1] // key.shape[1]
            mixed = functional.scaled_dot_product_attention(
                query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1), attn_mask=mask
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if index < len(added):
                hidden = hidden + added[index]
        read = self._norm(hidden) if self._reads_normed else hidden
        return read, tuple(keys), tuple(values)

    def _project(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """Return queries, keys and values, [b, heads, q, e] each; Qwen3 norms the first two by head."""
        heads = (*normed.shape[:2], -1, attention.head_dim)
        query, key, value = (
            part(normed).view(heads) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class Qwen3VlBackbone(QwenVlBackbone):
    """Qwen3-VL: deepstack, norms of queries and keys."""

    model_class = "Qwen3VLModel"
    config_class = "Qwen3VLConfig"
    chat_header = "<|im_start|>user\n"


class Qwen25VlBackbone(QwenVlBackbone):
    """Qwen2.5-VL: windowed attention in the vision tower, a system text in front of the turn."""

    model_class = "Qwen2_5_VLModel"
    config_class = "Qwen2_5_VLConfig"
    chat_header = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"


def _frame_places(height: int, width: int) -> Int64[Tensor, "3 n"]:
    """Return the places of a frame's tokens, and of those around it, from its first token on."""
    down, across = torch.arange(height), torch.arange(width)
    inside = torch.stack([
        torch.zeros(height * width, dtype=torch.int64),
        down.repeat_interleave(width),
        across.repeat(height),
    ])  # fmt: skip
    first, last = torch.zeros(AXES, 1, dtype=torch.int64), torch.full((AXES, 1), 1 + max(height, width))
    return torch.cat([first, inside + 1, last], dim=1)
