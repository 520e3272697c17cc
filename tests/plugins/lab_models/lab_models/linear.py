"""Step 2 of the action module: what a tenant trains."""

import torch
from torch import nn

from joynexus.models.action_module import ActionModule, Decision, masked_row_mean


class LinearModule(ActionModule):
    """a = W·[mean of the prefix, state] + b. The loss counts valid steps alone."""

    reads_keys_values = False

    def __init__(self, spec, dims):
        super().__init__(spec, dims)
        self.leave = nn.Linear(dims.prefix_dim + dims.state_dim, dims.horizon * dims.action_dim)

    def reset_parameters(self, generator):
        nn.init.xavier_uniform_(self.leave.weight, generator=generator)
        nn.init.zeros_(self.leave.bias)

    def predict(self, prefix, state):
        seen = ~prefix.pad[..., None]
        hidden = torch.where(seen, prefix.hidden.to(torch.float32), 0.0)  # padding may hold anything
        mean = hidden.sum(dim=1) / seen.sum(dim=1).clamp(min=1)
        chunk = self.leave(torch.cat([mean, state], dim=1))
        return chunk.view(-1, self.dims.horizon, self.dims.action_dim)

    def loss(self, prefix, state, actions, valid, generator):
        predicted = self.predict(prefix, state)
        target = torch.where(valid[..., None], actions, predicted.detach())  # padded steps may hold NaN
        return masked_row_mean((predicted - target).square(), valid)

    @torch.no_grad()
    def act(self, prefix, state, generators, *, deterministic):
        return Decision(actions=self.predict(prefix, state))
