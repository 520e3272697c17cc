"""A policy's normalisation of state and actions: the torch side, shared by training and inference.

The modes and the statistics belong to the policy and travel with it. An action is un-normalised with the very
statistics that it was normalised with: training with min/max and acting with quantiles costs all success. State and
action may have modes of their own. The formulas are those of LeRobot's processors, so that its policies and ours agree.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from joynexus.errors import SpecError
from joynexus.specs.contract import NormalizationMode
from joynexus.specs.tenant import PolicySpec
from joynexus.types import Array, NormalizationStats, PolicyStats

CONSTANT = 1e-6
"""A dimension that moves less than this, in raw units, is constant: it comes back as its own value, and whatever is
there maps to where LeRobot puts that value: 0 with ``mean_std``, -1 with the other two. LeRobot stretches what lies
between 0 and this; here the noise of a joint that stands still stays out of the policy."""
EPSILON = 1e-8
"""Added to a standard deviation, and to nothing else, as LeRobot does."""


class DimensionNormalizer:
    """One vector's map to normalised units and back, per dimension.

    ``mean_std``: (x - mean) / (std + 1e-8), back x·std + mean. ``min_max`` and ``quantile`` (1 % and 99 %): linear from
    [low, high] to [-1, 1], unclipped, so that a value past a quantile keeps its place. ``identity``: unchanged.
    """

    def __init__(
        self, stats: NormalizationStats | None, mode: NormalizationMode, device: torch.device | str = "cpu"
    ) -> None:
        """Prepare the map.

        Args:
            stats: In raw units; None leaves values as they are.
            mode: Which statistics to use.
            device: Where the values will be.
        """
        self._identity = stats is None or mode == "identity"
        if stats is None or mode == "identity":
            return
        self._centred = mode == "mean_std"
        if mode == "mean_std":
            self._low, self._spread = _tensor(stats.mean, device), _tensor(stats.std, device)
            self._divisor = self._spread + EPSILON
        else:
            low, high = (stats.minimum, stats.maximum) if mode == "min_max" else (stats.q01, stats.q99)
            self._low, self._high = _tensor(low, device), _tensor(high, device)
            self._spread = self._divisor = self._high - self._low
        self._constant = self._spread < CONSTANT
        self._at_rest = torch.tensor(0.0 if self._centred else -1.0, device=device)

    def normalize(self, raw: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Map raw values to normalised ones."""
        if self._identity:
            return raw
        scaled = (raw - self._low) / self._divisor
        if not self._centred:
            scaled = 2 * scaled - 1
        return torch.where(self._constant, self._at_rest, scaled)

    def unnormalize(self, value: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Map normalised values back to raw ones."""
        if self._identity:
            return value
        if self._centred:
            raw = value * self._spread + self._low
        else:  # weights at both ends, not low + share * spread: -1 and 1 give low and high to the last bit
            raw = self._low * (1 - value) / 2 + self._high * (1 + value) / 2
        return torch.where(self._constant, self._low, raw)


class PolicyNormalizer:
    """State and action normalisation of one policy."""

    def __init__(
        self,
        stats: PolicyStats | None,
        mode: NormalizationMode,
        device: torch.device | str = "cpu",
        *,
        state_mode: NormalizationMode | None = None,
    ) -> None:
        """Prepare both maps.

        Args:
            stats: The policy's statistics, in raw units.
            mode: ``policy.action.normalization``.
            device: Where states and actions will be.
            state_mode: ``policy.observation.normalization``; None takes the actions'.

        Raises:
            SpecError: If a mode needs statistics and there are none.
        """
        self.mode: NormalizationMode = mode
        self.state_mode: NormalizationMode = mode if state_mode is None else state_mode
        needed = [each for each in (self.mode, self.state_mode) if each != "identity"]
        if stats is None and needed:
            raise SpecError(
                f"normalization {needed[0]!r}: the policy has no statistics to normalise with. Train it on a dataset "
                "first, give statistics, or take 'identity', whose actions are in the environment's own units."
            )
        self.stats = stats
        self._state = DimensionNormalizer(stats.state if stats else None, self.state_mode, device)
        self._action = DimensionNormalizer(stats.action if stats else None, self.mode, device)

    @classmethod
    def of_policy(
        cls, policy: PolicySpec, stats: PolicyStats | None, device: torch.device | str = "cpu"
    ) -> "PolicyNormalizer":
        """Prepare the maps that a policy's spec names.

        Raises:
            SpecError: If a mode needs statistics and there are none.
        """
        return cls(stats, policy.action.normalization, device, state_mode=policy.state_normalization)

    def state(self, raw: Float[Tensor, "b s"]) -> Float[Tensor, "b s"]:
        """Normalise states."""
        return self._state.normalize(raw)

    def actions(self, raw: Float[Tensor, "b t a"]) -> Float[Tensor, "b t a"]:
        """Normalise action chunks."""
        return self._action.normalize(raw)

    def raw_actions(self, normalized: Float[Tensor, "b t a"]) -> Float[Tensor, "b t a"]:
        """Bring a module's action chunks back to the environment's own units."""
        return self._action.unnormalize(normalized)


def _tensor(values: Array, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
