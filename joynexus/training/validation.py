"""What a training call has to look like, checked when it is submitted, and its rows that count."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.models.policy import check_observation
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.tenant import PolicySpec
from joynexus.training.losses import TRACE, VALID, LossFunction, find_loss
from joynexus.training.schedule import check_optimizer
from joynexus.types import Array, Loss, TrainingBatch, TrainingCall


def check_call(call: TrainingCall, policy: PolicySpec, *, has_features: bool = False) -> None:
    """Refuse a call that can't be run, before it takes a sequence number.

    Args:
        call: As submitted.
        policy: The slot's policy.
        has_features: Whether features of every row come beside the call, so that its frames may be left out.

    Raises:
        InvalidBatchError: If shapes, types or keys are not the policy's, or parts of the call are missing.
        UnknownComponentError: If there is no such loss, naming those that there are.
        SpecError: If the optimizer can't be used.
    """
    who = f"tenant {call.tenant!r}, call {call.sequence}"
    if call.batch is None and call.optimizer is None:
        raise InvalidBatchError(f"{who}: has neither batch nor optimizer. Give one, or both.")
    if (call.batch is None) != (call.loss is None):
        missing = "loss" if call.loss is None else "batch"
        raise InvalidBatchError(f"{who}: {missing} is missing. Batch and loss come together.")
    if call.optimizer is not None:
        check_optimizer(call.optimizer, call.schedule_steps)
    if policy.adapter is not None and (has_features or (call.batch is not None and call.batch.num_featured > 0)):
        raise InvalidBatchError(
            f"{who}: brings features, which an adapter makes those of one version. Send the frames in their place."
        )
    if call.batch is not None and call.loss is not None:
        function = find_loss(call.loss)[0]
        _check_module(function, call.loss, policy)
        try:
            is_encoded = not has_features and call.batch.num_featured < len(call.batch)
            check_observation(policy.observation, call.batch.observation, needs_frames=is_encoded)
        except InvalidBatchError as error:
            raise InvalidBatchError(f"{who}: {error}") from error
        problems = [*_array_problems(call.batch, policy), *_extra_problems(call.batch, function)]
        if problems:
            raise InvalidBatchError(f"{who}: {'; '.join(problems)}. Send what policy and loss need.")


def check_held(call: TrainingCall, features: Sequence[PrefixFeatures] | None, signature: str) -> None:
    """Refuse features beside a call that are not of its rows.

    Raises:
        InvalidBatchError: If there are more or fewer than rows, or they were computed under another signature.
    """
    rows = 0 if call.batch is None else len(call.batch)
    if features is not None and (len(features) != rows or any(each.signature != signature for each in features)):
        raise InvalidBatchError(
            f"tenant {call.tenant!r}, call {call.sequence}: {len(features)} rows of features for {rows} rows of "
            f"signature {signature}. Give each row its own, or none."
        )


def _check_module(function: LossFunction, loss: Loss, policy: PolicySpec) -> None:
    if function.scores_trace and not policy.action_module.gives_log_prob:
        raise InvalidBatchError(
            f"loss {loss.name!r}: needs log-probability and value, which action_module "
            f"{policy.action_module.type!r} does not give. Take 'gaussian' or 'discrete_tokens'."
        )


def _array_problems(batch: TrainingBatch, policy: PolicySpec) -> list[str]:
    rows, action = len(batch), policy.action
    problems: list[str] = []
    if batch.actions.dtype != np.float32 or batch.actions.shape != (rows, action.horizon, action.dim):
        need = [rows, action.horizon, action.dim]
        problems.append(f"actions are {batch.actions.dtype} {list(batch.actions.shape)}, need float32 {need}")
    if batch.action_is_pad.dtype != np.bool_ or batch.action_is_pad.shape != (rows, action.horizon):
        found = f"{batch.action_is_pad.dtype} {list(batch.action_is_pad.shape)}"
        problems.append(f"action_is_pad is {found}, need bool {[rows, action.horizon]}")
    if len(batch.sample_ids) != rows:
        problems.append(f"{len(batch.sample_ids)} sample_ids for {rows} rows")
    if batch.features is not None:
        lengths = {name: each.shape[:1] for name, each in batch.features.arrays.items()}
        wrong = {name: list(each) for name, each in lengths.items() if each != (rows,)}
        problems += [f"features have {wrong} rows, need {rows}"] if wrong else []
        problems += [] if "hidden" in lengths else ["features lack 'hidden'"]
    if batch.featured is not None and (batch.features is None or batch.featured.shape != (rows,)):
        problems.append(f"featured has {list(batch.featured.shape)} rows, need features and {rows}")
    return problems


def _extra_problems(batch: TrainingBatch, function: LossFunction) -> list[str]:
    rows = len(batch)
    trace = {name for name in batch.extras if function.scores_trace and name.startswith(TRACE)}
    unknown = sorted(set(batch.extras) - {*function.extras, VALID} - trace)
    problems = [f"extra {name!r} is not read by this loss, which knows {[*function.extras, VALID]}" for name in unknown]
    problems += [f"extra {name!r} is missing" for name in function.extras if name not in batch.extras]
    if function.scores_trace and not trace:
        problems.append(f"extras {TRACE + '...'!r} are missing")
    for name in set(batch.extras) & {*function.extras, VALID}:
        value, dtype = batch.extras[name], np.dtype(np.bool_ if name == VALID else np.float32)
        if value.dtype != dtype or value.shape != (rows,):
            problems.append(f"extra {name!r} is {value.dtype} {list(value.shape)}, need {dtype} {[rows]}")
    for name in sorted(trace):
        if batch.extras[name].shape[:1] != (rows,):
            problems.append(f"extra {name!r} has {batch.extras[name].shape[:1]} rows, need {rows}")
    return problems


def counted_rows(batch: TrainingBatch, function: LossFunction) -> TrainingBatch:
    """Take out the rows that do not count, so that nothing in them can reach the loss.

    Args:
        batch: A checked batch.
        function: Its loss.

    Returns:
        The rows that :func:`counting_rows` names, without the extra ``valid``, and with 0 for the actions of padded
        steps. The batch itself where nothing is masked.
    """
    keep = counting_rows(batch, function)
    if keep.all() and VALID not in batch.extras and not batch.action_is_pad.any():
        return batch
    kept = batch.rows(np.flatnonzero(keep))
    return TrainingBatch(
        observation=kept.observation,
        actions=np.where(kept.action_is_pad[..., None], np.float32(0.0), kept.actions),
        action_is_pad=kept.action_is_pad,
        sample_ids=kept.sample_ids,
        extras={name: value for name, value in kept.extras.items() if name != VALID},
        features=kept.features,
        featured=kept.featured,
    )


def counting_rows(batch: TrainingBatch, function: LossFunction) -> Bool[Array, " b"]:
    """Tell which rows count: those whose ``valid`` is True and, where actions are supervised, with an unpadded step."""
    keep = np.asarray(batch.extras.get(VALID, np.ones(len(batch), dtype=np.bool_)))
    return keep & ~batch.action_is_pad.all(axis=1) if function.supervises_actions else keep


def check_finite(batch: TrainingBatch) -> None:
    """Refuse rows with NaN or infinity in what the module or the loss reads.

    Args:
        batch: Rows that count, from :func:`counted_rows`.

    Raises:
        NonFiniteError: Naming the arrays and the first sample.
    """
    arrays = {"state": batch.observation.state, "actions": batch.actions, **batch.extras}
    for name, value in arrays.items():
        if not np.issubdtype(value.dtype, np.floating):
            continue
        bad = ~np.isfinite(value.reshape(len(value), -1)).all(axis=1)
        if bad.any():
            first = batch.sample_ids[int(np.flatnonzero(bad)[0])]
            raise NonFiniteError(
                f"{name}: {int(bad.sum())} of {len(batch)} rows hold NaN or infinity, first in sample {first!r}. "
                f"Mask them with the extra {VALID!r}, or repair the data."
            )


def payload_digest(call: TrainingCall) -> bytes:
    """Hash everything of a call but tenant and sequence number: equal digests mean the same payload."""
    digest = hashlib.blake2b(digest_size=16)
    settings = {
        "loss": None if call.loss is None else [call.loss.name, sorted(call.loss.parameters.items())],
        "optimizer": None if call.optimizer is None else call.optimizer.model_dump(mode="json"),
        "schedule_steps": call.schedule_steps,
        "samples": None if call.batch is None else [call.batch.sample_ids, call.batch.observation.instructions],
    }
    if call.batch is not None and call.batch.features is not None:
        settings["features"] = [call.batch.features.dtype, call.batch.features.signature]
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for name, value in _arrays(call.batch):
        digest.update(f"|{name}|{value.dtype.str}|{value.shape}|".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.digest()


def _arrays(batch: TrainingBatch | None) -> list[tuple[str, Array]]:
    if batch is None:
        return []
    seen = batch.observation
    named = {"images": seen.images, "image_mask": seen.image_mask, "state": seen.state}
    named |= {"actions": batch.actions, "action_is_pad": batch.action_is_pad}
    features = {} if batch.features is None else batch.features.arrays
    carried = {f"features/{name}": each for name, each in features.items()}
    carried |= {} if batch.featured is None else {"featured": batch.featured}
    return [*named.items(), *sorted(batch.extras.items()), *sorted(carried.items())]
