"""A slot on disk: what is written of it, and how it comes back exactly.

``module.safetensors`` holds the module (and the adapter, where there is one) alone and is what an export holds;
``optimizer.safetensors`` the moments, the accumulated gradient and the generator; ``state.json`` counters, statistics,
the policy, and the answers that a client may still ask for.
"""

import dataclasses
import logging
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from joynexus import errors
from joynexus.data.normalization import policy_stats_from_json, policy_stats_to_json
from joynexus.errors import CheckpointError, JoyNexusError, TenantFailedError
from joynexus.models.backbone import Backbone
from joynexus.models.policy import build_policy
from joynexus.training.call_queue import Answer, Outcome
from joynexus.training.checkpoint import Tensors, host_copies, read_checkpoint, write_checkpoint
from joynexus.training.json_values import JsonObject, integer_in, number_in, object_in
from joynexus.training.optimizer import has_fused
from joynexus.training.slot import Accumulated, TrainableState, TrainingSlot
from joynexus.types import PolicyStats, TrainingResult

log = logging.getLogger(__name__)

FORMAT = "joynexus-slot/1"
GRADIENT = "gradient/"
GENERATOR = "generator"


def save_slot(slot: TrainingSlot, folder: Path, extra: Mapping[str, Any]) -> Path:
    """Write a slot as it is between two calls.

    Args:
        slot: Its lock is held while it is copied, not while it is written.
        folder: Where to.
        extra: Whatever the caller wants back from :func:`load_slot`.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the disk refuses.
    """
    with slot.lock:
        tensors, state = _dump(slot)
    return write_checkpoint(folder, tensors, {**state, "extra": dict(extra)})


