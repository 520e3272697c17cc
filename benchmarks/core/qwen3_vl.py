"""A frozen backbone of the shape of Qwen3-VL with random weights, for benchmarks alone.

The weights are those of transformers' own classes, built from an explicit config; the layers are driven by hand, all
images and all rows at once, so that the time is that of the network and not of a library's bookkeeping. Positions are
counted along one axis, which costs what Qwen3-VL's three axes cost. Features of random weights are of no use.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from pydantic import JsonValue
from torch import Tensor
from torch.nn import functional

from joynexus.models.backbone import Backbone
from joynexus.models.chunks import FixedChunks, Rows
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.tokens import ByteTokenizer, PromptTable
from joynexus.specs.backbone import BackboneSpec

ROPE_BASE = 5e6
VISION_ROPE_BASE = 1e4
TEXT_ROPE: dict[str, JsonValue] = {
    "rope_type": "default",
    "rope_theta": ROPE_BASE,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
QWEN3_VL_2B: dict[str, JsonValue] = {
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": TEXT_ROPE,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
"""Sizes of Qwen3-VL-2B: 2.1 billion parameters."""
TINY: dict[str, JsonValue] = {
    "text_config": {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {**TEXT_ROPE, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
"""The same path in a few milliseconds, for tests."""


class Qwen3VlSpec(BackboneSpec):
    """Random weights of Qwen3-VL's shape."""

    implementation: ClassVar[str] = "benchmarks.core.qwen3_vl:Qwen3VlBackbone"
    type: Literal["qwen3_vl_random"] = "qwen3_vl_random"
    config: dict[str, JsonValue]
    """Arguments of transformers' Qwen3VLConfig."""
    seed: int = 0

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        return num_cameras * (image_size[0] // 32) * (image_size[1] // 32) + num_tokens


class Qwen3VlBackbone(Backbone):
    """Vision tower with deepstack and causal language layers, giving hidden states and every layer's K/V."""

    def __init__(self, spec: BackboneSpec, model: Any) -> None:  # noqa: ANN401  # transformers is untyped
        super().__init__()
        self.spec = spec
        self._model = model
        text = model.config.text_config
        self.hidden_dim = int(text.hidden_size)
        self.kv_shape = (int(text.num_hidden_layers), int(text.num_key_value_heads), int(text.head_dim))
        tokenizer = ByteTokenizer()
        self._prompts = PromptTable(tokenizer.encode, pad_id=tokenizer.pad_id)
        self._chunks = FixedChunks(self._encode_chunk, spec.chunk_size)
        self._tables: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
        self.num_encoded = 0
        self.num_forwards = 0

    @classmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "Qwen3VlBackbone":
        """Draw the weights on the device itself: two billion numbers take long on a CPU."""
        import transformers  # noqa: PLC0415  # slow, and not needed by those that read the sizes

        assert isinstance(spec, Qwen3VlSpec)
        library: Any = transformers
        config = library.Qwen3VLConfig(**spec.config)
        torch.manual_seed(spec.seed)
        dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        with device:
            model = library.AutoModel.from_config(config, dtype=dtype)
        backbone = cls(spec, model.to(device))
        backbone.freeze()
        return backbone

    def with_chunk(self, rows: int) -> "Qwen3VlBackbone":
        """Return a backbone of the same weights whose forwards have exactly ``rows`` rows: no dummies."""
        other = Qwen3VlBackbone(self.spec.model_copy(update={"chunk_size": rows}), self._model)
        other.freeze()
        return other

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Turn prompts into byte ids."""
        return self._prompts.rows(prompts, max_tokens)

    @torch.no_grad()
    def prefix(self, batch: PrefixBatch, signature: str) -> PrefixFeatures:
        """Encode rows in chunks of ``spec.chunk_size``."""
        answer = self._chunks.run((batch.images, batch.image_mask, batch.tokens, batch.token_mask))
        self.num_encoded += len(batch)
        self.num_forwards = self._chunks.num_forwards
        layers = self.kv_shape[0]
        return PrefixFeatures(
            hidden=answer[0],
            pad=answer[1],
            keys=answer[2 : 2 + layers],
            values=answer[2 + layers :],
            signature=signature,
        )

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Refuse: no benchmark pushes a tenant's tokens through."""
        raise NotImplementedError("the benchmarks' Qwen3-VL extends nothing.")

    def _encode_chunk(self, rows: Rows) -> Rows:
        images, image_mask, tokens, valid = rows
        hidden = self._model.language_model.embed_tokens(tokens)
        extra: list[Tensor] = []
        if images.shape[1]:
            seen, extra = self._image_tokens(images)
            valid = torch.cat([image_mask.repeat_interleave(seen.shape[1] // images.shape[1], dim=1), valid], dim=1)
            hidden = torch.cat([seen, hidden], dim=1)
        causal = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool, device=hidden.device).tril()
        # A padded position sees itself: softmax over an empty set is NaN.
        mask = causal & valid[:, None, None, :] | torch.eye(len(causal), dtype=torch.bool, device=hidden.device)
        rotary = self._rotary(hidden.shape[1], self.kv_shape[2], ROPE_BASE, hidden)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, layer in enumerate(self._model.language_model.layers):
            hidden, key, value = _text_layer(layer, hidden, rotary, mask)
            keys.append(key)
            values.append(value)
            if index < len(extra):
                hidden[:, : extra[index].shape[1]] += extra[index]
        return (self._model.language_model.norm(hidden), ~valid, *keys, *values)

    def _image_tokens(self, images: UInt8[Tensor, "b c h w 3"]) -> tuple[Float[Tensor, "b n d"], list[Tensor]]:
        """Tokens of all cameras of a row, and what deepstack adds to them behind the first language layers."""
        visual = self._model.visual
        config = self._model.config.vision_config
        rows = len(images)
        grid = (images.shape[2] // config.patch_size, images.shape[3] // config.patch_size)
        hidden = _patches(visual, images.flatten(0, 1), grid) + self._places(grid, images.device)
        head_dim = config.hidden_size // config.num_heads
        rotary = self._rotary(hidden.shape[1], head_dim, VISION_ROPE_BASE, hidden)
        taps: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            hidden = _vision_block(block, hidden, rotary, config.num_heads)
            if index in config.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[len(taps)]
                taps.append(_merged(merger, hidden, rows))
        return _merged(visual.merger, hidden, rows), taps

    def _places(self, grid: tuple[int, int], device: torch.device) -> Float[Tensor, "n d"]:
        """The learned grid of positions, resampled to the image's and put in the order of the patches."""
        key = ("places", grid, device)
        if key not in self._tables:
            weight = self._model.visual.pos_embed.weight
            side = int(weight.shape[0] ** 0.5)
            table = weight[: side * side].float().view(1, side, side, -1).permute(0, 3, 1, 2)
            table = functional.interpolate(table, size=grid, mode="bilinear", align_corners=True)[0]
            ordered = table.view(-1, grid[0] // 2, 2, grid[1] // 2, 2).permute(1, 3, 2, 4, 0).reshape(-1, len(table))
            self._tables[key] = (ordered.to(weight.dtype),)
        return self._tables[key][0]

    def _rotary(self, length: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (length, head_dim, base, like.dtype, like.device)
        if key not in self._tables:
            steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device) / head_dim
            angles = torch.arange(length, dtype=torch.float32, device=like.device)[:, None] / base**steps
            angles = torch.cat([angles, angles], dim=-1)
            self._tables[key] = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        cos, sin = self._tables[key]
        return cos, sin


def _patches(visual: Any, images: UInt8[Tensor, "n h w 3"], grid: tuple[int, int]) -> Float[Tensor, "n p d"]:  # noqa: ANN401
    """Embed the patches; the four that are merged later lie side by side, as in Qwen3-VL."""
    projection = visual.patch_embed.proj
    pixels = images.permute(0, 3, 1, 2).to(projection.weight.dtype) / 127.5 - 1
    doubled = pixels[:, :, None].expand(-1, -1, projection.weight.shape[2], -1, -1)
    cells = functional.conv3d(doubled, projection.weight, projection.bias, stride=projection.stride)
    shaped = cells.view(len(images), -1, grid[0] // 2, 2, grid[1] // 2, 2)
    return shaped.permute(0, 2, 4, 3, 5, 1).flatten(1, 4)


def _vision_block(block: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], num_heads: int) -> Tensor:  # noqa: ANN401
    mixed = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = mixed.unbind(0)
    query, key = _rotate(query, *rotary), _rotate(key, *rotary)
    attended = functional.scaled_dot_product_attention(query, key, value)
    hidden = hidden + block.attn.proj(attended.transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.norm2(hidden))


def _text_layer(
    layer: Any,  # noqa: ANN401
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a decoder layer; returns hidden states, and K (after rotary embedding) and V."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*normed.shape[:2], -1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(normed).view(shape)).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(normed).view(shape)).transpose(1, 2)
    value = attention.v_proj(normed).view(shape).transpose(1, 2)
    query, key = _rotate(query, *rotary), _rotate(key, *rotary)
    groups = query.shape[1] // key.shape[1]
    wide = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    attended = functional.scaled_dot_product_attention(query, *wide, attn_mask=mask)
    hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), key, value


def _merged(merger: Any, hidden: Tensor, rows: int) -> Tensor:  # noqa: ANN401
    return merger(hidden.flatten(0, 1)).view(rows, -1, merger.linear_fc2.out_features)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
