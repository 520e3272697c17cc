"""From a policy spec and observations to prefix features: the path that training and inference share.

Both build the same parts with :func:`build_policy`, turn observations into a :class:`PrefixBatch` with
:func:`prepare_prefix`, and get features with :func:`encode`, which computes only what the store lacks.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from joynexus.errors import InvalidBatchError, SpecError
from joynexus.models.action_module import ModuleDims, build_action_module
from joynexus.models.adapted_rows import AdaptedRows
from joynexus.models.adapters import Adapter, build_adapter
from joynexus.models.backbone import Backbone
from joynexus.models.normalizer import PolicyNormalizer
from joynexus.models.policy_parts import PolicyParts
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.prefix_store import PrefixStore
from joynexus.models.prompts import render_prompts
from joynexus.specs.registry import load_implementation
from joynexus.specs.signature import prefix_layout
from joynexus.specs.tenant import ObservationSpec, PolicySpec
from joynexus.types import Array, Observation, PolicyStats


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeCount:
    """Where the rows of one :func:`encode` came from."""

    encoded: tuple[bool, ...]
    """Per row: True where the row went through the backbone; False where it was in the store, or is a copy of an
    earlier row of the same call."""

    @property
    def num_encoded(self) -> int:
        """Rows that went through the backbone."""
        return sum(self.encoded)

    @property
    def num_reused(self) -> int:
        """Rows that did not."""
        return len(self.encoded) - self.num_encoded


def module_dims(policy: PolicySpec, backbone: Backbone) -> ModuleDims:
    """Return the sizes that a policy's action module is built for."""
    return ModuleDims(
        prefix_dim=backbone.hidden_dim,
        state_dim=policy.observation.state_dim,
        action_dim=policy.action.dim,
        horizon=policy.action.horizon,
        kv_shape=backbone.kv_shape,
        num_heads=backbone.num_heads,
    )


def build_policy(policy: PolicySpec, backbone: Backbone, *, seed: int, stats: PolicyStats | None) -> PolicyParts:
    """Build a policy's own parts beside a resident backbone.

    Args:
        policy: The tenant's policy.
        backbone: The backbone that ``policy.backbone`` names.
        seed: Of the initial parameters: the tenant's.
        stats: Statistics to normalise with; may be None with normalisation ``identity``.

    Returns:
        The parts; the module is freshly initialised and on the backbone's device.

    Raises:
        SpecError: If the normalisation needs statistics and there are none, if the statistics have another width
            than state or action, if the prefix is longer than the module reads, if the backbone keeps fewer
            layers of keys and values than it reads, or if it has no layers that the adapter is for.
    """
    _check_prefix(policy, backbone)
    _check_stats(policy, stats)
    layout = prefix_layout(backbone.spec, policy.observation)
    _check_layers(policy, backbone)
    module = build_action_module(policy.action_module, module_dims(policy, backbone), seed=seed)
    if module.extends_prefix:
        module.attach(backbone)
    return PolicyParts(
        module=module.to(backbone.device),
        normalizer=PolicyNormalizer.of_policy(policy, stats, backbone.device),
        layout=layout,
        signature=layout.signature,
        adapter=None if policy.adapter is None else build_adapter(policy.adapter, backbone, seed=seed),
    )


def prepare_prefix(
    backbone: Backbone, policy: PolicySpec, observation: Observation, normalizer: PolicyNormalizer
) -> PrefixBatch:
    """Turn observations into what the backbone sees.

    Args:
        backbone: Gives the tokenizer.
        policy: Gives cameras, image size, prompt template and token bucket.
        observation: At least one row. Frames that ``image_mask`` hides are blanked, whatever they hold.
        normalizer: The policy's own, for prompts that hold the state.

    Returns:
        The rows, in host memory: they are hashed there, and only what the store lacks goes to the device.

    Raises:
        InvalidBatchError: If the observation has other cameras, sizes or widths than the policy, or a prompt is
            longer than the token bucket.
    """
    check_observation(policy.observation, observation)
    states: Array | None = None
    if policy.observation.state_in_prompt:  # normalised where training and acting do it, so that bins agree
        normalized = normalizer.state(torch.tensor(observation.state, device=backbone.device))
        states = cast("Array", normalized.cpu().numpy())
    tokens, token_mask = tokenize(backbone, policy.observation, observation.instructions, states)
    images = np.where(observation.image_mask[..., None, None, None], observation.images, np.uint8(0))
    return PrefixBatch(
        images=torch.from_numpy(images),
        image_mask=torch.tensor(observation.image_mask),
        tokens=tokens.cpu(),
        token_mask=token_mask.cpu(),
    )


