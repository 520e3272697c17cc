"""SmolVLA's action expert: a narrow transformer beside the layers of a frozen SmolVLM; flow-matching loss.

Shukor et al. 2025, https://arxiv.org/abs/2506.01844. Images and language are the shared prefix. The robot's state is
one token behind it, made by the tenant's own projection and pushed through the frozen layers, so that the gradient
reaches the projection. The noisy actions, each joined with the flow time, are the expert's tokens. In layer i, with K
and V the frozen layer's keys (after rotary embedding) and values of images, language and state,

    i divisible by n:  softmax(q·[K; k]ᵀ / √d)·[V; v]           joint self-attention, causal among the actions
    all others:        softmax(q·(K·W_k)ᵀ / √d)·(V·W_v)         cross-attention; positions of q count from 0

The flow is π0's (Black et al. 2024, https://arxiv.org/abs/2410.24164): t = 1 is noise ε, t = 0 the actions a,

    x_t = t·ε + (1 - t)·a        u = ε - a        loss = ‖v(x_t, t) - u‖²,  t ~ 0.999·Beta(1.5, 1) + 0.001

and Euler steps carry noise to actions along v. States and actions are padded with 0 to the expert's own widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import SpecError
from joynexus.models.action_module import ActionModule, Decision, ModuleDims, masked_row_mean, randn_rows
from joynexus.models.action_modules.flow import euler_times, time_code, widen
from joynexus.models.action_modules.flow_matching import flow_time, hold_last_valid
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.rotary import rotary_angles, rotate
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.vla_modules import SmolVlaModuleSpec, mlp_width

ROTARY_BASE = 10_000.0
"""Whatever the language model's own is."""

KeysValues = tuple[Tensor, Tensor]
"""Each [b, kv_heads, tokens, head_dim], in float32."""
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each [b, 1, tokens, head_dim]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the expert reads of images, language and state, the same for all Euler steps."""

    layers: tuple[KeysValues, ...]
    """As each layer of the expert wants them: a cross-attention's own projections are done."""
    seen: Bool[Tensor, "b p"]
    """True at positions that hold something."""


class RmsNorm(nn.Module):
    """w · x / rms(x)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._epsilon = epsilon

    def forward(self, tokens: Float[Tensor, "b t w"]) -> Float[Tensor, "b t w"]:
        """Normalise each token."""
        return self.weight * (tokens * torch.rsqrt(tokens.square().mean(dim=-1, keepdim=True) + self._epsilon))


class Attention(nn.Module):
    """From the actions to what a layer of the backbone holds and, where ``joint``, to the actions before."""

    def __init__(self, width: int, dims: ModuleDims, *, joint: bool) -> None:
        super().__init__()
        _, kv_heads, head_dim = dims.kv_shape
        inner, kv_width = dims.num_heads * head_dim, kv_heads * head_dim
        self.joint = joint
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        # A joint layer makes its actions' own keys and values; a cross layer makes them of the backbone's.
        self.k_proj = nn.Linear(width if joint else kv_width, kv_width, bias=False)
        self.v_proj = nn.Linear(width if joint else kv_width, kv_width, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def recall(self, key: Tensor, value: Tensor) -> KeysValues:
        """Return the backbone's keys and values as this layer attends to them: K, V or K·W_k, V·W_v."""
        key, value = key.to(torch.float32), value.to(torch.float32)
        if self.joint:
            return key, value
        flat = (each.transpose(1, 2).flatten(2) for each in (key, value))
        return self._heads(self.k_proj(next(flat))), self._heads(self.v_proj(next(flat)))

    def forward(
        self, normed: Float[Tensor, "b t w"], past: KeysValues, rotary: Rotary, mask: Bool[Tensor, "b 1 t n"]
    ) -> Float[Tensor, "b t w"]:
        """Attend where ``mask`` is True."""
        query: Tensor = rotate(self._heads(self.q_proj(normed)), *rotary)
        key, value = past
        if self.joint:
            key = torch.cat([key, rotate(self._heads(self.k_proj(normed)), *rotary)], dim=2)
            value = torch.cat([value, self._heads(self.v_proj(normed))], dim=2)
        # The query heads of one K/V head as more queries: no copies of the prefix's keys and values.
        groups = query.shape[1] // self._kv_heads
        folded = query.reshape(len(query), self._kv_heads, groups * query.shape[2], self._head_dim)
        mixed = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(1, 1, groups, 1))
        tokens: Tensor = self.o_proj(mixed.reshape(query.shape).transpose(1, 2).flatten(2))
        return tokens

    def _heads(self, tokens: Float[Tensor, "b t n"]) -> Float[Tensor, "b h t e"]:
        return tokens.view(*tokens.shape[:2], -1, self._head_dim).transpose(1, 2)


