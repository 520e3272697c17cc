"""Flow matching with a diffusion transformer over the action chunk that cross-attends to the prefix.

Lipman et al. 2023, https://arxiv.org/abs/2210.02747; time and direction as in π0 (Black et al. 2024,
https://arxiv.org/abs/2410.24164): t = 1 is noise ε, t = 0 the actions a,

    x_t = t·ε + (1 - t)·a        u = ε - a        loss = ‖v(x_t, t) - u‖²

with t ~ 0.999·Beta(1.5, 1) + 0.001; sampling integrates v from t = 1 to 0 with Euler steps.

The field is a transformer over the steps of the chunk, :mod:`joynexus.models.action_modules.chunk_transformer`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from joynexus.models.action_module import Decision, ModuleDims, masked_row_mean, randn_rows
from joynexus.models.action_modules.chunk_transformer import ChunkTransformer, KeysValues, hold_last_valid
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec, FlowMatchingModuleSpec


def flow_time(uniform: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Turn uniform numbers in [0, 1) into flow times: 0.999·Beta(1.5, 1) + 0.001, never outside [0, 1].

    The Beta is drawn through its inverse, u^(1/1.5): torch's own sampler takes no generator.
    """
    return (uniform.pow(1 / 1.5) * 0.999 + 0.001).clamp(0.0, 1.0)


class FlowMatchingModule(ChunkTransformer):
    """Velocity field v(x_t, t | prefix, state) over the chunk."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        assert isinstance(spec, FlowMatchingModuleSpec)
        super().__init__(spec, dims, width=spec.hidden_dim, num_layers=spec.num_layers, num_heads=spec.num_heads)
        self._num_steps = spec.num_sampling_steps

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the flow-matching loss of each row at one random time, drawn from ``generator``.

        Valid steps attend to padded ones, as they do when the chunk is sampled; padded steps hold the last valid
        action, whatever the batch has there.
        """
        clean = hold_last_valid(actions, valid)
        noise = torch.randn(clean.shape, generator=generator, device=generator.device).to(clean)
        uniform = torch.rand(len(clean), generator=generator, device=generator.device).to(clean)
        time = flow_time(uniform)
        blend = time[:, None, None]
        noisy = blend * noise + (1 - blend) * clean
        velocity = self.velocity(noisy, time, *self.remember(prefix, state))
        return masked_row_mean((velocity - (noise - clean)).square(), valid)

    @torch.no_grad()
    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        """Integrate from each row's own noise to actions; both modes start from the seeded noise."""
        del deterministic
        chunk = randn_rows(generators, self.dims.horizon, self.dims.action_dim).to(prefix.hidden.device)
        memory, mask = self.remember(prefix, state)
        step = -1.0 / self._num_steps
        for index in range(self._num_steps):
            pause()
            time = torch.full((len(prefix),), 1.0 + index * step, device=chunk.device)
            chunk = chunk + step * self.velocity(chunk, time, memory, mask)
        return Decision(actions=chunk)

    def velocity(
        self,
        noisy: Float[Tensor, "b t a"],
        time: Float[Tensor, " b"],
        memory: Sequence[KeysValues],
        mask: Bool[Tensor, "b 1 1 n"],
    ) -> Float[Tensor, "b t a"]:
        """Evaluate the field at x_t and t, given what :meth:`remember` returned."""
        return self.denoise(noisy, time, memory, mask)
