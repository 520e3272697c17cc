"""Action modules of the field's vision-language-action models, whose checkpoints people have."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from joynexus.errors import SpecError
from joynexus.specs.action_module import ActionModuleSpec


class SmolVlaModuleSpec(ActionModuleSpec):
    """SmolVLA's action expert beside the layers of a SmolVLM backbone; flow-matching loss.

    Shukor et al. 2025, https://arxiv.org/abs/2506.01844. Defaults are those of the released checkpoint.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.smolvla:SmolVlaModule"
    needs_state: ClassVar[bool] = True
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

    def kv_layers(self) -> int:  # noqa: D102
        return self.num_layers

    def widest_state(self) -> int | None:  # noqa: D102
        return self.max_state_dim

    def widest_action(self) -> int | None:  # noqa: D102
        return self.max_action_dim

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


class GemmaExpertSpec(ActionModuleSpec):
    """A Gemma action expert beside the layers of a PaliGemma backbone; flow-matching loss.

    Defaults are the sizes of ``gemma_300m``. Layers, K/V heads, head width and query heads have to be the backbone's.
    """

    num_layers: int = Field(default=18, ge=1, le=128)
    """Layers of the expert, one beside each layer of the backbone."""
    hidden_dim: int = Field(default=1024, ge=8, le=16384)
    """Width of the expert."""
    mlp_dim: int = Field(default=4096, ge=8, le=65536)
    """Inner width of the expert's MLPs."""
    num_heads: int = Field(default=8, ge=1, le=256)
    """Query heads."""
    num_kv_heads: int = Field(default=1, ge=1, le=256)
    """K/V heads; divides ``num_heads``."""
    head_dim: int = Field(default=256, ge=2, le=1024)
    """Width of a head."""
    max_action_dim: int = Field(default=32, ge=1, le=1024)
    """Actions are padded with 0 to this width."""
    min_period: float = Field(default=4e-3, gt=0.0)
    """Shortest period that codes the flow time."""
    max_period: float = Field(default=4.0, gt=0.0)
    """Longest period that codes the flow time."""
    num_sampling_steps: int = Field(default=10, ge=1, le=1000)
    """Euler steps from noise to actions."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "GemmaExpertSpec":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        return self

    def kv_layers(self) -> int:  # noqa: D102
        return self.num_layers

    def widest_action(self) -> int | None:  # noqa: D102
        return self.max_action_dim

    def _layer_parameters(self) -> int:
        """Count the weights of one layer's attention and MLP."""
        attention = 2 * self.hidden_dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_dim * self.mlp_dim


class Pi0ModuleSpec(GemmaExpertSpec):
    """π0: the state is a token of the suffix, the flow time is mixed into the action tokens.

    Black et al. 2024, https://arxiv.org/abs/2410.24164.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.pi0:Pi0Module"
    needs_state: ClassVar[bool] = True
    type: Literal["pi0"] = "pi0"
    max_state_dim: int = Field(default=32, ge=1, le=1024)
    """States are padded with 0 to this width."""

    def widest_state(self) -> int | None:  # noqa: D102
        return self.max_state_dim

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        del prefix_dim, state_dim, action_dim, horizon  # padded to the widths above
        ends = self.hidden_dim * (2 * self.max_action_dim + self.max_state_dim + 3 * self.hidden_dim)
        return self.num_layers * self._layer_parameters() + ends


class Pi05ModuleSpec(GemmaExpertSpec):
    r"""π0.5: the state is text of the prompt, the flow time conditions the norms (adaRMS).

    Physical Intelligence 2025, https://arxiv.org/abs/2504.16054. The prompt that it was trained with is
    ``"Task: {instruction}, State: {state};\nAction: "`` with ``instruction_cleanup: one_line``.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.pi05:Pi05Module"
    type: Literal["pi05"] = "pi05"

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        del prefix_dim, state_dim, action_dim, horizon  # padded to the widths above
        norms = 3 * self.hidden_dim**2 * (2 * self.num_layers + 1)
        ends = self.hidden_dim * (2 * self.max_action_dim + 2 * self.hidden_dim)
        return self.num_layers * self._layer_parameters() + norms + ends


class Gr00tModuleSpec(ActionModuleSpec):
    """GR00T's flow-matching diffusion transformer, as StarVLA's QwenGR00T trains it.

    Bjorck et al. 2025, https://arxiv.org/abs/2503.14734. Defaults are those of StarVLA's ``DiT-B``.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.gr00t:Gr00tModule"
    type: Literal["gr00t"] = "gr00t"
    hidden_dim: int = Field(default=1024, ge=8, le=8192)
    """Width inside the encoder of the state and the decoder of actions, and of what the transformer gives."""
    num_heads: int = Field(default=12, ge=1, le=128)
    """Attention heads of the transformer."""
    head_dim: int = Field(default=64, ge=4, le=256)
    """Width of a head; the transformer's width is ``num_heads * head_dim``."""
    num_layers: int = Field(default=16, ge=2, le=64)
    """Layers of the transformer: those of even index attend to the prefix, those of odd index to its own tokens."""
    num_future_tokens: int = Field(default=32, ge=1, le=1024)
    """Learned tokens between state and actions."""
    max_steps: int = Field(default=1024, ge=0, le=8192)
    """Rows of the table of step positions, at least the horizon; 0: steps have no positions."""
    num_time_buckets: int = Field(default=1000, ge=1, le=100_000)
    """Flow times in [0, 1] are given to the network as whole numbers up to this."""
    num_sampling_steps: int = Field(default=4, ge=1, le=1000)
    """Euler steps from noise to actions."""
    repeated_diffusion_steps: int = Field(default=1, ge=1, le=64)
    """Draws of noise and time per sample and step of training; StarVLA's default is 4."""
    norm_prefix: bool = False
    """A layer norm over the prefix tokens, as GR00T N1.5 and N1.7 have it."""
    num_prefix_layers: int = Field(default=0, ge=0, le=32)
    """Self-attention layers over the prefix tokens; 4 in GR00T N1.5 and N1.7."""
    prefix_head_dim: int = Field(default=64, ge=4, le=256)
    """Width of a head of those layers; divides the backbone's width."""

    @property
    def width(self) -> int:
        """Width of the transformer's tokens."""
        return self.num_heads * self.head_dim

    def check_fit(self, *, prefix_dim: int, horizon: int) -> None:
        """Refuse sizes that do not fit backbone and chunk.

        Raises:
            SpecError: Saying which.
        """
        if self.num_prefix_layers and prefix_dim % self.prefix_head_dim:
            raise SpecError(
                f"action_module 'gr00t': prefix_head_dim {self.prefix_head_dim} does not divide the backbone's width "
                f"{prefix_dim}. Take one that does."
            )
        if 0 < self.max_steps < horizon:
            raise SpecError(
                f"action_module 'gr00t': max_steps is {self.max_steps}, the horizon {horizon}. "
                f"Raise max_steps to {horizon}."
            )

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        del horizon  # max_steps rows are there whatever it is
        width, hidden = self.width, self.hidden_dim
        within = self.num_layers // 2
        seen = prefix_dim * (self.num_layers - within) + width * within
        layers = 12 * width**2 * self.num_layers + 2 * width * seen  # norm 2, attention 2 + keys and values, MLP 8
        ends = width * (256 + 7 * width + action_dim + hidden + self.num_future_tokens + self.max_steps)
        ends += hidden * (hidden + action_dim + (state_dim + width if state_dim else 0))
        return layers + ends + 12 * prefix_dim**2 * self.num_prefix_layers
