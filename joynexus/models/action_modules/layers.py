"""What the built-in action modules have in common: reading the prefix, and drawing initial parameters."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import InvalidBatchError
from joynexus.models.action_module import ModuleDims
from joynexus.models.prefix import PrefixFeatures

REGISTERS = 64
"""Numbers after which torch's elementwise loops come to the end of a step, on every CPU: 2 registers of at most 16
float32, and some to spare."""


def visible_tokens(prefix: PrefixFeatures) -> Float[Tensor, "b p d"]:
    """Return the prefix's hidden states in float32, with 0 at padding: whatever was there can't enter a sum."""
    hidden = prefix.hidden.to(torch.float32)
    return torch.where(prefix.pad[..., None], torch.zeros((), dtype=hidden.dtype, device=hidden.device), hidden)


class PrefixReader(nn.Module):
    """Prefix and state as one vector, each token read in a place of its own.

    Pooling over image tokens would forget where things are; a narrow projection per token keeps it and stays small.
    The places of masked tokens, and those past the end of a shorter prefix, hold 0. The few numbers of the state
    have weights of their own, drawn for their own number: beside thousands of token numbers they would drown.
    """

    def __init__(self, dims: ModuleDims, *, token_dim: int, max_tokens: int, width: int) -> None:
        """Size the layers.

        Args:
            dims: Sizes of prefix and state.
            token_dim: Numbers kept per token.
            max_tokens: Places; a longer prefix is refused.
            width: Of the vector.
        """
        super().__init__()
        self.max_tokens = max_tokens
        self.norm = nn.LayerNorm(dims.prefix_dim)
        self.project = nn.Linear(dims.prefix_dim, token_dim)
        self.from_tokens = nn.Linear(max_tokens * token_dim, width)
        self.from_state = nn.Linear(dims.state_dim, width) if dims.state_dim else None

    def balance(self, generator: torch.Generator) -> None:
        """Draw the weights of tokens and state anew so that each part enters with variance about 1."""
        for layer in (self.from_tokens, self.from_state):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)

    def forward(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Float[Tensor, "b w"]:
        """Read rows.

        Raises:
            InvalidBatchError: If the prefix has more than ``max_tokens`` positions.
        """
        if prefix.length > self.max_tokens:
            raise InvalidBatchError(
                f"prefix: it has {prefix.length} tokens, the action module reads {self.max_tokens}. "
                f"Raise max_prefix_tokens to {prefix.length}."
            )
        tokens = functional.gelu(self.project(self.norm(visible_tokens(prefix))))
        tokens = tokens.masked_fill(prefix.pad[..., None], 0.0)
        read = self.from_tokens(functional.pad(tokens, (0, 0, 0, self.max_tokens - prefix.length)).flatten(1))
        return read if self.from_state is None else read + self.from_state(state)


class PrefixMlp(nn.Module):
    """Prefix tokens and state → tanh layers → ``outputs`` numbers; of an actor or a critic.

    Orthogonal weights, the last layer scaled apart (Andrychowicz et al. 2021, https://arxiv.org/abs/2006.05990).
    """

    def __init__(
        self, dims: ModuleDims, *, token_dim: int, max_tokens: int, width: int, num_layers: int, outputs: int
    ) -> None:
        """Size the layers.

        Args:
            dims: Sizes of prefix and state.
            token_dim: Numbers kept per prefix token.
            max_tokens: Longest prefix.
            width: Of the hidden layers.
            num_layers: Hidden layers.
            outputs: Numbers of the answer.
        """
        super().__init__()
        self.reader = PrefixReader(dims, token_dim=token_dim, max_tokens=max_tokens, width=width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers - 1)])
        self.leave = nn.Linear(width, outputs)

    def reset_parameters(self, generator: torch.Generator, *, output_gain: float) -> None:
        """Draw every parameter anew."""
        reset_layers(self, generator, gain=math.sqrt(2), orthogonal=True)
        self.reader.balance(generator)
        nn.init.orthogonal_(self.leave.weight, gain=output_gain, generator=generator)

    def forward(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"]) -> Float[Tensor, "b o"]:
        """Run the network."""
        hidden = torch.tanh(self.reader(prefix, state))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.leave(hidden)


def reset_layers(module: nn.Module, generator: torch.Generator, *, gain: float = 1.0, orthogonal: bool = False) -> None:
    """Draw all linear layers inside a module anew, and bring its layer norms back to the identity.

    Args:
        module: Its linear layers and layer norms are reset, in the order of ``modules()``.
        generator: The only source of randomness.
        gain: Scale of the weights.
        orthogonal: Orthogonal weights (Saxe et al. 2014, https://arxiv.org/abs/1312.6120), as PPO likes them, in
            place of Xavier-uniform ones.
    """
    draw = nn.init.orthogonal_ if orthogonal else nn.init.xavier_uniform_
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            draw(layer.weight, gain=gain, generator=generator)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm) and layer.elementwise_affine:
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)


def steady_softplus(rows: Float[Tensor, "b *mid n"]) -> Float[Tensor, "b *mid n"]:
    """Softplus whose rounding does not depend on a row's place among the others.

    On a CPU, softplus (as SiLU and the tanh form of GELU) takes another formula for the numbers at the end of a tensor
    that do not fill a vector register, and every eighth of them differs by a bit. Here each row fills registers alone.
    """
    flat = rows.flatten(1)
    filled = functional.pad(flat, (0, -flat.shape[1] % REGISTERS))
    return functional.softplus(filled)[:, : flat.shape[1]].view(rows.shape)


def sinusoids(positions: Float[Tensor, " n"], width: int, *, longest: float) -> Float[Tensor, "n w"]:
    """Code positions as sines and cosines of ``width // 2`` wavelengths, from 2π to 2π·``longest``, geometrically.

    Vaswani et al. 2017, Sec. 3.5, https://arxiv.org/abs/1706.03762. An odd last column is 0.
    """
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / max(half - 1, 1)
    angles = positions[:, None] * torch.exp(-math.log(longest) * exponents)
    return functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width - 2 * half))
