"""A tenant's own AdamW: hyperparameters come with each step, the state is named by parameter.

The fused kernel and the default one differ by about 1e-7, so the choice is part of a checkpoint.

Moments may be kept in bfloat16, half their size, with parameters and arithmetic in float32. Rounding to 8 bits stops a
moment short of its target where a step's part of the way, (1 - beta), is less than half a unit of the last place: the
second moment then stays within 2^-9 / (1 - beta) of what float32 gives, which is 4 % at beta = 0.95, 20 % at 0.99 and
no bound at all at 0.999. Half of that shows in a step, which divides by its root.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from joynexus.errors import CheckpointError, NonFiniteError
from joynexus.specs.algorithm import OptimizerSpec

Moments = Literal["float32", "bfloat16"]
LARGEST_NORM = 1e19
"""AdamW squares the gradient in float32, whose largest number is 3.4e38."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""State of AdamW per parameter."""


class TenantOptimizer:
    """AdamW over one tenant's parameters.

    The state is allocated at once, so that a slot's memory is known when it is opened and no step runs out of it.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, fused: bool | None = None, moments: Moments = "float32"
    ) -> None:
        """Prepare an optimizer that has not made a step.

        Args:
            parameters: Trainable parameters by name.
            fused: Which kernel to use; None takes the fused one where torch has it. bfloat16 moments have none.
            moments: Type that the two moments are kept in.
        """
        self._parameters = dict(parameters)
        self.moments: Moments = moments
        kept = torch.float32 if moments == "float32" else torch.bfloat16
        self.fused = moments == "float32" and (has_fused(self._parameters) if fused is None else fused)
        self._adamw = torch.optim.AdamW(list(self._parameters.values()), fused=self.fused)
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, dtype=kept, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=kept, memory_format=torch.preserve_format),
            }

    def step(self, gradient: Mapping[str, Tensor], spec: OptimizerSpec, lr: float) -> float:
        """Clip a gradient and apply it.

        Args:
            gradient: By parameter name, of the mean loss; consumed. Parameters that are not in it stay as they are,
                without decay.
            spec: AdamW's hyperparameters; ``spec.lr`` is not read.
            lr: Of this step.

        Returns:
            2-norm of the whole gradient before clipping.

        Raises:
            NonFiniteError: If the gradient is not finite, or too large for its square; nothing was changed.
        """
        # In the order of the parameters: a sum's rounding depends on its order, and a file gives tensors in any.
        gradient = {name: gradient[name] for name in self._parameters if name in gradient}
        norm = gradient_norm(gradient)
        if not math.isfinite(norm):
            raise NonFiniteError(f"optimizer step refused: the gradient's norm is {norm}. Lower lr or check the data.")
        self._adamw.param_groups[0].update(lr=lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        try:
            touched = self._with_gradient(gradient)
            if spec.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(touched, spec.max_grad_norm, torch.tensor(norm))
            if self.moments == "float32":
                self._adamw.step()
            else:
                for parameter in touched:
                    _step_in_float32(parameter, self._adamw.state[parameter], spec, lr)
        finally:
            self._adamw.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by ``moment/parameter``; not copied."""
        return {
            f"{moment}/{name}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a state that :meth:`tensors` gave.

        Raises:
            CheckpointError: If a tensor is missing or has another shape.
        """
        for name, mine in self.tensors().items():
            found = tensors.get(name)
            if found is None or found.shape != mine.shape:
                shape = "missing" if found is None else f"{list(found.shape)}"
                raise CheckpointError(
                    f"optimizer state {name!r} is {shape}, need {list(mine.shape)}. Load a checkpoint of this policy."
                )
            mine.copy_(found)

    def _with_gradient(self, gradient: Mapping[str, Tensor]) -> list[nn.Parameter]:
        """Hang the gradient on the parameters, and return those that have one."""
        touched: list[nn.Parameter] = []
        for name, each in gradient.items():
            self._parameters[name].grad = each
            touched.append(self._parameters[name])
        return touched


@torch.no_grad()
def _step_in_float32(parameter: nn.Parameter, state: Mapping[str, Tensor], spec: OptimizerSpec, lr: float) -> None:
    """Make AdamW's step (Loshchilov and Hutter 2019, Alg. 2) with moments that are kept in a shorter type."""
    assert parameter.grad is not None
    gradient, (beta1, beta2) = parameter.grad, spec.betas
    state["step"].add_(1)
    count = float(state["step"])
    mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)  # m = b1 m + (1 - b1) g
    square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["exp_avg"].copy_(mean)
    state["exp_avg_sq"].copy_(square)
    root = square.sqrt_().div_(math.sqrt(1 - beta2**count)).add_(spec.eps)
    parameter.mul_(1 - lr * spec.weight_decay)
    parameter.addcdiv_(mean, root, value=-lr / (1 - beta1**count))


def gradient_norm(gradient: Mapping[str, Tensor]) -> float:
    """Return the 2-norm of a whole gradient; infinite where its square would not fit float32."""
    if not gradient:
        return 0.0
    norm = float(torch.nn.utils.get_total_norm(list(gradient.values())))
    return math.inf if norm > LARGEST_NORM else norm


def has_fused(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Tell whether torch has a fused AdamW for these parameters' device and type."""
    try:
        torch.optim.AdamW(list(parameters.values()), fused=True)
    except RuntimeError:  # no fused kernel for this device or type
        return False
    return True