def load_slot(slot: TrainingSlot, folder: Path, backbone: Backbone) -> JsonObject:
    """Take a slot back to a checkpoint of it: parameters, moments, gradient, generator, counters and statistics.

    Numbers and answers of calls are taken over where the slot has accepted no call; a slot in use keeps its own, so
    that its client goes on counting. The version never goes back.

    Args:
        slot: Of the same tenant, policy and seed.
        folder: Where from.
        backbone: The one that the slot is under.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: If the checkpoint is damaged, or belongs to another tenant, policy, seed or backbone; the
            slot is as it was.
    """
    tensors, saved = read_checkpoint(folder)
    _check_owner(slot, saved, folder)
    try:
        stats = None if saved["stats"] is None else policy_stats_from_json(object_in(saved, "stats"))
        state = _rebuild(slot, tensors, saved, stats, backbone)
        answers = {int(number): _outcome(each) for number, each in object_in(saved, "answers").items()}
        version, sequence = integer_in(saved, "version"), integer_in(saved, "next_sequence")
        extra = dict(object_in(saved, "extra"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: does not fit the policy: {error}. Take another checkpoint.") from error
    with slot.lock:
        slot.state, slot.stats = state, stats
        slot.version = max(slot.version, version)
        if slot.calls.next_sequence == 0:
            slot.calls.restore(sequence, answers)
    return extra


def _dump(slot: TrainingSlot) -> tuple[Tensors, JsonObject]:
    """Copy a slot; its lock is held."""
    state = slot.state
    gradient = {f"{GRADIENT}{name}": each for name, each in state.accumulated.gradient.items()}
    tensors = {
        "module": host_copies(state.parts.tensors()),
        "optimizer": host_copies({**state.optimizer.tensors(), **gradient}) | {GENERATOR: state.generator.get_state()},
    }
    return tensors, {
        "format": FORMAT,
        "tenant": slot.tenant,
        "seed": slot.seed,
        "policy": slot.policy.model_dump(mode="json"),
        "signature": slot.signature,
        "version": slot.version,
        "optimizer": {"type": "adamw", "fused": state.optimizer.fused, "moments": state.optimizer.moments},
        "optimizer_steps": state.optimizer_steps,
        "schedule_step": state.schedule_step,
        "accumulated_rows": state.accumulated.rows,
        "accumulated_weight": state.accumulated.weight,
        "next_sequence": slot.calls.first_waiting,
        "answers": {str(number): _answer_json(answer) for number, answer in slot.calls.answered().items()},
        "stats": None if slot.stats is None else policy_stats_to_json(slot.stats),
        "libraries": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def _rebuild(
    slot: TrainingSlot,
    tensors: Tensors,
    saved: Mapping[str, Any],
    stats: PolicyStats | None,
    backbone: Backbone,
) -> TrainableState:
    """Build a new state, so that a forward that runs meanwhile keeps the old one."""
    parts = build_policy(slot.policy, backbone, seed=slot.seed, stats=stats)
    parts.load(tensors["module"])
    moments = slot.state.optimizer.moments  # the service's: a state of the other type is converted
    state = TrainableState(parts, seed=slot.seed, fused=_kernel(slot, saved), moments=moments)
    state.optimizer.load(tensors["optimizer"])
    state.generator.set_state(tensors["optimizer"][GENERATOR])
    gradient = {
        name.removeprefix(GRADIENT): each.to(backbone.device, copy=True)
        for name, each in tensors["optimizer"].items()
        if name.startswith(GRADIENT)
    }
    rows, weight = integer_in(saved, "accumulated_rows"), number_in(saved, "accumulated_weight")
    state.accumulated = Accumulated(gradient=gradient, rows=rows, weight=float(rows) if weight is None else weight)
    state.optimizer_steps = integer_in(saved, "optimizer_steps")
    state.schedule_step = integer_in(saved, "schedule_step")
    return state


def _kernel(slot: TrainingSlot, saved: Mapping[str, Any]) -> bool:
    fused = bool(object_in(saved, "optimizer")["fused"])
    if fused and not has_fused(slot.state.parameters):
        log.warning("tenant %s: saved with the fused AdamW, which is not here; updates differ by 1e-7", slot.tenant)
        return False
    return fused


def _check_owner(slot: TrainingSlot, saved: Mapping[str, Any], folder: Path) -> None:
    mine: JsonObject = {
        "format": FORMAT,
        "tenant": slot.tenant,
        "seed": slot.seed,
        "signature": slot.signature,
        "policy": slot.policy.model_dump(mode="json"),
    }
    different = [name for name, value in mine.items() if _without_start(saved.get(name)) != _without_start(value)]
    if different:
        raise CheckpointError(
            f"{folder}: belongs to another run: {different} differ from tenant {slot.tenant!r}'s. "
            "Load a checkpoint of this tenant and policy, or take another folder for a new run."
        )


def _without_start(value: Any) -> Any:  # noqa: ANN401  # a JSON value
    """Leave out where a policy started from: a checkpoint holds all that came of it, and folders move."""
    if isinstance(value, dict):
        return {name: each for name, each in cast("JsonObject", value).items() if name != "init_from"}
    return value


def _answer_json(answer: Answer) -> JsonObject:
    if isinstance(answer.outcome, TrainingResult):
        result = dataclasses.asdict(answer.outcome)
        result["metrics"] = {name: each for name, each in result["metrics"].items() if math.isfinite(each)}
        outcome: JsonObject = {"result": result}
    else:
        outcome = {"error": [type(answer.outcome).__name__, str(answer.outcome)]}
    return {"digest": answer.digest.hex(), **outcome}


def _outcome(answer: Mapping[str, Any]) -> tuple[bytes, Outcome]:
    digest = bytes.fromhex(str(answer["digest"]))
    if "result" in answer:
        return digest, TrainingResult(**answer["result"])
    name, message = answer["error"]
    kind = getattr(errors, name, TenantFailedError)
    known = isinstance(kind, type) and issubclass(kind, JoyNexusError)
    return digest, (kind if known else TenantFailedError)(message)
