"""GR00T's flow-matching diffusion transformer over state, future tokens and actions, as StarVLA trains it.

Bjorck et al. 2025, https://arxiv.org/abs/2503.14734, Sec. 2.1. Time runs the other way than in π0: t = 0 is noise ε,
t = 1 the actions a,

    x_t = (1 - t)·ε + t·a        v = a - ε        loss = ‖v(x_t, t) - v‖², mean over all steps and dimensions

with t = (0.999 - Beta(1.5, 1)) / 0.999, kept in [0, 1]; the network sees floor(1000·t). Sampling integrates v from
t = 0 to 1 in a few Euler steps. The transformer is DiT (Peebles and Xie 2023, https://arxiv.org/abs/2212.09748) with
adaptive layer norms; its layers attend in turn to the prefix (even ones) and to each other's tokens (odd ones).

Parameters have the names of StarVLA's ``action_model``. Two parts that GR00T N1.5 and N1.7 add are options: a layer
norm over the prefix tokens (``vlln``) and self-attention layers over them (``vl_self_attention``). Not here: N1.7's
weights per embodiment, and its cross-attention to image and text tokens in turn.

Steps that are not valid hold the last valid action and count like all others, as they do in the reference, whose data
set repeats the last action at the end of an episode. A row without a valid step has loss 0.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import ActionModule, Decision, ModuleDims, randn_rows
from joynexus.models.action_modules.dit import Dit, KeysValues, PrefixTransformer, waves_of
from joynexus.models.action_modules.flow_matching import hold_last_valid
from joynexus.models.action_modules.layers import reset_layers, visible_tokens
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.vla_modules import Gr00tModuleSpec

BETA_SCALE = 0.999
"""The s of t = (s - Beta) / s."""


def flow_time(beta: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Turn Beta(1.5, 1) draws into flow times; a draw above 0.999 would give a time below 0, and gives 0."""
    return ((BETA_SCALE - beta) / BETA_SCALE).clamp(0.0, 1.0)


class TwoLayers(nn.Module):
    """W₂·relu(W₁·x)."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(inputs, hidden)
        self.layer2 = nn.Linear(hidden, outputs)

    def forward(self, rows: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """Map rows."""
        return self.layer2(functional.relu(self.layer1(rows)))


class ActionEncoder(nn.Module):
    """W₃·silu(W₂·[W₁·x_t, code of t]) of each step."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self._half = width // 2
        self.layer1 = nn.Linear(action_dim, width)
        self.layer2 = nn.Linear(2 * width, width)
        self.layer3 = nn.Linear(width, width)

    def forward(self, noisy: Float[Tensor, "b t a"], bucket: Int64[Tensor, " b"]) -> Float[Tensor, "b t w"]:
        """Encode noisy actions."""
        waves = waves_of(bucket, self._half, last=self._half)
        code = torch.cat([waves.sin(), waves.cos()], dim=-1)[:, None].expand(-1, noisy.shape[1], -1)
        return self.layer3(functional.silu(self.layer2(torch.cat([self.layer1(noisy), code], dim=-1))))


