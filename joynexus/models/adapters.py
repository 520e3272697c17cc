"""LoRA on the shared backbone: each row of a forward may have an adapter of its own, or none.

    y = W x  +  s B A x            s = alpha / rank, A [r, in] random, B [out, r] zero at the start

Hu et al. 2021, https://arxiv.org/abs/2106.09685. W is the backbone's and never changes; A and B are a tenant's.

The changes are made by forward hooks of the frozen layers, which do nothing outside of :func:`adapting` and
:mod:`joynexus.models.adapted_rows`. What is active is a thread's own.
"""

import hashlib
import math
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.errors import SpecError
from joynexus.models.backbone import Backbone
from joynexus.specs.adapter import AdapterSpec

PREFIX = "adapter."
"""Before the names of an adapter's tensors, where they stand beside those of the action module."""
MARK = "takes_adapters"
"""Attribute of a layer that has its hook."""
Kind = tuple[int, tuple[str, ...]]
"""Rank and targets of an adapter: rows of one kind are computed together."""


class Adapter:
    """One tenant's A and B, by the path of the layer that they change."""

    def __init__(self, spec: AdapterSpec, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """Make room; A and B are 0.

        Args:
            spec: Rank and scale.
            shapes: Inputs and outputs of each layer, by its path.
            device: The backbone's.
        """
        self.spec = spec
        self.a: dict[str, nn.Parameter] = {}
        self.b: dict[str, nn.Parameter] = {}
        for path, (inputs, outputs) in shapes.items():
            self.a[path] = nn.Parameter(torch.zeros(spec.rank, inputs, device=device))
            self.b[path] = nn.Parameter(torch.zeros(outputs, spec.rank, device=device))

    @property
    def kind(self) -> Kind:
        """Rank and targets."""
        return self.spec.rank, tuple(sorted(self.spec.targets))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters as ``PATH.lora_A.weight`` and ``PATH.lora_B.weight``, layer by layer."""
        named: dict[str, nn.Parameter] = {}
        for path in self.a:
            named |= {f"{path}.lora_A.weight": self.a[path], f"{path}.lora_B.weight": self.b[path]}
        return named

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw A as a linear layer's default is, uniform within 1/√in; set B to 0, so that nothing changes yet."""
        with torch.no_grad():
            for path, each in self.a.items():
                bound = 1.0 / math.sqrt(each.shape[1])
                drawn = torch.rand(each.shape, generator=generator) * (2.0 * bound) - bound
                each.copy_(drawn)
                self.b[path].zero_()

    @torch.no_grad()
    def randomized(self, seed: int) -> "Adapter":
        """Return one of the same kind with random A and B, to try how its kernels round."""
        shapes = {path: (self.a[path].shape[1], self.b[path].shape[0]) for path in self.a}
        other = Adapter(self.spec, shapes, next(iter(self.a.values())).device)
        draw = torch.Generator().manual_seed(seed)
        for each in other.named_parameters().values():
            each.copy_(torch.randn(each.shape, generator=draw) / math.sqrt(each.shape[1]))
        return other

    def change(self, path: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return a layer's output with this adapter's change, for rows that are all its own."""
        if path not in self.a:
            return output
        a, b = self.a[path], self.b[path]
        change = functional.linear(functional.linear(inputs.to(a.dtype), a), b) * self.spec.scale
        return (output + change).to(output.dtype)


@runtime_checkable
class Changes(Protocol):
    """What changes the outputs of the layers."""

    def change(self, path: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the output of the layer at ``path``, changed."""
        ...


class _Local(threading.local):
    changes: Changes | None = None


ACTIVE = _Local()
"""What changes the outputs in the thread that looks."""


@contextmanager
def activated(changes: Changes | None) -> Generator[None]:
    """Let something change the layers' outputs in this thread; None lets nothing."""
    before, ACTIVE.changes = ACTIVE.changes, changes
    try:
        yield
    finally:
        ACTIVE.changes = before


@contextmanager
def adapting(adapter: Adapter | None) -> Generator[None]:
    """Let every row that passes the frozen layers in this thread have one adapter; None changes nothing.

    For what a tenant's module pushes through them by itself (:meth:`Backbone.extend`): the gradient reaches the
    adapter's own parameters.
    """
    with activated(adapter):
        yield


def linear_layers(path: str, layers: nn.ModuleList) -> dict[str, nn.Linear]:
    """Return the linear layers in a list of language layers by their paths, which begin with ``path``."""
    named = cast("Iterator[tuple[str, nn.Module]]", layers.named_modules())
    return {f"{path}.{name}": each for name, each in named if isinstance(each, nn.Linear)}


def build_adapter(spec: AdapterSpec, backbone: Backbone, *, seed: int) -> Adapter:
    """Build a tenant's adapter, and let the backbone's layers take adapters.

    Args:
        spec: Rank, scale and targets.
        backbone: Its layers get hooks, once for all; its weights and its state dict stay as they are.
        seed: The tenant's; A's is derived from it.

    Returns:
        The adapter, on the backbone's device, in float32.

    Raises:
        SpecError: If the backbone has no such layers, naming those that it has.
    """
    layers = target_layers(spec, backbone)
    for path, layer in layers.items():
        _let_adapt(path, layer)
    shapes = {path: (layer.in_features, layer.out_features) for path, layer in layers.items()}
    adapter = Adapter(spec, shapes, backbone.device)
    derived = int.from_bytes(hashlib.sha256(f"adapter/{seed}".encode()).digest()[:7], "big")
    adapter.reset_parameters(torch.Generator().manual_seed(derived))
    return adapter


def target_layers(spec: AdapterSpec, backbone: Backbone) -> dict[str, nn.Linear]:
    """Return the layers that an adapter changes, by their paths, in the backbone's order.

    Raises:
        SpecError: If the backbone has no such layers, naming those that it has.
    """
    layers = backbone.adapter_layers()
    known = list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in layers))
    unknown = [target for target in spec.targets if target not in known]
    if not known:
        raise SpecError(
            f"adapter: backbone {backbone.spec.type!r} has no language layers that take one. "
            "Leave 'adapter' out, or take a vision-language backbone such as 'smolvlm'."
        )
    if unknown:
        raise SpecError(
            f"adapter.targets: backbone {backbone.spec.type!r} has no layers {unknown}. Use some of {known}."
        )
    return {path: layer for path, layer in layers.items() if path.rsplit(".", 1)[-1] in spec.targets}


def num_adapter_parameters(spec: AdapterSpec, backbone: Backbone) -> int:
    """Count an adapter's numbers without building it."""
    layers = target_layers(spec, backbone).values()
    return sum(spec.rank * (layer.in_features + layer.out_features) for layer in layers)


def _let_adapt(path: str, layer: nn.Linear) -> None:
    """Give a layer its hook; a forward that runs in another thread takes it or not, and both do nothing there."""
    if not getattr(layer, MARK, False):
        setattr(layer, MARK, True)
        layer.register_forward_hook(partial(_hook, path))


def _hook(path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    del layer
    changes = ACTIVE.changes
    return None if changes is None else changes.change(path, inputs[0], output)
