"""π0: a flow-matching action expert that attends to the frozen PaliGemma in every layer.

Black et al. 2024, https://arxiv.org/abs/2410.24164, App. B. The suffix is one token of the state q and one per action:

    s   = W_q·q
    z_i = W_2 · silu(W_1 · [W_a·x_t,i ; φ(t)])        φ: sines and cosines
    v_i = W_v · expert(s, z_1 .. z_H | prefix)_i

The state token sees the prefix and itself; an action token sees prefix, state and all actions. Loss and sampling are in
:mod:`joynexus.models.action_modules.gemma_flow`. The parameters have the names of LeRobot's checkpoints.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import ModuleDims
from joynexus.models.action_modules.flow import time_code, widen
from joynexus.models.action_modules.gemma_expert import GemmaExpert, Memory
from joynexus.models.action_modules.gemma_flow import GemmaFlowModule
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.vla_modules import Pi0ModuleSpec


class Pi0Module(GemmaFlowModule):
    """Velocity field v(x_t, t | prefix, state) over the chunk."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, Pi0ModuleSpec)
        self._periods = {"min_period": spec.min_period, "max_period": spec.max_period}
        self._max_state_dim, self._width = spec.max_state_dim, spec.hidden_dim
        width = spec.hidden_dim
        self.gemma_expert = GemmaExpert(spec, dims, adaptive=False)
        self.state_proj = nn.Linear(spec.max_state_dim, width)
        self.action_in_proj = nn.Linear(spec.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, spec.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def velocity(
        self,
        noisy: Float[Tensor, "b t w"],
        time: Float[Tensor, " b"],
        state: Float[Tensor, "b s"],
        memory: Memory,
    ) -> Float[Tensor, "b t w"]:
        """Evaluate the field; see :meth:`GemmaFlowModule.velocity`."""
        tokens = self.suffix(noisy, time, state)
        out = self.gemma_expert(tokens, memory, suffix_sees(tokens.shape[1], tokens.device))
        return self.action_out_proj(out[:, 1:])  # v_i

    def suffix(
        self, noisy: Float[Tensor, "b t w"], time: Float[Tensor, " b"], state: Float[Tensor, "b s"]
    ) -> Float[Tensor, "b q d"]:
        """Return the tokens s, z_1 .. z_H."""
        state_token = self.state_proj(widen(state, self._max_state_dim))[:, None]  # s
        actions = self.action_in_proj(noisy)
        code = time_code(time, self._width, **self._periods)[:, None].expand_as(actions)  # φ(t)
        mixed = functional.silu(self.action_time_mlp_in(torch.cat([actions, code], dim=2)))
        return torch.cat([state_token, self.action_time_mlp_out(mixed)], dim=1)  # z


def suffix_sees(count: int, device: torch.device) -> Bool[Tensor, "q q"]:
    """Tell which token of the suffix (row) sees which (column): all see all, but the first sees itself alone."""
    sees = torch.ones(count, count, dtype=torch.bool, device=device)
    sees[0, 1:] = False
    return sees
