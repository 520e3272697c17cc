"""What a policy is made of beside the shared backbone, and all that a version of it holds."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from joynexus.models.action_module import ActionModule
from joynexus.models.adapters import PREFIX, Adapter
from joynexus.models.normalizer import PolicyNormalizer
from joynexus.specs.signature import PrefixLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyParts:
    """What a policy is made of, beside the shared backbone."""

    module: ActionModule
    """On the backbone's device, in float32."""
    normalizer: PolicyNormalizer
    layout: PrefixLayout
    signature: str
    """``layout.signature``, computed once."""
    adapter: Adapter | None = None
    """The tenant's own change of the backbone, on the same device, in float32."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all that is trained, by name: the module's, then the adapter's under ``adapter.``."""
        own = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        return own | self._adapted()

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a version is made of, by name; not copied."""
        return {**self.module.state_dict(), **self._adapted()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a version that :meth:`tensors` gave.

        Raises:
            RuntimeError: If a tensor is missing, is too many, or has another shape.
        """
        mine = self._adapted()
        self.module.load_state_dict({name: each for name, each in tensors.items() if name not in mine}, strict=True)
        wrong = [name for name, each in mine.items() if name not in tensors or tensors[name].shape != each.shape]
        if wrong:
            raise RuntimeError(f"adapter: {len(wrong)} tensors are missing or have another shape, such as {wrong[:3]}")
        for name, each in mine.items():
            each.copy_(tensors[name])

    def copied(self) -> "PolicyParts":
        """Return parts whose parameters are copies."""
        return replace(self, module=copy.deepcopy(self.module), adapter=copy.deepcopy(self.adapter))

    def freeze(self) -> None:
        """Switch off every gradient and every training behaviour."""
        self.module.requires_grad_(requires_grad=False).eval()
        for each in self._adapted().values():
            each.requires_grad = False

    def _adapted(self) -> dict[str, nn.Parameter]:
        named = {} if self.adapter is None else self.adapter.named_parameters()
        return {f"{PREFIX}{name}": each for name, each in named.items()}
