"""Acting with one policy version for many rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.inference.policies import ServedPolicy
from joynexus.models.action_module import Decision
from joynexus.models.adapters import adapting
from joynexus.models.pauses import pause
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.stacked import rows_of
from joynexus.types import ActionChunk, Array, PredictRequest

CPU_ROWS = 4
"""Rows of one forward of a module on a CPU: the fewest from which a product's rows round alike on one thread."""
ACCELERATOR_ROWS = 16
"""Idem on an accelerator, where a few rows more cost next to nothing and a second forward costs its launches again."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadJob:
    """Rows that one policy version acts for."""

    served: ServedPolicy
    prefix: PrefixFeatures
    """Features of the rows."""
    state: Float[Tensor, "b s"]
    """Raw."""
    seeds: Sequence[int]
    """One per row."""
    deterministic: bool
    """Act without exploration."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadRows:
    """Rows of one forward of a module: always as many, the last ones padding."""

    prefix: PrefixFeatures
    state: Float[Tensor, "b s"]
    """Normalised."""
    generators: Sequence[torch.Generator]
    """Each row's own, fresh from its seed."""


def rows_per_forward(device: torch.device) -> int:
    """Return the number of rows that a module always runs at once on a device."""
    return CPU_ROWS if device.type == "cpu" else ACCELERATOR_ROWS


def act(job: HeadJob) -> Decision:
    """Choose one chunk per row; a row's answer depends on the row and its seed alone.

    The module always runs the same number of rows, the last forward padded: kernels round by the size of the batch,
    so the rows that happen to wait at the same time would otherwise change the last bits, and an evaluation would
    depend on the number of its workers.

    Returns:
        The decision, with actions in the environment's units.
    """
    decisions: list[Decision] = []
    for rows in forwards(job):
        pause()
        decisions.append(act_rows(job, rows))
    return finish(job, decisions)


def act_rows(job: HeadJob, rows: HeadRows) -> Decision:
    """Run one forward of a job, padding included."""
    parts = job.served.parts
    with adapting(parts.adapter):
        return parts.module.act(rows.prefix, rows.state, rows.generators, deterministic=job.deterministic)


def forwards(job: HeadJob) -> list[HeadRows]:
    """Cut a job's rows into forwards of the size that its device always runs."""
    parts, size, total = job.served.parts, rows_per_forward(job.state.device), len(job.prefix)
    prefix = job.prefix if parts.module.reads_keys_values else replace(job.prefix, keys=(), values=())
    state = parts.normalizer.state(job.state)
    cut: list[HeadRows] = []
    for start in range(0, total, size):
        chunk, states = prefix.slice(start, start + size), state[start : start + size]
        missing = size - len(chunk)
        if missing:
            chunk = PrefixFeatures.concatenate([chunk] + [chunk.slice(0, 1)] * missing)
            states = torch.cat([states, states[:1].expand(missing, -1)])
        seeds = [*job.seeds[start : start + size], *[0] * missing]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        cut.append(HeadRows(prefix=chunk, state=states, generators=generators))
    return cut


def finish(job: HeadJob, decisions: Sequence[Decision]) -> Decision:
    """Join the decisions of a job's forwards, without padding, and bring its actions to the environment's units."""
    decision = rows_of(_concatenate(decisions), slice(0, len(job.seeds)))  # only the last forward is padded
    return replace(decision, actions=job.served.parts.normalizer.raw_actions(decision.actions))


def to_chunk(decision: Decision, served: ServedPolicy, start: int, stop: int) -> ActionChunk | NonFiniteError:
    """Give rows ``start`` to ``stop - 1`` of a decision to the request that they belong to.

    Returns:
        Their chunk; an error if a number in them is NaN or infinite.
    """
    own = rows_of(decision, slice(start, stop))
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
