"""Action modules: what a tenant owns and trains on top of the shared prefix features."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from joynexus.specs.base import Component
from joynexus.specs.registry import OneOf


class ActionModuleSpec(Component):
    """What every action module declares, whatever its family."""

    gives_log_prob: ClassVar[bool] = False
    """Whether ``act`` gives log-probability and value, as policy-gradient algorithms need."""
    needs_state: ClassVar[bool] = False
    """Whether it has weights for the robot's state that are of no use without one."""

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:
        """Estimate the number of trainable parameters."""
        raise NotImplementedError

    def longest_prefix(self) -> int | None:
        """Return the most prefix positions that the module reads; None reads any number."""
        return None

    def kv_layers(self) -> int:
        """Return how many of the backbone's layers it reads keys and values of."""
        return 0

    def widest_state(self) -> int | None:
        """Return the widest state that the module takes; None takes any."""
        return None

    def widest_action(self) -> int | None:
        """Return the widest action that the module gives; None gives any."""
        return None


class OftModuleSpec(ActionModuleSpec):
    """OpenVLA-OFT style: prefix tokens and state through an MLP to the whole chunk, L1 loss.

    Kim et al. 2025, https://arxiv.org/abs/2502.19645. ``reads: queries`` is StarVLA's QwenOFT: the prompt holds one
    action token per step of the chunk, and the MLP turns the hidden state of each into one action.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.oft:OftModule"
    type: Literal["oft"] = "oft"
    reads: Literal["prefix", "queries"] = "prefix"
    """``prefix``: all tokens, each in a place of its own, and the state. ``queries``: the action tokens of the prompt
    alone, one per step of the chunk; a state that is to count is in the prompt."""
    query_tail: int = Field(default=0, ge=0, le=4096)
    """With ``queries``: real tokens behind the last action token, to the end of the prompt."""
    hidden_dim: int = Field(default=256, ge=8, le=8192)
    """Width of the MLP."""
    num_layers: int = Field(default=2, ge=1, le=16)
    """Hidden layers of the MLP; with ``queries`` its residual blocks."""
    token_dim: int = Field(default=32, ge=1, le=1024)
    """Each prefix token is projected to this width and kept apart, so that positions survive the pooling."""
    max_prefix_tokens: int = Field(default=64, ge=1, le=4096)
    """Longest prefix that the module reads; longer ones are refused. ``queries`` read any."""

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        if self.reads == "queries":
            return (prefix_dim + self.num_layers * self.hidden_dim + action_dim) * self.hidden_dim
        inputs = self.token_dim * self.max_prefix_tokens + state_dim
        body = inputs * self.hidden_dim + (self.num_layers - 1) * self.hidden_dim**2
        return prefix_dim * self.token_dim + body + self.hidden_dim * action_dim * horizon

    def longest_prefix(self) -> int | None:  # noqa: D102
        return None if self.reads == "queries" else self.max_prefix_tokens


class FlowMatchingModuleSpec(ActionModuleSpec):
    """A diffusion transformer over the action chunk that cross-attends to the prefix; flow-matching loss.

    Lipman et al. 2023, https://arxiv.org/abs/2210.02747; Peebles and Xie 2023, https://arxiv.org/abs/2212.09748.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.flow_matching:FlowMatchingModule"
    type: Literal["flow_matching"] = "flow_matching"
    hidden_dim: int = Field(default=128, ge=16, le=4096)
    """Width of the transformer."""
    num_layers: int = Field(default=4, ge=1, le=64)
    """Blocks, each self-attention, cross-attention and MLP."""
    num_heads: int = Field(default=4, ge=1, le=64)
    """Attention heads; divides ``hidden_dim``."""
    num_sampling_steps: int = Field(default=10, ge=1, le=1000)
    """Euler steps from noise to actions."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "FlowMatchingModuleSpec":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide hidden_dim {self.hidden_dim}")
        return self

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        width = self.hidden_dim
        block = 22 * width * width  # self- and cross-attention 8, MLP 8, adaptive norms 6
        ends = width * (prefix_dim + state_dim + 2 * action_dim + horizon + 2 * width)
        return self.num_layers * block + ends


class GaussianModuleSpec(ActionModuleSpec):
    """A tanh-squashed Normal over the chunk with a value head: the module for PPO.

    Haarnoja et al. 2018, App. C, https://arxiv.org/abs/1801.01290.
    """

    implementation: ClassVar[str] = "joynexus.models.action_modules.gaussian:GaussianModule"
    type: Literal["gaussian"] = "gaussian"
    gives_log_prob: ClassVar[bool] = True
    hidden_dim: int = Field(default=128, ge=8, le=8192)
    """Width of the two MLPs (actor and critic)."""
    num_layers: int = Field(default=2, ge=1, le=16)
    """Hidden layers of each MLP."""
    token_dim: int = Field(default=32, ge=1, le=1024)
    """Each prefix token is projected to this width and kept apart."""
    max_prefix_tokens: int = Field(default=64, ge=1, le=4096)
    """Longest prefix that the module reads; longer ones are refused."""
    initial_log_std: float = Field(default=-0.5, ge=-5.0, le=2.0)
    """Logarithm of the standard deviation at the start, before the tanh."""

    def num_parameters(self, *, prefix_dim: int, state_dim: int, action_dim: int, horizon: int) -> int:  # noqa: D102
        inputs = self.token_dim * self.max_prefix_tokens + state_dim
        body = inputs * self.hidden_dim + (self.num_layers - 1) * self.hidden_dim**2
        return 2 * (prefix_dim * self.token_dim + body) + self.hidden_dim * (action_dim * horizon + 1)

    def longest_prefix(self) -> int | None:  # noqa: D102
        return self.max_prefix_tokens


AnyActionModule = Annotated[ActionModuleSpec, OneOf("action_modules")]
"""Any registered action module, by ``type``."""