class GatedMlp(nn.Module):
    """W_down(silu(W_gate·x) ⊙ W_up·x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = mlp_width(width)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, tokens: Float[Tensor, "b t w"]) -> Float[Tensor, "b t w"]:
        """Run the network."""
        return self.down_proj(functional.silu(self.gate_proj(tokens)) * self.up_proj(tokens))


class ExpertLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, dims: ModuleDims, *, joint: bool, epsilon: float) -> None:
        super().__init__()
        self.self_attn = Attention(width, dims, joint=joint)
        self.mlp = GatedMlp(width)
        self.input_layernorm = RmsNorm(width, epsilon)
        self.post_attention_layernorm = RmsNorm(width, epsilon)

    def forward(
        self, tokens: Float[Tensor, "b t w"], past: KeysValues, rotary: Rotary, mask: Bool[Tensor, "b 1 t n"]
    ) -> Float[Tensor, "b t w"]:
        """Run the layer."""
        tokens = tokens + self.self_attn(self.input_layernorm(tokens), past, rotary, mask)
        return tokens + self.mlp(self.post_attention_layernorm(tokens))


class Expert(nn.Module):
    """The layers and the final norm, under the names of the reference's checkpoints."""

    def __init__(self, spec: SmolVlaModuleSpec, width: int, dims: ModuleDims) -> None:
        super().__init__()
        every = spec.self_attn_every_n_layers
        self._head_dim = dims.kv_shape[2]
        self.layers = nn.ModuleList(
            [
                ExpertLayer(width, dims, joint=every > 0 and index % every == 0, epsilon=spec.norm_eps)
                for index in range(spec.num_layers)
            ]
        )
        self.norm = RmsNorm(width, spec.norm_eps)

    def blocks(self) -> list[ExpertLayer]:
        """Return the layers."""
        return [layer for layer in self.layers if isinstance(layer, ExpertLayer)]

    def forward(self, tokens: Float[Tensor, "b t w"], memory: Memory) -> Float[Tensor, "b t w"]:
        """Run the tokens of the actions beside the prefix; a joint layer goes on counting where the prefix ends."""
        count = tokens.shape[1]
        steps = torch.arange(count, device=tokens.device)[None]
        behind = memory.seen.sum(dim=1, keepdim=True) + steps
        joint, cross = (rotary_angles(each, self._head_dim, base=ROTARY_BASE) for each in (behind, steps))
        prefix = memory.seen[:, None, None].expand(-1, 1, count, -1)
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        both = torch.cat([prefix, causal.expand(len(tokens), 1, count, count)], dim=3)
        for layer, past in zip(self.blocks(), memory.layers, strict=True):
            tokens = layer(tokens, past, joint, both) if layer.self_attn.joint else layer(tokens, past, cross, prefix)
        return self.norm(tokens)


