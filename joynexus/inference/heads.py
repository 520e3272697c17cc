"""Acting with one policy version for many rows."""

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.inference.policies import ServedPolicy
from joynexus.models.action_module import Decision
from joynexus.models.prefix import PrefixFeatures
from joynexus.types import ActionChunk, Array, PredictRequest

CPU_ROWS = 4
"""Rows of one forward of a module on a CPU."""


def check_seeds(request: PredictRequest) -> None:
    """Refuse seeds that no generator takes.

    Raises:
        InvalidBatchError: If there is not one 64-bit seed per row.
    """
    rows = len(request.observation)
    if len(request.seeds) != rows or not all(-(2**63) <= seed < 2**64 for seed in request.seeds):
        raise InvalidBatchError(
            f"tenant {request.tenant!r}: {len(request.seeds)} seeds for {rows} rows: {request.seeds[:8]}. "
            "Send one 64-bit integer per row."
        )


def check_state(request: PredictRequest) -> None:
    """Refuse states that would poison the answer.

    Raises:
        NonFiniteError: If a number is NaN or infinite.
    """
    wrong = np.flatnonzero(~np.isfinite(request.observation.state).all(axis=1))
    if wrong.size:
        raise NonFiniteError(
            f"tenant {request.tenant!r}: the state of rows {wrong[:8].tolist()} holds NaN or infinity. "
            "Look at the environment's sensors."
        )


def act(
    served: ServedPolicy,
    prefix: PrefixFeatures,
    state: Float[Tensor, "b s"],
    seeds: Sequence[int],
    *,
    deterministic: bool,
) -> Decision:
    """Choose one chunk per row; a row's answer depends on the row and its seed alone.

    On a CPU the module always runs ``CPU_ROWS`` rows, the last forward padded: kernels round by the size of the batch,
    so the rows that happen to wait at the same time would otherwise change the last bits, and an evaluation would
    depend on the number of its workers. On an accelerator all rows go through in one forward, and a row agrees with
    itself alone up to rounding.

    Args:
        served: The policy version.
        prefix: Features of the rows.
        state: Raw states.
        seeds: One per row.
        deterministic: Act without exploration.

    Returns:
        The decision, with actions in the environment's units.
    """
    normalized = served.parts.normalizer.state(state)
    parts = [
        _forward(served, chunk, rows, seeds_of_rows, deterministic=deterministic)
        for chunk, rows, seeds_of_rows in _forwards(prefix, normalized, seeds)
    ]
    decision = _concatenate(parts)
    return Decision(
        actions=served.parts.normalizer.raw_actions(decision.actions),
        log_prob=decision.log_prob,
        value=decision.value,
        trace=decision.trace,
    )


def to_chunk(decision: Decision, served: ServedPolicy, start: int, stop: int) -> ActionChunk | NonFiniteError:
    """Give rows ``start`` to ``stop - 1`` of a decision to the request that they belong to.

    Returns:
        Their chunk; an error if a number in them is NaN or infinite.
    """
    own = _rows(decision, slice(start, stop))
    named = {"actions": own.actions, "log_prob": own.log_prob, "value": own.value, **own.trace}
    wrong = [name for name, each in named.items() if each is not None and not bool(torch.isfinite(each).all())]
    if wrong:
        return NonFiniteError(
            f"tenant {served.tenant!r}, version {served.version}: {', '.join(wrong)} hold NaN or infinity. "
            "Look at the training of this version."
        )
    return ActionChunk(
        actions=_array(own.actions),
        policy_version=served.version,
        log_prob=None if own.log_prob is None else _array(own.log_prob),
        value=None if own.value is None else _array(own.value),
        trace={name: _array(each) for name, each in own.trace.items()},
    )


def _forwards(
    prefix: PrefixFeatures, state: Float[Tensor, "b s"], seeds: Sequence[int]
) -> Iterator[tuple[PrefixFeatures, Float[Tensor, "b s"], Sequence[int]]]:
    rows = len(prefix)
    if state.device.type != "cpu":
        yield prefix, state, seeds
        return
    for start in range(0, rows, CPU_ROWS):
        stop = start + CPU_ROWS
        missing = max(0, stop - rows)
        chunk = prefix.slice(start, stop)
        if missing:
            chunk = PrefixFeatures.concatenate([chunk] + [prefix.slice(start, start + 1)] * missing)
        padded = torch.cat([state[start:stop], state[start : start + 1].expand(missing, -1)])
        yield chunk, padded, seeds[start:stop]


def _forward(
    served: ServedPolicy,
    prefix: PrefixFeatures,
    state: Float[Tensor, "b s"],
    seeds: Sequence[int],
    *,
    deterministic: bool,
) -> Decision:
    padding = [0] * (len(prefix) - len(seeds))
    generators = [torch.Generator().manual_seed(seed) for seed in [*seeds, *padding]]
    decision = served.parts.module.act(prefix, state, generators, deterministic=deterministic)
    return _rows(decision, slice(0, len(seeds)))


def _rows(decision: Decision, rows: slice) -> Decision:
    return Decision(
        actions=decision.actions[rows],
        log_prob=None if decision.log_prob is None else decision.log_prob[rows],
        value=None if decision.value is None else decision.value[rows],
        trace={name: each[rows] for name, each in decision.trace.items()},
    )


def _concatenate(parts: Sequence[Decision]) -> Decision:
    if len(parts) == 1:
        return parts[0]
    log_probs = [each.log_prob for each in parts if each.log_prob is not None]
    values = [each.value for each in parts if each.value is not None]
    return Decision(
        actions=torch.cat([each.actions for each in parts]),
        log_prob=torch.cat(log_probs) if log_probs else None,
        value=torch.cat(values) if values else None,
        trace={name: torch.cat([each.trace[name] for each in parts]) for name in parts[0].trace},
    )


def _array(tensor: Tensor) -> Array:
    cpu = tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
    return cast("Array", cpu.numpy().copy())
