"""Action modules of several tenants as one: their parameters stacked, their layers batched matrix products.

Small modules are bound by the number of kernels, not by their arithmetic: sixteen MLPs of 40 k parameters, one after
the other, spend most of their time between two products. A stack runs the same ``act`` once, over the rows of all,
with every ``Linear`` and ``LayerNorm`` replaced by one that gives each tenant's rows that tenant's weights. Row i of
tenant t meets the weights of t alone; nothing is summed over tenants.

Rounding: weights keep the layout that a ``Linear`` has them in, which made ``baddbmm`` equal to it to the last bit on
every CPU that was tried; that is a property of a machine and a shape, so :meth:`StackedModule.is_exact` tries it.
Elsewhere the two agree within ``STACK_BOUND``.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from joynexus.models.action_module import ActionModule, Decision
from joynexus.models.prefix import PrefixFeatures

STACK_BOUND = 1e-5
"""Largest difference of a number that a stack and a module by itself give in float32, relative to 1 + its size."""


class StackedLinear(nn.Module):
    """``Linear`` layers of one shape, each over its own share of the rows."""

    def __init__(self, like: nn.Linear, slots: int) -> None:
        super().__init__()
        self.weight = like.weight.new_zeros(slots, *like.weight.shape)
        self.bias = None if like.bias is None else like.bias.new_zeros(slots, *like.bias.shape)  # pyright: ignore[reportUnnecessaryComparison]

    def forward(self, rows: Float[Tensor, "b *mid i"]) -> Float[Tensor, "b *mid o"]:
        """Map rows, those of slot 0 first."""
        slots, outputs, inputs = self.weight.shape
        flat = rows.reshape(slots, -1, inputs)
        if outputs == 1:  # ``Linear`` takes a matrix-vector kernel here, which rounds in another way
            biases = self.bias if self.bias is not None else [None] * slots
            answer = torch.stack([functional.linear(*each) for each in zip(flat, self.weight, biases, strict=True)])
        elif self.bias is None:
            answer = torch.bmm(flat, self.weight.transpose(1, 2))
        else:
            answer = torch.baddbmm(self.bias[:, None], flat, self.weight.transpose(1, 2))
        return answer.view(*rows.shape[:-1], outputs)


class StackedLayerNorm(nn.Module):
    """Affine ``LayerNorm`` layers of one width, each over its own share of the rows."""

    def __init__(self, like: nn.LayerNorm, slots: int) -> None:
        super().__init__()
        self._eps = like.eps
        self.weight = like.weight.new_zeros(slots, *like.weight.shape)
        self.bias = None if like.bias is None else like.bias.new_zeros(slots, *like.bias.shape)  # pyright: ignore[reportUnnecessaryComparison]

    def forward(self, rows: Float[Tensor, "b *mid d"]) -> Float[Tensor, "b *mid d"]:
        """Normalise rows, those of slot 0 first."""
        slots, width = self.weight.shape
        normed = functional.layer_norm(rows, (width,), eps=self._eps).view(slots, -1, width)
        weight = self.weight[:, None]
        scaled = normed * weight if self.bias is None else torch.addcmul(self.bias[:, None], normed, weight)
        return scaled.view(rows.shape)


def can_stack(module: ActionModule) -> bool:
    """Tell whether a module's ``act`` runs unchanged over a stack.

    The class has to promise it (:attr:`ActionModule.stacks`), and all parameters have to be those of linear layers,
    of layer norms over one axis, or the module's own. An instance that acts otherwise than its class is left alone.
    """
    if not module.stacks or "act" in vars(module) or next(module.buffers(), None) is not None:
        return False
    return all(
        each is module or _is_stackable(each) or not list(each.parameters(recurse=False)) for each in module.modules()
    )


class StackedModule:
    """``slots`` modules of one spec and one size, each with ``rows`` rows. For one thread at a time."""

    def __init__(self, like: ActionModule, *, slots: int, rows: int) -> None:
        """Make room; every slot holds zeros.

        Args:
            like: Gives structure, sizes and device; see :func:`can_stack`.
            slots: Modules.
            rows: Of each module, always.
        """
        self.slots = slots
        self.rows = rows
        memo: dict[int, Any] = {id(each): each for each in chain(like.parameters(), [like.spec])}
        self.module: ActionModule = copy.deepcopy(like, memo)  # the structure; parameters are replaced below
        """The class of the modules, over the rows of all slots."""
        self.views: dict[str, Tensor] = {}
        """Each parameter of all slots, by its name in a module; the first axis is the slot."""
        layers = cast("Iterator[tuple[str, nn.Module]]", self.module.named_modules())
        for name, layer in list(layers):
            if _is_stackable(layer):
                self._replace(name, layer)
        for name, each in list(self.module.named_parameters(recurse=False)):
            kept = each.new_zeros(slots, rows, *each.shape)
            delattr(self.module, name)
            setattr(self.module, name, kept.flatten(0, 1))  # one copy per row: it is added row by row
            self.views[name] = kept

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(each.nbytes for each in self.views.values())

    @torch.no_grad()
    def load(self, slot: int, module: ActionModule) -> None:
        """Copy a module's parameters into a slot."""
        for name, each in module.named_parameters():
            self.views[name][slot].copy_(each)

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Leave nothing of a module in its slot."""
        for each in self.views.values():
            each[slot].zero_()

    def act(
        self,
        prefix: PrefixFeatures,
        state: Float[Tensor, "b s"],
        generators: Sequence[torch.Generator],
        *,
        deterministic: bool,
    ) -> list[Decision]:
        """Act for ``rows`` rows of every slot, those of slot 0 first.

        Returns:
            One decision per slot; each row's noise is from its own generator, as without the stack.
        """
        decision = self.module.act(prefix, state, generators, deterministic=deterministic)
        return [rows_of(decision, slice(at, at + self.rows)) for at in range(0, self.slots * self.rows, self.rows)]

    @torch.no_grad()
    def is_exact(self, like: ActionModule, prefix: PrefixFeatures) -> bool:
        """Try on random numbers whether this machine rounds a stack as it does each module by itself.

        Every slot holds other numbers afterwards.

        Args:
            like: Any module of the stack.
            prefix: Gives length, type and device of a prefix.
        """
        draw = torch.Generator().manual_seed(self.slots)
        module = copy.deepcopy(like)
        base = {name: torch.randn(each.shape, generator=draw) for name, each in module.named_parameters()}
        total = self.slots * self.rows
        seen = _random_prefix(prefix, total, draw)
        state = torch.randn(total, like.dims.state_dim, generator=draw).to(prefix.hidden.device)
        alone: list[Decision] = []
        for slot in range(self.slots):
            for name, each in module.named_parameters():
                width = max(each.shape[-1], 1) if each.ndim > 1 else 1
                each.copy_(base[name] * ((0.7 + slot / self.slots) / width**0.5))
            self.load(slot, module)
            at = slice(slot * self.rows, (slot + 1) * self.rows)
            rows = seen.slice(at.start, at.stop)
            alone.append(module.act(rows, state[at], _generators(at), deterministic=False))
        together = self.act(seen, state, _generators(slice(0, total)), deterministic=False)
        return all(_is_equal(one, other) for one, other in zip(alone, together, strict=True))

    def _replace(self, name: str, layer: nn.Module) -> None:
        stacked = StackedLinear(layer, self.slots) if isinstance(layer, nn.Linear) else None
        if isinstance(layer, nn.LayerNorm):
            stacked = StackedLayerNorm(layer, self.slots)
        assert stacked is not None
        self.module.set_submodule(name, stacked)
        self.views[f"{name}.weight"] = stacked.weight
        if stacked.bias is not None:
            self.views[f"{name}.bias"] = stacked.bias


def rows_of(decision: Decision, rows: slice) -> Decision:
    """Return some rows of a decision, as views."""
    return Decision(
        actions=decision.actions[rows],
        log_prob=None if decision.log_prob is None else decision.log_prob[rows],
        value=None if decision.value is None else decision.value[rows],
        trace={name: each[rows] for name, each in decision.trace.items()},
    )


def _is_stackable(layer: nn.Module) -> bool:
    if isinstance(layer, nn.LayerNorm):
        return layer.elementwise_affine and len(layer.normalized_shape) == 1
    return type(layer) is nn.Linear


def _random_prefix(like: PrefixFeatures, rows: int, draw: torch.Generator) -> PrefixFeatures:
    """Random features in the shape of ``like``; every tenth position is padding."""
    device, dtype = like.hidden.device, like.hidden.dtype
    hidden = torch.randn(rows, *like.hidden.shape[1:], generator=draw).to(device, dtype)
    pad = (torch.rand(rows, like.length, generator=draw) < 0.1).to(device)  # noqa: PLR2004
    return PrefixFeatures(hidden=hidden, pad=pad, signature=like.signature)


def _generators(rows: slice) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(row) for row in range(rows.start, rows.stop)]


def _is_equal(one: Decision, other: Decision) -> bool:
    for each in fields(Decision):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, Tensor):
            if not torch.equal(mine, theirs):
                return False
        elif mine is not None and not all(torch.equal(mine[name], theirs[name]) for name in mine):
            return False
    return True