def tokenize(
    backbone: Backbone, spec: ObservationSpec, instructions: Sequence[str], states: Float32[Array, "b s"] | None
) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
    """Turn instructions, and states where the prompt holds them, into tokens, and the mask of the real ones.

    Args:
        backbone: Gives the tokenizer.
        spec: Gives prompt template and token bucket.
        instructions: One per row.
        states: Normalised, see :func:`joynexus.models.prompts.render_prompts`.

    Raises:
        InvalidBatchError: If a prompt is longer than the token bucket.
    """
    return backbone.tokenize(render_prompts(spec, instructions, states), spec.max_prompt_tokens)


def check_observation(spec: ObservationSpec, observation: Observation, *, needs_frames: bool = True) -> None:
    """Refuse observations that do not have the policy's shapes.

    Args:
        spec: What the policy looks at.
        observation: Rows to check.
        needs_frames: Whether the rows are to be encoded; if not, their frames may have been left out.

    Raises:
        InvalidBatchError: Naming every field that is wrong, what was found and what is needed.
    """
    rows, cameras = len(observation), len(spec.cameras)
    images, size = observation.images, (*spec.image_size, 3)
    problems: list[str] = []
    if rows == 0:
        problems.append("there are no rows")
    if images.dtype != np.uint8 or images.ndim != 5 or images.shape[:2] != (rows, cameras):  # noqa: PLR2004
        problems.append(f"images are {_describe(images)}, need uint8 [{rows}, {cameras}, h, w, 3]")
    elif not observation.has_frames:
        problems += ["frames were left out, and the rows bring no features"] if needs_frames else []
    elif cameras and images.shape[2:] != size:
        problems.append(f"frames are {list(images.shape[2:])}, the policy's are {list(size)}")
    if observation.image_mask.dtype != np.bool_ or observation.image_mask.shape != (rows, cameras):
        problems.append(f"image_mask is {_describe(observation.image_mask)}, need bool [{rows}, {cameras}]")
    if observation.state.dtype != np.float32 or observation.state.shape != (rows, spec.state_dim):
        problems.append(f"state is {_describe(observation.state)}, need float32 [{rows}, {spec.state_dim}]")
    if problems:
        raise InvalidBatchError(f"observation: {'; '.join(problems)}. Send what the policy spec declares.")


def prefix_keys(batch: PrefixBatch, signature: str) -> list[bytes]:
    """Name each row by its content: image bytes, camera mask, token ids, and the schema signature.

    Args:
        batch: Rows as :func:`prepare_prefix` makes them.
        signature: Schema signature of the policy; it covers backbone, dtype and preprocessing.

    Returns:
        One 32-byte key per row; equal keys mean equal prefixes, whoever the tenants are.
    """
    columns: list[Array] = [
        each.cpu().contiguous().numpy() for each in (batch.images, batch.image_mask, batch.tokens, batch.token_mask)
    ]
    keys: list[bytes] = []
    for row in range(len(batch)):
        digest = hashlib.blake2b(signature.encode(), digest_size=32)
        for column in columns:
            digest.update(column[row].data)
        keys.append(digest.digest())
    return keys


