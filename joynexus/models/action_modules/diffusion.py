"""Diffusion Policy: denoising diffusion over the action chunk, given the prefix.

Chi et al. 2023, https://arxiv.org/abs/2303.04137. In training, level k of K mixes actions a with noise ε ~ N(0, 1)
(Ho et al. 2020, https://arxiv.org/abs/2006.11239), and the network learns which noise it was:

    x_k = √ᾱ_k·a + √(1 - ᾱ_k)·ε        k ~ U{0 … K-1}        loss = ‖ε_θ(x_k, k) - ε‖²

ᾱ follows the squared cosine (Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672). Sampling takes few of the K
levels, without noise on the way: DDIM with η = 0 (Song et al. 2021, https://arxiv.org/abs/2010.02502, Eq. 12),

    â = (x_k - √(1 - ᾱ_k)·ε_θ) / √ᾱ_k        x_k' = √ᾱ_k'·â + √(1 - ᾱ_k')·ε_θ.

ε_θ is a transformer over the steps of the chunk, :mod:`joynexus.models.action_modules.chunk_transformer`.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from joynexus.models.action_module import Decision, ModuleDims, masked_row_mean, randn_rows
from joynexus.models.action_modules.chunk_transformer import ChunkTransformer, hold_last_valid
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.more_modules import DiffusionModuleSpec

OFFSET = 0.008
"""Keeps the first level's noise from vanishing."""
LARGEST_BETA = 0.999
"""Noise that one level adds at most."""


def squared_cosine(num_levels: int) -> list[float]:
    """Return ᾱ of each level, from nearly 1 to nearly 0.

    ᾱ(s) = cos²((s + 0.008) / 1.008 · π/2) at s = k/K; β_k = min(1 - ᾱ((k+1)/K) / ᾱ(k/K), 0.999); ᾱ_k = Π (1 - β).
    """

    def curve(share: float) -> float:
        return math.cos((share + OFFSET) / (1 + OFFSET) * math.pi / 2) ** 2

    kept, levels = 1.0, list[float]()
    for level in range(num_levels):
        kept *= 1 - min(1 - curve((level + 1) / num_levels) / curve(level / num_levels), LARGEST_BETA)
        levels.append(kept)
    return levels


def sampled_levels(num_levels: int, num_steps: int) -> list[int]:
    """Return the levels that sampling visits, equally spaced from a high one down to 0."""
    return [step * (num_levels // num_steps) for step in reversed(range(num_steps))]


class DiffusionModule(ChunkTransformer):
    """Noise ε_θ(x_k, k | prefix, state) of the chunk."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        assert isinstance(spec, DiffusionModuleSpec)
        super().__init__(spec, dims, width=spec.hidden_dim, num_layers=spec.num_layers, num_heads=spec.num_heads)
        self._clip_range = spec.clip_range
        self._num_levels = spec.num_noise_levels
        self._kept = squared_cosine(spec.num_noise_levels)  # ᾱ: plain numbers, the module has no buffers
        self._sampled = sampled_levels(spec.num_noise_levels, spec.num_sampling_steps)

    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the squared error of the noise of each row at one random level, over the row's valid steps.

        Valid steps attend to padded ones, as they do when the chunk is sampled; padded steps hold the last valid
        action, whatever the batch has there.
        """
        clean = hold_last_valid(actions, valid)
        noise = torch.randn(clean.shape, generator=generator, device=generator.device).to(clean)
        level = torch.randint(self._num_levels, (len(clean),), generator=generator, device=generator.device)
        kept = torch.tensor(self._kept)[level.cpu()].to(clean)[:, None, None]
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        predicted = self.denoise(noisy, level.to(clean) / self._num_levels, *self.remember(prefix, state))
        return masked_row_mean((predicted - noise).square(), valid)

    @torch.no_grad()
    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        """Take the noise off each row's own start; both modes begin at the seeded noise, and nothing else is drawn."""
        del deterministic
        start = randn_rows(generators, self.dims.horizon, self.dims.action_dim).to(prefix.hidden.device)
        return Decision(actions=self.sample(prefix, state, start))

    def sample(
        self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], noise: Float[Tensor, "b t a"]
    ) -> Float[Tensor, "b t a"]:
        """Run the DDIM steps from ``noise``; after the last one, ᾱ is 1 and â is the chunk."""
        chunk, (memory, mask) = noise, self.remember(prefix, state)
        for level, after in zip(self._sampled, [*self._sampled[1:], None], strict=True):
            pause()
            time = torch.full((len(prefix),), level / self._num_levels, device=chunk.device)
            predicted = self.denoise(chunk, time, memory, mask)
            kept, next_kept = self._kept[level], 1.0 if after is None else self._kept[after]
            clean = (chunk - math.sqrt(1 - kept) * predicted) / math.sqrt(kept)
            clean = clean.clamp(-self._clip_range, self._clip_range)
            chunk = math.sqrt(next_kept) * clean + math.sqrt(1 - next_kept) * predicted
        return chunk
