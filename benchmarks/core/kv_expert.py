"""An action expert that reads the backbone's keys and values layer by layer, as SmolVLA's does.

Shukor et al. 2025, https://arxiv.org/abs/2506.01844: block i of the expert cross-attends to its own projections of the
K/V (after rotary embedding) of a layer of the frozen backbone. All else is the product's flow-matching module.
"""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from joynexus.models.action_module import ModuleDims
from joynexus.models.action_modules.chunk_transformer import Block, KeysValues
from joynexus.models.action_modules.flow_matching import FlowMatchingModule
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec, FlowMatchingModuleSpec


class KvExpertSpec(FlowMatchingModuleSpec):
    """A flow-matching transformer that reads K/V."""

    implementation: ClassVar[str] = "benchmarks.core.kv_expert:KvExpert"
    kv_width: int = Field(ge=1)
    """K/V heads of the backbone times their width."""


class KvExpert(FlowMatchingModule):
    """Flow matching whose cross-attentions read the K/V of the backbone's last layers."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, KvExpertSpec)
        self.spec = spec
        self._num_heads = spec.num_heads
        width, layers = spec.hidden_dim, spec.num_layers
        self.from_keys = nn.ModuleList([nn.Linear(spec.kv_width, width) for _ in range(layers)])
        self.from_values = nn.ModuleList([nn.Linear(spec.kv_width, width) for _ in range(layers)])

    def remember(
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]
    ) -> tuple[list[KeysValues], Bool[Tensor, "b 1 1 n"]]:
        """Project the K/V of the last layers, and put the state token behind them."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        layers = zip(prefix.keys[-len(blocks) :], prefix.values[-len(blocks) :], strict=True)
        memory: list[KeysValues] = []
        for index, (key, value) in enumerate(layers):
            projected = self._project(self.from_keys[index], key), self._project(self.from_values[index], value)
            if self.state_in is None:
                memory.append(projected)
                continue
            own = blocks[index].cross_attention.keys_values(self.state_in(state)[:, None])
            joined = [torch.cat(pair, dim=2) for pair in zip(projected, own, strict=True)]
            memory.append((joined[0], joined[1]))
        seen = ~prefix.pad
        if self.state_in is not None:
            seen = torch.cat([seen, seen.new_ones(len(prefix), 1)], dim=1)
        return memory, seen[:, None, None]

    def _project(self, layer: nn.Module, each: Tensor) -> Tensor:
        """[b, kv_heads, n, e] of the backbone to [b, heads, n, width / heads] of the expert."""
        tokens = layer(each.transpose(1, 2).flatten(2).to(torch.float32))
        return tokens.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
