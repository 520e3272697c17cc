"""Flow matching with a Gemma expert: the loss and the sampling that π0 and π0.5 have in common.

Black et al. 2024, Sec. IV, https://arxiv.org/abs/2410.24164: t = 1 is noise ε, t = 0 the actions a,

    x_t = t·ε + (1 - t)·a        u = ε - a        loss = ‖v(x_t, t) - u‖²,  t ~ 0.999·Beta(1.5, 1) + 0.001

and Euler steps carry noise to actions along v. The network's own width of an action is ``max_action_dim``: actions are
padded to it with 0, noise is not.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from joynexus.models.action_module import ActionModule, Decision, ModuleDims, randn_rows
from joynexus.models.action_modules.flow import euler_times, widen
from joynexus.models.action_modules.flow_matching import flow_time, hold_last_valid
from joynexus.models.action_modules.gemma_expert import Memory, remember, reset_expert
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.vla_modules import GemmaExpertSpec


class GemmaFlowModule(ActionModule):
    """A velocity field over the chunk whose network reads the prefix's keys and values in every layer."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__(spec, dims)
        assert isinstance(spec, GemmaExpertSpec)
        self._num_layers, self._num_steps = spec.num_layers, spec.num_sampling_steps
        self._max_action_dim = spec.max_action_dim

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew."""
        reset_expert(self, generator)

    @abstractmethod
    def velocity(
        self,
        noisy: Float[Tensor, "b t w"],
        time: Float[Tensor, " b"],
        state: Float[Tensor, "b s"],
        memory: Memory,
    ) -> Float[Tensor, "b t w"]:
        """Evaluate the field v(x_t, t | prefix, state).

        Args:
            noisy: x_t, ``max_action_dim`` wide.
            time: t, 1 is noise.
            state: Normalised.
            memory: Of the prefix, from :func:`remember`.
        """

    def loss_elements(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        noise: Float[Tensor, "b t w"],
        time: Float[Tensor, " b"],
    ) -> Float[Tensor, "b t w"]:
        """Return the squared error of every number of the padded chunk, before any reduction."""
        clean, blend = widen(actions, self._max_action_dim), time[:, None, None]
        noisy = blend * noise + (1 - blend) * clean  # x_t
        target = noise - clean  # u
        return (self.velocity(noisy, time, state, remember(prefix)) - target).square()

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the loss of each row at one random time, drawn from ``generator``.

        The family's rule: the mean over *all* steps of the chunk and the dimensions that the robot has. Steps past the
        end of an episode count like any other and hold its last action, whatever the batch has there; padded
        dimensions do not count. A row without a valid step has loss 0.
        """
        clean = hold_last_valid(actions, valid)
        shape = (*clean.shape[:2], self._max_action_dim)
        noise = torch.randn(shape, generator=generator, device=generator.device).to(clean)
        uniform = torch.rand(len(clean), generator=generator, device=generator.device).to(clean)
        elements = self.loss_elements(prefix, state, clean, noise, flow_time(uniform))
        rows = elements[..., : self.dims.action_dim].mean(dim=(1, 2))
        return torch.where(valid.any(dim=1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))

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
        noise = randn_rows(generators, self.dims.horizon, self._max_action_dim).to(prefix.hidden.device)
        return Decision(actions=self.sample(prefix, state, noise)[..., : self.dims.action_dim])

    @torch.no_grad()
    def sample(
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], noise: Float[Tensor, "b t w"]
    ) -> Float[Tensor, "b t w"]:
        """Integrate from noise at t = 1 to a padded chunk at t = 0."""
        memory, chunk, step = remember(prefix), noise, -1.0 / self._num_steps
        for time in euler_times(self._num_steps):
            pause()
            times = torch.full((len(chunk),), time, device=chunk.device)
            chunk = chunk + step * self.velocity(chunk, times, state, memory)
        return chunk
