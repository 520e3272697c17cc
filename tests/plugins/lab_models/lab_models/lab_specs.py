"""Step 1: what can be written in a file. Neither torch nor numpy is imported here."""

from typing import ClassVar, Literal

from pydantic import Field

from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.backbone import BackboneSpec


class PatchesBackboneSpec(BackboneSpec):
    """Patches of the frames and bytes of the prompt, each through a fixed random matrix."""

    implementation: ClassVar[str] = "lab_models.patches:PatchesBackbone"
    type: Literal["patches"] = "patches"
    patch: int = Field(default=16, ge=1)
    """Pixels of a patch's side; divides the sides of the frames."""
    width: int = Field(default=32, ge=1)
    """Of a prefix token."""
    seed: int = 0
    """Of the matrices."""

    def hidden_dim(self) -> int:
        return self.width

    def parameter_bytes(self) -> int:
        return (3 * self.patch**2 + 264) * self.width * self.bytes_per_number

    def prefix_length(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        height, width = (side // self.patch for side in image_size)
        return num_cameras * height * width + num_tokens

    def prefix_bytes(self, num_cameras: int, image_size: tuple[int, int], num_tokens: int) -> int:
        return self.prefix_length(num_cameras, image_size, num_tokens) * self.width * self.bytes_per_number


class LinearModuleSpec(ActionModuleSpec):
    """The mean of the prefix and the state, through one linear layer to the chunk; squared error."""

    implementation: ClassVar[str] = "lab_models.linear:LinearModule"
    type: Literal["linear"] = "linear"

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:
        return (prefix_dim + state_dim + 1) * action_dim * horizon