class SmolVlaModule(ActionModule):
    """State token, expert and flow."""

    reads_keys_values: ClassVar[bool] = True
    extends_prefix: ClassVar[bool] = True

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        """Size the layers.

        Raises:
            SpecError: If the backbone keeps another number of layers than the expert has.
        """
        super().__init__(spec, dims)
        assert isinstance(spec, SmolVlaModuleSpec)
        if dims.kv_shape[0] != spec.num_layers:
            raise SpecError(
                f"action_module 'smolvla': its expert has {spec.num_layers} layers, the backbone keeps "
                f"{dims.kv_shape[0]}. Set num_layers of both to the same number."
            )
        width = int(dims.prefix_dim * spec.width_multiplier)
        self._width, self._num_steps = width, spec.num_sampling_steps
        self._max_state_dim, self._max_action_dim = spec.max_state_dim, spec.max_action_dim
        self._periods = (spec.min_period, spec.max_period)
        self.lm_expert = Expert(spec, width, dims)
        self.state_proj = nn.Linear(spec.max_state_dim, dims.prefix_dim)
        self.action_in_proj = nn.Linear(spec.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, spec.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew: weights of variance 1 / inputs, no bias, norms of gain 1."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
                if layer.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]  # as torch's stubs have it
                    nn.init.zeros_(layer.bias)
            elif isinstance(layer, RmsNorm):
                nn.init.ones_(layer.weight)

    def remember(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Memory:
        """Put the state token behind the prefix, with gradient, and compute what the expert's layers read."""
        token = self.state_proj(widen(state, self._max_state_dim))[:, None]
        grown = self.frozen.extend(prefix, token)
        layers = zip(self.lm_expert.blocks(), grown.keys, grown.values, strict=True)
        return Memory(layers=tuple(layer.self_attn.recall(key, value) for layer, key, value in layers), seen=~grown.pad)

    def suffix(self, noisy: Float[Tensor, "b t m"], time: Float[Tensor, " b"]) -> Float[Tensor, "b t w"]:
        """Return the tokens of the actions: W_out·silu(W_in·[W·x_t; code(t)])."""
        actions = self.action_in_proj(noisy)
        shortest, longest = self._periods
        code = time_code(time, self._width, min_period=shortest, max_period=longest)[:, None].expand_as(actions)
        return self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(torch.cat([actions, code], dim=2))))

    def velocity(
        self, noisy: Float[Tensor, "b t m"], time: Float[Tensor, " b"], memory: Memory
    ) -> Float[Tensor, "b t m"]:
        """Evaluate the field v(x_t, t), given what :meth:`remember` returned; ``m`` is ``max_action_dim``."""
        return self.action_out_proj(self.lm_expert(self.suffix(noisy, time), memory))

    def loss_elements(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        noise: Float[Tensor, "b t m"],
        time: Float[Tensor, " b"],
    ) -> Float[Tensor, "b t m"]:
        """Return the squared error of every number of the padded chunk, before any reduction."""
        clean, blend = widen(actions, self._max_action_dim), time[:, None, None]
        noisy = blend * noise + (1 - blend) * clean  # x_t
        target = noise - clean  # u
        return (self.velocity(noisy, time, self.remember(prefix, state)) - target).square()

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the loss of each row at one random time, drawn from ``generator``.

        The family's rule: neither padded steps nor padded dimensions count, and in the mean over rows each valid step
        counts alike (:meth:`row_weights`). Padded steps hold the last valid action, whatever the batch has there.
        """
        clean = hold_last_valid(actions, valid)
        shape = (*clean.shape[:2], self._max_action_dim)
        noise = torch.randn(shape, generator=generator, device=generator.device).to(clean)
        uniform = torch.rand(len(clean), generator=generator, device=generator.device).to(clean)
        return self.reduce(self.loss_elements(prefix, state, clean, noise, flow_time(uniform)), valid)

    def reduce(self, elements: Float[Tensor, "b t m"], valid: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
        """Return the mean of each row over its valid steps and the dimensions that the robot has."""
        return masked_row_mean(elements[..., : self.dims.action_dim], valid)

    def row_weights(self, valid: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
        """Return the share of valid steps: the reference divides the sum over all rows by the number of valid steps."""
        return valid.to(torch.float32).mean(dim=1)

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
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], noise: Float[Tensor, "b t m"]
    ) -> Float[Tensor, "b t m"]:
        """Integrate from noise at t = 1 to a padded chunk at t = 0."""
        memory, chunk, step = self.remember(prefix, state), noise, -1.0 / self._num_steps
        for time in euler_times(self._num_steps):
            pause()
            times = torch.full((len(chunk),), time, device=chunk.device)
            chunk = chunk + step * self.velocity(chunk, times, memory)
        return chunk