class Gr00tModule(ActionModule):
    """Velocity field v(x_t, t | prefix, state) over the chunk."""

    reads_keys_values: ClassVar[bool] = False

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        """Size the layers.

        Raises:
            SpecError: If the sizes do not fit the prefix or the chunk.
        """
        super().__init__(spec, dims)
        assert isinstance(spec, Gr00tModuleSpec)
        spec.check_fit(prefix_dim=dims.prefix_dim, horizon=dims.horizon)
        self._num_steps, self._repeats = spec.num_sampling_steps, spec.repeated_diffusion_steps
        self._num_buckets = spec.num_time_buckets
        width, hidden = spec.width, spec.hidden_dim
        self.vlln = nn.LayerNorm(dims.prefix_dim) if spec.norm_prefix else None
        self.vl_self_attention = (
            PrefixTransformer(
                dims.prefix_dim,
                num_layers=spec.num_prefix_layers,
                num_heads=dims.prefix_dim // spec.prefix_head_dim,
            )
            if spec.num_prefix_layers
            else None
        )
        self.model = Dit(
            width,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            memory_dim=dims.prefix_dim,
            output_dim=hidden,
        )
        self.state_encoder = TwoLayers(dims.state_dim, hidden, width) if dims.state_dim else None
        self.action_encoder = ActionEncoder(dims.action_dim, width)
        self.action_decoder = TwoLayers(hidden, hidden, dims.action_dim)
        self.future_tokens = nn.Embedding(spec.num_future_tokens, width)
        self.position_embedding = nn.Embedding(spec.max_steps, width) if spec.max_steps else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew."""
        reset_layers(self, generator)
        for each in self.modules():
            if isinstance(each, nn.Embedding):
                nn.init.normal_(each.weight, std=0.02, generator=generator)

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the loss of each row, the mean over ``repeated_diffusion_steps`` draws of noise and time.

        All steps count, those that hold the last valid action too (see the module's docstring).
        """
        clean = hold_last_valid(actions, valid)
        many = self._repeats * len(clean)
        noise = torch.randn(many, *clean.shape[1:], generator=generator, device=generator.device).to(clean)
        uniform = torch.rand(many, generator=generator, device=generator.device).to(clean)
        time = flow_time(uniform.pow(1 / 1.5))  # the inverse of Beta(1.5, 1): torch's own sampler takes no generator
        errors = self.loss_elements(prefix, state, clean, noise, time)
        rows = errors.view(self._repeats, *clean.shape).mean(dim=(0, 2, 3))
        return torch.where(valid.any(dim=1), rows, torch.zeros_like(rows))

    def loss_elements(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        noise: Float[Tensor, "rb t a"],
        time: Float[Tensor, " rb"],
    ) -> Float[Tensor, "rb t a"]:
        """Return ‖v(x_t, t) - (a - ε)‖² per element at given noise and time, for one or more draws per row.

        Args:
            prefix: Features.
            state: Normalised.
            actions: Normalised targets.
            noise: ε of each draw; all rows of the first draw come first.
            time: t of each draw.
        """
        repeats = len(noise) // len(actions)
        clean, blend = actions.repeat(repeats, 1, 1), time[:, None, None]
        noisy = (1 - blend) * noise + blend * clean
        memory, mask = self.remember(prefix, repeats)
        velocity = self.velocity(noisy, time, state.repeat(repeats, 1), memory, mask)
        return (velocity - (clean - noise)).square()

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
        noise = randn_rows(generators, self.dims.horizon, self.dims.action_dim).to(prefix.hidden.device)
        return Decision(actions=self.sample(prefix, state, noise))

    def sample(
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], noise: Float[Tensor, "b t a"]
    ) -> Float[Tensor, "b t a"]:
        """Integrate x ← x + v/N from t = 0 to 1, from given noise."""
        memory, mask = self.remember(prefix)
        chunk = noise
        for index in range(self._num_steps):
            pause()
            bucket = torch.full((len(chunk),), self._num_buckets * index // self._num_steps, device=chunk.device)
            chunk = chunk + self._field(chunk, bucket, state, memory, mask) * (1.0 / self._num_steps)
        return chunk

    def remember(
        self, prefix: PrefixFeatures, repeats: int = 1
    ) -> tuple[list[KeysValues | None], Bool[Tensor, "rb 1 1 p"]]:
        """Compute what the cross-attentions see, once for all Euler steps and all draws of a row.

        Args:
            prefix: Features.
            repeats: How often the rows are given, one whole batch after the other.

        Returns:
            Keys and values per block, and the mask of what may be seen.
        """
        seen = ~prefix.pad
        mask = (seen | ~seen.any(dim=1, keepdim=True))[:, None, None]  # softmax over an empty set is NaN
        tokens = visible_tokens(prefix)
        if self.vlln is not None:
            tokens = self.vlln(tokens)
        if self.vl_self_attention is not None:
            tokens = self.vl_self_attention(tokens, mask)
        memory = [
            None if each is None else (each[0].repeat(repeats, 1, 1, 1), each[1].repeat(repeats, 1, 1, 1))
            for each in self.model.keys_values(tokens)
        ]
        return memory, mask.repeat(repeats, 1, 1, 1)

    def velocity(
        self,
        noisy: Float[Tensor, "b t a"],
        time: Float[Tensor, " b"],
        state: Float[Tensor, "b s"],
        memory: Sequence[KeysValues | None],
        mask: Bool[Tensor, "b 1 1 p"],
    ) -> Float[Tensor, "b t a"]:
        """Evaluate the field at x_t and t, given what :meth:`remember` returned."""
        return self._field(noisy, (time * self._num_buckets).long(), state, memory, mask)

    def tokens(
        self, noisy: Float[Tensor, "b t a"], bucket: Int64[Tensor, " b"], state: Float[Tensor, "b s"]
    ) -> Float[Tensor, "b n w"]:
        """Return what the transformer runs over: a state token, the future tokens, one token per step."""
        steps = self.action_encoder(noisy, bucket)
        if self.position_embedding is not None:
            steps = steps + self.position_embedding.weight[: noisy.shape[1]]
        future = self.future_tokens.weight.expand(len(noisy), -1, -1)
        if self.state_encoder is None:
            return torch.cat([future, steps], dim=1)
        return torch.cat([self.state_encoder(state)[:, None], future, steps], dim=1)

    def _field(
        self,
        noisy: Float[Tensor, "b t a"],
        bucket: Int64[Tensor, " b"],
        state: Float[Tensor, "b s"],
        memory: Sequence[KeysValues | None],
        mask: Bool[Tensor, "b 1 1 p"],
    ) -> Float[Tensor, "b t a"]:
        rows = self.model(self.tokens(noisy, bucket, state), bucket, memory, mask)
        return self.action_decoder(rows)[:, -noisy.shape[1] :]
