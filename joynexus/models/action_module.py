"""The contract of an action module: all that a tenant trains.

A module sees normalised states and actions only. It draws random numbers from the generators that it is handed and
from nothing else: neighbours, their number and their order can't change a tenant's draws.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joynexus.errors import SpecError
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.specs.registry import load_implementation


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDims:
    """Sizes that a module is built for."""

    prefix_dim: int
    state_dim: int
    action_dim: int
    horizon: int
    kv_shape: tuple[int, int, int] = (0, 0, 0)
    """Of the backbone: layers that give K/V, their K/V heads and the width of a head."""
    num_heads: int = 0
    """Query heads of the backbone's language model; 0 where it has none."""


@runtime_checkable
class FrozenLayers(Protocol):
    """What a module may use of the shared backbone beyond its answer: every backbone is one."""

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Push a tenant's own tokens through the frozen layers behind a prefix, with gradient to ``tokens``."""
        ...


class FrozenReference:
    """Holds the frozen layers where neither a state dict, a parameter list nor a pickle looks.

    A deep copy of a module shares them: a replica's tenants stand on one backbone.
    """

    def __init__(self, layers: FrozenLayers | None = None) -> None:
        self.layers = layers

    def __deepcopy__(self, memo: dict[int, object]) -> "FrozenReference":
        del memo
        return self

    def __reduce__(self) -> "tuple[type[FrozenReference], tuple[()]]":
        return FrozenReference, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a policy-gradient loss needs of decisions made earlier; all [b], with gradient."""

    log_prob: Float[Tensor, " b"]
    """Of the whole chunk: summed over steps and dimensions."""
    entropy: Float[Tensor, " b"]
    value: Float[Tensor, " b"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What ``act`` answers; without gradient."""

    actions: Float[Tensor, "b t a"]
    """Normalised."""
    log_prob: Float[Tensor, " b"] | None = None
    value: Float[Tensor, " b"] | None = None
    trace: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What ``evaluate`` needs to score the same decision again; first axis b."""


class ActionModule(nn.Module, ABC):
    """A tenant's own module on top of the shared prefix features."""

    reads_keys_values: ClassVar[bool] = True
    """Whether it looks at keys and values of the prefix, ``spec.kv_layers()`` of them at least; where not, they are not
    copied for it."""
    extends_prefix: ClassVar[bool] = False
    """Whether it pushes tokens of its own through the frozen layers; see :meth:`attach`."""
    stacks: ClassVar[bool] = False
    """Whether ``act`` may run for several tenants at once, see :mod:`joynexus.models.stacked`: beyond its linear layers
    and layer norms it works row by row, rounds a row alike wherever it stands (see
    :func:`joynexus.models.action_modules.layers.steady_softplus`), and its own parameters may have one more axis in
    front, for the rows."""

    def __init__(self, spec: ActionModuleSpec, dims: ModuleDims) -> None:
        super().__init__()
        self.spec = spec
        self.dims = dims
        self._frozen = FrozenReference()

    def attach(self, frozen: FrozenLayers) -> None:
        """Let a module that ``extends_prefix`` use the frozen layers; they do not become a part of it."""
        self._frozen = FrozenReference(frozen)

    @property
    def frozen(self) -> FrozenLayers:
        """The frozen layers that the module stands on.

        Raises:
            SpecError: If it was built beside no backbone.
        """
        if self._frozen.layers is None:
            raise SpecError(
                f"action module {self.spec.type!r}: it needs the backbone's layers and has none. "
                "Build it with build_policy, or attach the backbone."
            )
        return self._frozen.layers

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every parameter anew from ``generator`` alone."""

    @abstractmethod
    def loss(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        actions: Float[Tensor, "b t a"],
        valid: Bool[Tensor, "b t"],
        generator: torch.Generator,
    ) -> Float[Tensor, " b"]:
        """Return the supervised loss of each row: the mean over its valid steps and all dimensions.

        Padded steps are selected away, not multiplied by 0: a NaN there stays there. A row without a valid step
        has loss 0.
        """

    def row_weights(self, valid: Bool[Tensor, "b t"]) -> Float[Tensor, " b"] | None:
        """Return how much each row's supervised loss counts in the mean over rows; None where all count alike."""
        del valid

    @abstractmethod
    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> Decision:
        """Choose one chunk per row, row i drawing from ``generators[i]`` alone."""

    def evaluate(self, prefix: PrefixFeatures, state: Float[Tensor, "b s"], trace: Mapping[str, Tensor]) -> Evaluation:
        """Score decisions that ``act`` made earlier, with gradient.

        Raises:
            NotImplementedError: If the module gives no log-probability (``spec.gives_log_prob`` is false).
        """
        raise NotImplementedError(
            f"action module {self.spec.type!r} gives no log-probability. Take 'gaussian' or 'discrete_tokens'."
        )


def build_action_module(spec: ActionModuleSpec, dims: ModuleDims, *, seed: int) -> ActionModule:
    """Build a module whose parameters depend on the spec, the sizes and the seed alone.

    Args:
        spec: Any registered action-module spec.
        dims: Sizes of prefix, state and action.
        seed: Of the initial parameters.

    Returns:
        The module, on the CPU, in float32. torch's global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):  # torch's layers draw default weights when they are made
        module = load_implementation(spec)(spec, dims)
    assert isinstance(module, ActionModule)
    module.reset_parameters(torch.Generator().manual_seed(seed))
    return module


def randn_rows(generators: Sequence[torch.Generator], *shape: int) -> Float[Tensor, "b ..."]:
    """Draw a standard Normal of ``shape`` for each row from the row's own generator, on the CPU."""
    return torch.stack([torch.randn(shape, generator=each) for each in generators])


def masked_row_mean(errors: Float[Tensor, "b t a"], valid: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """Mean of each row's errors over its valid steps and all dimensions; 0 where no step is valid."""
    kept = torch.where(valid[..., None], errors, torch.zeros((), dtype=errors.dtype, device=errors.device))
    count = valid.sum(dim=1) * errors.shape[-1]
    return kept.sum(dim=(1, 2)) / count.clamp(min=1)
