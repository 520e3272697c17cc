"""The part of a group whose tenants have adapters: their prefixes carry gradient.

    one forward with graph (all of them)  ->  loss and gradient of each, on leaves that are its own copies
                                          ->  one backward of the features' gradients (all of them)

Nothing here is found in a store or kept in it: a prefix is one tenant's, and of one version. The weights are gathered
by row and their gradients are summed over a tenant's rows alone (:mod:`joynexus.models.adapted_rows`), so that each
tenant gets the numbers of training alone, and a NaN stays with the tenant that made it.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from joynexus.errors import JoyNexusError, NonFiniteError
from joynexus.models.adapted_rows import AdaptedRows
from joynexus.models.adapters import PREFIX
from joynexus.models.backbone import Backbone
from joynexus.training.group import Computed, Member, stack_prefixes, tenant_error
from joynexus.training.optimizer import gradient_norm

log = logging.getLogger(__name__)

CPU_TOKENS, ACCELERATOR_TOKENS = 4096, 16384
"""Tokens whose graph is kept at once, unless one tenant's call has more: the graph is what takes memory here."""

OwnPart = Computed | JoyNexusError | None
"""What a tenant's own part came to."""


class AdaptedForward:
    """A joint forward, and the backward that belongs to it."""

    def __init__(self, members: Sequence[Member], backbone: Backbone) -> None:
        """Run the forward.

        Args:
            members: Of one signature, prepared, each with an adapter.
            backbone: Runs over all rows at once.
        """
        self._members = list(members)
        self._backbone = backbone
        adapters = [member.state.parts.adapter for member in members for _ in range(member.num_looked_up)]
        self._rows = AdaptedRows(adapters, records=True)
        prefixes = stack_prefixes([member.prefix for member in members if member.prefix is not None])
        with self._rows.active():
            self._features = backbone.prefix(prefixes.to(backbone.device), members[0].slot.signature)
        if not self._features.hidden.requires_grad:
            raise TypeError(f"backbone {backbone.spec.type!r} gives features without gradient to the adapter")

    def hand_out(self) -> None:
        """Give every member features of its own: copies, and leaves of its part's graph."""
        for member, start, stop in self._shares():
            member.features = self._features.slice(start, stop).map(_leaf)

    def complete(self, parts: Sequence[OwnPart]) -> list[OwnPart]:
        """Add the adapters' gradients to what the members' own parts came to; where that fails jointly, each alone.

        Args:
            parts: One per member, in order.

        Returns:
            The same, with the whole gradient, or the error that this member alone has.
        """
        try:
            gradients = self._backward(parts)
        except Exception as error:
            if len(parts) == 1:
                return [tenant_error(self._members[0].slot, error)]
            log.exception("joint backward of %d tenants failed; each alone", len(parts))
            return [_complete_alone(*each, self._backbone) for each in zip(self._members, parts, strict=True)]
        return [_whole(*each) for each in zip(self._members, parts, gradients, strict=True)]

    def _backward(self, parts: Sequence[OwnPart]) -> list[dict[str, Tensor]]:
        """Return the gradient of each member's adapter that flows through its features."""
        outputs = [self._features.hidden, *self._features.keys, *self._features.values]
        reached: list[Tensor] = []
        gradients: list[Tensor] = []
        for place, output in enumerate(outputs):
            by_member = [part.features[place] if isinstance(part, Computed) else None for part in parts]
            if output.requires_grad and any(each is not None for each in by_member):
                reached.append(output)
                gradients.append(self._joined(output, by_member))
        self._rows.backward(reached, gradients)
        return [self._rows.gradient(start, stop) for _, start, stop in self._shares()]

    def _joined(self, output: Tensor, by_member: Sequence[Tensor | None]) -> Tensor:
        """Put the members' gradients of one output together; 0 where a member's loss does not read it."""
        parts: list[Tensor] = []
        for (_, start, stop), own in zip(self._shares(), by_member, strict=True):
            parts.append(output.new_zeros(stop - start, *output.shape[1:]) if own is None else own)
        return torch.cat(parts)

    def _shares(self) -> list[tuple[Member, int, int]]:
        """Return each member with its first row and the row after its last."""
        shares: list[tuple[Member, int, int]] = []
        start = 0
        for member in self._members:
            shares.append((member, start, start + member.num_looked_up))
            start += member.num_looked_up
        return shares


def encode_adapted(members: Sequence[Member], backbone: Backbone) -> AdaptedForward | None:
    """Give every member its features; those of all together, or none where that fails.

    Args:
        members: Of one signature, without error, each with an adapter and rows.
        backbone: Runs over all rows.

    Returns:
        What its backward is made with; None where it failed: a single member has the error then.
    """
    try:
        forward = AdaptedForward(members, backbone)
    except Exception as error:
        if len(members) == 1:
            members[0].error = tenant_error(members[0].slot, error)
        else:
            log.exception("joint forward of %d tenants with adapters failed; each alone", len(members))
        return None
    forward.hand_out()
    return forward


def waves(members: Iterable[Member], backbone: Backbone) -> list[list[Member]]:
    """Cut members into joint forwards whose graphs fit the memory; beside whom one is does not change its numbers."""
    limit = CPU_TOKENS if backbone.device.type == "cpu" else ACCELERATOR_TOKENS
    cut: list[list[Member]] = []
    tokens = 0
    for member in members:
        seen = member.slot.policy.observation
        length = backbone.prefix_length(len(seen.cameras), seen.image_size, seen.max_prompt_tokens)
        own = length * member.num_looked_up
        if not cut or tokens + own > limit:
            cut.append([])
            tokens = 0
        cut[-1].append(member)
        tokens += own
    return cut


def _complete_alone(member: Member, part: OwnPart, backbone: Backbone) -> OwnPart:
    """Make a member's forward again, by itself, and the backward of what its part came to."""
    if not isinstance(part, Computed):
        return part
    try:
        return AdaptedForward([member], backbone).complete([part])[0]
    except Exception as error:  # noqa: BLE001  # the tenant's boundary
        return tenant_error(member.slot, error)


def _whole(member: Member, part: OwnPart, through: dict[str, Tensor]) -> OwnPart:
    """Add the gradient through the features to a part's own: a module's tokens may pass the adapted layers as well."""
    if not isinstance(part, Computed):
        return part
    own = dict(part.gradient)
    for name, each in {f"{PREFIX}{name}": each for name, each in through.items()}.items():
        own[name] = own[name] + each if name in own else each
    norm = gradient_norm(own)
    if not norm < float("inf"):
        error = NonFiniteError(f"adapter: the norm of the gradient is {norm}. Lower lr or check the data.")
        return tenant_error(member.slot, error)
    return replace(part, gradient=own, features=())


def _leaf(features: Tensor) -> Tensor:
    own = features.detach().clone()
    return own.requires_grad_() if own.is_floating_point() else own
