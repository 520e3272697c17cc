"""Backbones that are vision-language models of transformers: from a checkpoint, or random from an explicit config."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from joynexus.specs.backbone import BackboneSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageSizes:
    """Sizes of a language model that memory is estimated from."""

    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    """Of the whole model, vision tower included."""
    mlp_dim: int = 0
    """Hidden width of the gated MLP; 0 takes four times ``hidden_dim``."""


class VlmBackboneSpec(BackboneSpec):
    """What the vision-language models have in common: where the weights come from, and how many layers are kept.

    Sizes that only the checkpoint knows are estimated as those of ``typical``.
    """

    path: str | None = None
    """Local folder or hub id; a hub id is downloaded only where the machine is configured to."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """``random`` builds ``config`` with ``seed``: for tests and benchmarks, never a useful policy."""
    config: dict[str, JsonValue] | None = None
    """Arguments of the family's config class of transformers; only with ``init: random``."""
    seed: int = 0
    """Of the random weights."""
    num_layers: int | None = Field(default=None, ge=1)
    """Keep the first N language layers, as SmolVLA and GR00T do; None keeps all."""

    typical: ClassVar[LanguageSizes]
    """Sizes of the family's usual checkpoint."""

    @model_validator(mode="after")
    def _one_source(self) -> "VlmBackboneSpec":
        if self.init == "random" and (self.config is None or self.path is not None):
            raise ValueError("init: random needs 'config' and no 'path'")
        if self.init == "pretrained" and (self.path is None or self.config is not None):
            raise ValueError("init: pretrained needs 'path' and no 'config'")
        return self

    def _part(self, name: str) -> dict[str, Any]:
        """Return a nested config, such as ``text_config``; empty where the checkpoint alone knows it."""
        part = (self.config or {}).get(name)
        return dict(part) if isinstance(part, dict) else {}

    def language(self) -> LanguageSizes:
        """Return the sizes of the kept language layers, as far as the spec tells them."""
        text, usual = self._part("text_config"), type(self).typical
        hidden_dim = int(text.get("hidden_size", usual.hidden_dim))
        layers = self.num_layers or int(text.get("num_hidden_layers", 2 if text else usual.num_layers))
        heads = int(text.get("num_attention_heads", usual.num_heads))
        whole = 24 * hidden_dim**2 * layers if self.init == "random" else usual.num_parameters
        return LanguageSizes(
            hidden_dim=hidden_dim,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads", heads if text else usual.num_kv_heads)),
            head_dim=int(text.get("head_dim") or (hidden_dim // heads if text else usual.head_dim)),
            num_parameters=whole,
            mlp_dim=int(text.get("intermediate_size", usual.mlp_dim or 4 * hidden_dim)),
        )

    def hidden_dim(self) -> int:  # noqa: D102
        return self.language().hidden_dim

    def adapter_layers(self) -> dict[str, tuple[int, int, int]]:  # noqa: D102
        sizes = self.language()
        layers, width, mlp = sizes.num_layers, sizes.hidden_dim, sizes.mlp_dim
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        attention = {"q_proj": (layers, width, queries), "k_proj": (layers, width, keys)}
        attention |= {"v_proj": (layers, width, keys), "o_proj": (layers, queries, width)}
        gated = {"gate_proj": (layers, width, mlp), "up_proj": (layers, width, mlp), "down_proj": (layers, mlp, width)}
        return attention | gated

    def parameter_bytes(self) -> int:  # noqa: D102
        count = self.language().num_parameters
        if self.init == "pretrained" and self.num_layers is not None:
            of_a_layer = sum(reads * writes for _, reads, writes in self.adapter_layers().values())
            count -= max(type(self).typical.num_layers - self.num_layers, 0) * of_a_layer
        return count * self.bytes_per_number

    def prefix_bytes(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        sizes = self.language()
        per_token = sizes.hidden_dim + 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
        return self.prefix_length(num_cameras, image_size, num_tokens) * per_token * self.bytes_per_number


class SmolVlmBackboneSpec(VlmBackboneSpec):
    """SmolVLM (transformers' own class) from a folder or hub id, or random from an explicit tiny config.

    Sizes that only the checkpoint knows are estimated as SmolVLM2-500M's.
    """

    implementation: ClassVar[str] = "joynexus.models.backbones.smolvlm:SmolVlmBackbone"
    typical: ClassVar[LanguageSizes] = LanguageSizes(
        hidden_dim=960,
        num_layers=32,
        num_heads=15,
        num_kv_heads=5,
        head_dim=64,
        num_parameters=500_000_000,
        mlp_dim=2560,
    )
    type: Literal["smolvlm"] = "smolvlm"
    embedding_scale: Literal["none", "sqrt_dim"] = "none"
    """``sqrt_dim`` multiplies image and language embeddings by the square root of their width, as SmolVLA does."""
    rope_base: float | None = Field(default=None, gt=1.0)
    """Base of the rotary embedding, computed in float32: SmolVLA's is 10000 whatever the checkpoint says; None: the
    checkpoint's."""
    image_special_tokens: bool = False
    """Frame each camera's tokens by two start tokens and one end token, seen even where the camera is missing."""
    pad_prefix_to: int | None = Field(default=None, ge=1)
    """Positions that a shorter prefix is filled up to; nothing reads the filling."""

    @property
    def tokens_around_image(self) -> int:
        """Positions that each camera takes beside its image tokens."""
        return 3 if self.image_special_tokens else 0

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        del image_size  # every frame is resized to the vision tower's own size
        vision = self._part("vision_config")
        side = int(vision.get("image_size", 512)) // int(vision.get("patch_size", 16))
        scale = int((self.config or {}).get("scale_factor", 4))  # pyright: ignore[reportArgumentType]
        return self.positions(num_cameras, (side // scale) ** 2, num_tokens)

    def positions(self, num_cameras: int, tokens_per_image: int, num_tokens: int) -> int:
        """Count the positions of a prefix whose cameras have ``tokens_per_image`` tokens each."""
        length = num_cameras * (tokens_per_image + self.tokens_around_image) + num_tokens
        return max(length, self.pad_prefix_to or 0)


class PaliGemmaBackboneSpec(VlmBackboneSpec):
    """PaliGemma (transformers' own class) from a folder or hub id, or random from an explicit tiny config.

    Beyer et al. 2024, https://arxiv.org/abs/2407.07726. Sizes that only the checkpoint knows are estimated as those of
    PaliGemma 3B at 224 pixels.
    """

    implementation: ClassVar[str] = "joynexus.models.backbones.paligemma:PaliGemmaBackbone"
    typical: ClassVar[LanguageSizes] = LanguageSizes(
        hidden_dim=2048,
        num_layers=18,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        num_parameters=2_920_000_000,
        mlp_dim=16384,
    )
    type: Literal["paligemma"] = "paligemma"

    @model_validator(mode="after")
    def _first_generation(self) -> "PaliGemmaBackboneSpec":
        family = self._part("text_config").get("model_type", "gemma")
        if family != "gemma":  # Gemma 2 caps its logits, norms its outputs and slides its windows
            raise ValueError(f"config.text_config.model_type is {family!r}, need 'gemma'. Take PaliGemma 1, not 2")
        return self

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        del image_size  # every frame is resized to the vision tower's own size
        vision = self._part("vision_config")
        side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 14))
        return num_cameras * side**2 + num_tokens


class QwenVlBackboneSpec(VlmBackboneSpec):
    """What Qwen2.5-VL and Qwen3-VL have in common.

    A row is a chat turn: its beginning, the frames of all cameras, and a token bucket that holds the prompt and the end
    of the turn behind its padding, so that a prompt's last tokens always stand at the end.
    """

    mask_layout: ClassVar[str] = "causal/1"
    min_image_size: ClassVar[int] = 1
    patch_size: ClassVar[int]
    """Side of a patch in pixels, where the config does not say."""
    header_length: ClassVar[int]
    """Tokens of the family's own ``chat_header``."""

    hidden_state: Literal["normed", "last_layer"] = "normed"
    """What modules read: the hidden states behind the final norm, or those that the last layer gives, as StarVLA and
    GR00T do."""
    chat_header: str | None = None
    """Text in front of the frames; None: the family's own, and with ``init: random`` none."""
    chat_footer: str | None = None
    """Text behind every prompt, in the same token bucket; None as for ``chat_header``."""
    min_pixels: int = Field(ge=1)
    """Smaller frames are enlarged to so many pixels; ``shortest_edge`` or ``min_pixels`` of the processor's config."""
    max_pixels: int = Field(ge=1)
    """Larger frames are shrunk to so many pixels; ``longest_edge`` or ``max_pixels`` of the processor's config."""
    image_mean: tuple[float, float, float]
    """Of each colour in [0, 1], taken off."""
    image_std: tuple[float, float, float]
    """Of each colour in [0, 1], divided by."""

    def merged_patch(self) -> int:
        """Return the side of what becomes one token, in pixels."""
        vision = self._part("vision_config")
        patch = int(vision.get("patch_size", type(self).patch_size))
        return patch * int(vision.get("spatial_merge_size", 2))

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        factor = self.merged_patch()
        height, width = (max(1, round(side / factor)) * factor for side in image_size)
        scale = 1.0
        if height * width > self.max_pixels:
            scale = self.max_pixels / (height * width)
        elif height * width < self.min_pixels:
            scale = self.min_pixels / (height * width)
        if self.init == "random":
            header = 1 + len(self.chat_header or "")  # bytes
        else:
            header = type(self).header_length if self.chat_header is None else -(-len(self.chat_header) // 4)
        around = 2  # the tokens that begin and end a frame
        return header + num_cameras * (round(height * width * scale / factor**2) + around) + num_tokens


class Qwen3VlBackboneSpec(QwenVlBackboneSpec):
    """Qwen3-VL: vision tower with deepstack, causal language layers, positions along three axes.

    Bai et al. 2025, https://arxiv.org/abs/2511.21631. Sizes that only the checkpoint knows are estimated as those of
    Qwen3-VL-4B.
    """

    implementation: ClassVar[str] = "joynexus.models.backbones.qwen_vl:Qwen3VlBackbone"
    typical: ClassVar[LanguageSizes] = LanguageSizes(
        hidden_dim=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_parameters=4_440_000_000,
        mlp_dim=9728,
    )
    patch_size: ClassVar[int] = 16
    header_length: ClassVar[int] = 3

    type: Literal["qwen3_vl"] = "qwen3_vl"
    min_pixels: int = Field(default=65_536, ge=1)
    """Smaller frames are enlarged to so many pixels: ``shortest_edge`` or ``min_pixels`` of the processor's config."""
    max_pixels: int = Field(default=16_777_216, ge=1)
    """Larger frames are shrunk to so many pixels: ``longest_edge`` or ``max_pixels`` of the processor's config."""
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Of each colour in [0, 1], taken off."""
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Of each colour in [0, 1], divided by."""


class Qwen25VlBackboneSpec(QwenVlBackboneSpec):
    """Qwen2.5-VL: vision tower with windowed attention, causal language layers, positions along three axes.

    Bai et al. 2025, https://arxiv.org/abs/2502.13923. Sizes that only the checkpoint knows are estimated as those of
    Qwen2.5-VL-3B.
    """

    implementation: ClassVar[str] = "joynexus.models.backbones.qwen_vl:Qwen25VlBackbone"
    typical: ClassVar[LanguageSizes] = LanguageSizes(
        hidden_dim=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        num_parameters=3_750_000_000,
        mlp_dim=11008,
    )
    patch_size: ClassVar[int] = 14
    header_length: ClassVar[int] = 14

    type: Literal["qwen2_5_vl"] = "qwen2_5_vl"
    min_pixels: int = Field(default=3_136, ge=1)
    """Smaller frames are enlarged to so many pixels: ``shortest_edge`` or ``min_pixels`` of the processor's config."""
    max_pixels: int = Field(default=12_845_056, ge=1)
    """Larger frames are shrunk to so many pixels: ``longest_edge`` or ``max_pixels`` of the processor's config."""
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Of each colour in [0, 1], taken off."""
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """Of each colour in [0, 1], divided by."""


class HfBackboneSpec(VlmBackboneSpec):
    """Any image-text-to-text model of transformers that gives hidden states, through the library's own forward.

    A row is the header, the frames of all cameras, each between two texts, and the prompt. There are no keys and
    values: families with modules that need them have backbones of their own. Frames are resized, scaled to [0, 1] and
    normalised as the fields say, so take them from the model's processor.
    """

    implementation: ClassVar[str] = "joynexus.models.backbones.hf:HfBackbone"
    typical: ClassVar[LanguageSizes] = LanguageSizes(
        hidden_dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, num_parameters=3_000_000_000
    )
    mask_layout: ClassVar[str] = "of-the-model/1"
    min_image_size: ClassVar[int] = 1

    type: Literal["hf"] = "hf"
    image_side: int = Field(ge=1, le=4096)
    """Frames become squares of this side, in pixels."""
    fit: Literal["stretch", "pad"] = "stretch"
    """Whether a frame is stretched to the square, or keeps its aspect and gets black at the left and top."""
    resample: Literal["bilinear", "bicubic"] = "bilinear"
    """How frames are stretched, with antialiasing; padded ones are bilinear without."""
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Of each colour in [0, 1], taken off."""
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Of each colour in [0, 1], divided by."""
    frames_by_row: bool = False
    """Whether the model takes pixels as [rows, frames, 3, s, s], as Idefics does; else as [rows * frames, 3, s, s]."""
    tokens_per_image: int = Field(ge=1, le=16_384)
    """Tokens of a frame; what the model gives is checked against it."""
    header: str = ""
    """Text in front of the frames, behind the tokenizer's own beginning."""
    image_start: str = ""
    """Text in front of each frame."""
    image_end: str = ""
    """Text behind each frame."""
    hidden_layer: int = Field(default=-1, ge=-256, le=256)
    """Which of the model's hidden states modules read: 0 is the embeddings, -1 the last, behind the final norm."""

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        del image_size  # every frame becomes a square of image_side
        letters = 1 if self.init == "random" else 4
        around = sum(-(-len(each) // letters) for each in (self.image_start, self.image_end))
        header = 1 + len(self.header) // letters
        return header + num_cameras * (self.tokens_per_image + around) + num_tokens

    def prefix_bytes(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        length = self.prefix_length(num_cameras, image_size, num_tokens)
        return length * self.hidden_dim() * self.bytes_per_number
