"""Action modules of the field's vision-language-action models, whose checkpoints people have."""

from typing import ClassVar, Literal

from pydantic import Field

from joynexus.specs.action_module import ActionModuleSpec


class SmolVlaModuleSpec(ActionModuleSpec):
    """SmolVLA's action expert beside the layers of a SmolVLM backbone; flow-matching loss.

    Shukor et al. 2025, https://arxiv.org/abs/2506.01844. Defaults are those of the released checkpoint.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.smolvla:SmolVlaModule"
    type: Literal["smolvla"] = "smolvla"
    num_layers: int = Field(default=16, ge=1, le=64)
    """Layers of the expert: as many as the backbone keeps."""
    width_multiplier: float = Field(default=0.75, gt=0.0, le=4.0)
    """Width of the expert as a part of the backbone's."""
    self_attn_every_n_layers: int = Field(default=2, ge=0, le=64)
    """Layers whose index this divides attend to prefix and actions jointly, all others to the prefix alone; 1: all
    attend jointly; 0: none does."""
    max_state_dim: int = Field(default=32, ge=1, le=1024)
    """States are padded with 0 to this width."""
    max_action_dim: int = Field(default=32, ge=1, le=1024)
    """Actions are padded with 0 to this width."""
    norm_eps: float = Field(default=1e-5, gt=0.0)
    """Added to the mean square in the expert's norms: the language model's own."""
    min_period: float = Field(default=4e-3, gt=0.0)
    """Shortest period that codes the flow time."""
    max_period: float = Field(default=4.0, gt=0.0)
    """Longest period that codes the flow time."""
    num_sampling_steps: int = Field(default=10, ge=1, le=1000)
    """Euler steps from noise to actions."""

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        del state_dim, action_dim, horizon  # padded to the widths above
        width = int(prefix_dim * self.width_multiplier)
        keys_values = prefix_dim // 3  # SmolVLM2: 5 K/V heads beside 15 query heads
        every = self.self_attn_every_n_layers
        joint = -(-self.num_layers // every) if every else 0
        attention = 2 * width * prefix_dim * self.num_layers
        attention += 2 * keys_values * (width * joint + keys_values * (self.num_layers - joint))
        mlp = 3 * width * mlp_width(width) * self.num_layers
        ends = width * (2 * self.max_action_dim + 3 * width) + prefix_dim * self.max_state_dim
        return attention + mlp + ends


def mlp_width(width: int, *, multiple_of: int = 256) -> int:
    """Return the hidden width of a gated MLP as Llama's authors size it: 8/3 of the width, rounded up.

    Touvron et al. 2023, Sec. 2.2, https://arxiv.org/abs/2302.13971.
    """
    hidden = 4 * int(2 * width / 3)
    return -(-hidden // multiple_of) * multiple_of
