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
        )

    def hidden_dim(self) -> int:  # noqa: D102
        return self.language().hidden_dim

    def parameter_bytes(self) -> int:  # noqa: D102
        return self.language().num_parameters * self.bytes_per_number

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
        hidden_dim=960, num_layers=32, num_heads=15, num_kv_heads=5, head_dim=64, num_parameters=500_000_000
    )
    type: Literal["smolvlm"] = "smolvlm"

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        del image_size  # every frame is resized to the vision tower's own size
        vision = self._part("vision_config")
        side = int(vision.get("image_size", 512)) // int(vision.get("patch_size", 16))
        scale = int((self.config or {}).get("scale_factor", 4))  # pyright: ignore[reportArgumentType]
        return num_cameras * (side // scale) ** 2 + num_tokens
