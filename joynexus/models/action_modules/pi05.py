"""π0.5: π0 whose state is text of the prompt, and whose flow time conditions the norms of the expert.

Physical Intelligence 2025, https://arxiv.org/abs/2504.16054, App. E. The suffix is one token per action:

    c   = silu(W_2 · silu(W_1 · φ(t)))                φ: sines and cosines
    z_i = W_a·x_t,i
    v_i = W_v · expert(z_1 .. z_H | prefix, c)_i

where c sets scale, shift and gate of every norm (adaRMS). All actions see each other and the prefix. The state enters
through the prompt alone (``{state}`` in ``prompt_template``), so it belongs to the prefix and to its key in the store.
Loss and sampling are in :mod:`joynexus.models.action_modules.gemma_flow`. The parameters have the names of LeRobot's
checkpoints.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import ModuleDims
from joynexus.models.action_modules.flow import time_code
from joynexus.models.action_modules.gemma_expert import GemmaExpert, Memory
from joynexus.models.action_modules.gemma_flow import GemmaFlowModule
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.vla_modules import Pi05ModuleSpec


class Pi05Module(GemmaFlowModule):
    """Velocity field v(x_t, t | prefix) over the chunk."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, Pi05ModuleSpec)
        self._periods = {"min_period": spec.min_period, "max_period": spec.max_period}
        self._width = width = spec.hidden_dim
        self.gemma_expert = GemmaExpert(spec, dims, adaptive=True)
        self.action_in_proj = nn.Linear(spec.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, spec.max_action_dim)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def velocity(
        self,
        noisy: Float[Tensor, "b t w"],
        time: Float[Tensor, " b"],
        state: Float[Tensor, "b s"],
        memory: Memory,
    ) -> Float[Tensor, "b t w"]:
        """Evaluate the field; see :meth:`GemmaFlowModule.velocity`. ``state`` is not read: it is in the prompt."""
        del state
        tokens = self.action_in_proj(noisy)  # z
        sees = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device)
        return self.action_out_proj(self.gemma_expert(tokens, memory, sees, self.condition(time)))  # v_i

    def condition(self, time: Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """Return c, the condition of the norms."""
        code = time_code(time, self._width, **self._periods)  # φ(t)
        return functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(code))))
