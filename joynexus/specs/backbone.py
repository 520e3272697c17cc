"""Backbones: the frozen, shared vision-language models."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from joynexus.specs.base import Component
from joynexus.specs.registry import OneOf


class BackboneSpec(Component):
    """What every backbone declares, whatever its family."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and of the features."""
    chunk_size: int = Field(default=16, ge=1, le=1024)
    """Rows of one forward; a short one is padded with dummies, so that neighbours can't change a row's numbers."""

    processor_revision: ClassVar[str] = "1"
    """Raised when the preprocessing or the tokenizer changes, so that old features are never mixed with new."""
    state_in_prefix: ClassVar[bool] = False
    """Whether the robot's state enters the prefix; it then belongs to the signature."""
    mask_layout: ClassVar[str] = "bidirectional-prefix/1"
    """Which tokens of the prefix see each other; it belongs to the signature."""
    min_image_size: ClassVar[int] = 16
    """Smallest image side, in pixels, that the vision tower takes."""

    def identity(self) -> dict[str, Any]:
        """Return all that changes the numbers of the prefix: weights, revision, dtype, forward shape."""
        return {
            **self.model_dump(mode="json"),
            "processor_revision": type(self).processor_revision,
            "state_in_prefix": type(self).state_in_prefix,
        }

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Count the positions of one sample's prefix, padding included."""
        raise NotImplementedError

    def prefix_bytes(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        """Estimate the bytes of one sample's prefix features."""
        raise NotImplementedError

    def adapter_layers(self) -> dict[str, tuple[int, int, int]]:
        """Describe the linear layers that a tenant's adapter may change; none where there is no language model.

        Returns:
            By name, as an adapter's ``targets`` give it: in how many layers there is one, its inputs and its outputs.
        """
        return {}

    def parameter_bytes(self) -> int:
        """Estimate the resident bytes of the weights."""
        raise NotImplementedError

    def hidden_dim(self) -> int:
        """Return the width of one prefix token."""
        raise NotImplementedError

    @property
    def bytes_per_number(self) -> int:
        """Bytes of one weight or feature."""
        return 4 if self.dtype == "float32" else 2


class LiteBackboneSpec(BackboneSpec):
    """EfficientNet-Lite0 and MiniLM: a pretrained 27 M pair whose weights ship in Python packages.

    The image tokens are a feature map of the network, the text tokens the encoder's hidden states, both projected
    to one width by a fixed random matrix drawn from ``projection_seed`` (Johnson-Lindenstrauss).
    """

    implementation: ClassVar[str] = "joynexus.models.backbones.lite:LiteBackbone"
    type: Literal["lite"] = "lite"
    width: int = Field(default=192, ge=16, le=1280)
    """Width of a prefix token after the projection."""
    feature_stride: Literal[16, 32] = 32
    """Pixels per image token along each axis: 16 taps an earlier, spatially finer stage."""
    projection_seed: int = 0
    """Seed of the fixed projection."""
    chunk_size: int = Field(default=8, ge=1, le=1024)
    """Frames of one forward of the vision network. On a CPU, up to 12 or so keep all smaller sizes bitwise equal."""
    min_image_size: ClassVar[int] = 32

    def hidden_dim(self) -> int:  # noqa: D102
        return self.width

    def parameter_bytes(self) -> int:  # noqa: D102
        return 27_400_000 * self.bytes_per_number

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        height, width = (-(-side // self.feature_stride) for side in image_size)
        return num_cameras * height * width + num_tokens

    def prefix_bytes(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:  # noqa: D102
        return self.prefix_length(num_cameras, image_size, num_tokens) * self.width * self.bytes_per_number


AnyBackbone = Annotated[BackboneSpec, OneOf("backbones")]
"""Any registered backbone, by ``type``."""