def encode(
    backbone: Backbone,
    store: PrefixStore | None,
    batch: PrefixBatch,
    keys: Sequence[bytes],
    signature: str,
    *,
    adapters: Sequence[Adapter | None] = (),
) -> tuple[PrefixFeatures, EncodeCount]:
    """Get the features of every row, computing only what the store lacks, and each content once.

    Args:
        backbone: Runs over the misses, in one call.
        store: Where to look and to keep; None computes every distinct row.
        batch: Rows of one signature.
        keys: One per row, from :func:`prefix_keys`.
        signature: Schema signature of all rows.
        adapters: One entry per row, or none at all. Rows that have one are encoded with it, and never looked up or
            kept: their features are of one tenant, and of one version of it.

    Returns:
        The features in the order of the rows, free to be changed, and which rows were encoded.
    """
    own = {row for row, adapter in enumerate(adapters) if adapter is not None}
    names = [row.to_bytes(8, "big") if row in own else key for row, key in enumerate(keys)]  # no key is so short
    first_row = {key: row for row, key in reversed(list(enumerate(names)))}
    distinct = sorted(first_row, key=first_row.__getitem__)
    shared = [key for key in distinct if first_row[key] not in own]
    found = store.lookup(shared) if store is not None else [None] * len(shared)
    known = {key: row for key, row in zip(shared, found, strict=True) if row is not None}
    missing = [key for key in distinct if key not in known]
    encoded_rows = {first_row[key] for key in missing}
    count = EncodeCount(encoded=tuple(row in encoded_rows for row in range(len(keys))))
    if missing:
        places = [first_row[key] for key in missing]
        rows = torch.tensor(places, device=batch.tokens.device)
        misses = batch if len(missing) == len(batch) else batch.pick(rows)
        with AdaptedRows([adapters[row] for row in places]).active() if own else nullcontext():
            fresh = backbone.prefix(misses.to(backbone.device), signature)
        if store is not None:
            _keep(store, missing, fresh, [row not in own for row in places])
        if len(missing) == len(batch):
            return fresh, count
        known |= {key: fresh.slice(row, row + 1) for row, key in enumerate(missing)}
    return PrefixFeatures.concatenate([known[key] for key in names]), count


def _keep(store: PrefixStore, keys: Sequence[bytes], fresh: PrefixFeatures, shared: Sequence[bool]) -> None:
    """Put the rows into the store that are the backbone's own."""
    if all(shared):
        store.insert(keys, fresh)
        return
    for row, key in enumerate(keys):
        if shared[row]:
            store.insert([key], fresh.slice(row, row + 1))


def _check_prefix(policy: PolicySpec, backbone: Backbone) -> None:
    seen = policy.observation
    length = backbone.prefix_length(len(seen.cameras), seen.image_size, seen.max_prompt_tokens)
    limit = policy.action_module.longest_prefix()
    if limit is not None and length > limit:
        raise SpecError(
            f"action_module {policy.action_module.type!r}: the prefix has {length} tokens ({len(seen.cameras)} cameras "
            f"and {seen.max_prompt_tokens} prompt tokens), the module reads {limit}. "
            f"Raise max_prefix_tokens to {length}, or take fewer or smaller frames."
        )


def _check_layers(policy: PolicySpec, backbone: Backbone) -> None:
    reads = load_implementation(policy.action_module).reads_keys_values
    needed, kept = max(policy.action_module.kv_layers(), 1) if reads else 0, backbone.kv_shape[0]
    if kept < needed:
        raise SpecError(
            f"action_module {policy.action_module.type!r}: it reads the keys and values of {needed} layers, backbone "
            f"{policy.backbone!r} ({backbone.spec.type}) keeps {kept}. Take a backbone that keeps them, or another "
            "module."
        )


def _check_stats(policy: PolicySpec, stats: PolicyStats | None) -> None:
    if stats is None:
        return
    parts = (
        ("state", stats.state, policy.observation.state_dim, policy.state_normalization),
        ("action", stats.action, policy.action.dim, policy.action.normalization),
    )
    for name, each, width, mode in parts:
        if mode != "identity" and each is None and width:
            raise SpecError(
                f"statistics from {stats.source}: there are none of the {name}, whose normalization is {mode!r}. Give "
                f"some, or take 'identity' for the {name}."
            )
        if mode != "identity" and each is not None and each.mean.shape != (width,):
            raise SpecError(
                f"statistics from {stats.source}: {name} is {each.mean.shape[0]} wide, the policy's is {width}. "
                "Use statistics of a dataset that fits the policy."
            )


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
