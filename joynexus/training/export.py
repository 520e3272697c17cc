"""A policy to take away: module, spec and statistics, in formats that run no code when they are read.

module.safetensors   the action module's tensors, and nobody else's
stats.json           normalisation statistics; ``null`` where there are none
policy.json          spec, version, seed, and the SHA-256 of the other two
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from joynexus.data.normalization import policy_stats_from_json, policy_stats_to_json
from joynexus.errors import CheckpointError
from joynexus.models.formats.streaming import TensorFile, TensorSource, array_source, file_sha256, write_tensors
from joynexus.specs.tenant import PolicySpec
from joynexus.training.checkpoint import TEMPORARY, replace_file
from joynexus.training.json_values import JsonObject, integer_in, object_in
from joynexus.types import PolicySnapshot, PolicyStats

FORMAT = "joynexus-policy/1"
MODULE, STATS, POLICY = "module.safetensors", "stats.json", "policy.json"

_OBJECT = TypeAdapter(dict[str, Any])


def write_export(folder: Path, snapshot: PolicySnapshot, *, signature: str) -> Path:
    """Write one policy version.

    Args:
        folder: Where to; other files in it stay.
        snapshot: What to write.
        signature: Schema signature that it was trained under: the features that it expects.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the disk refuses.
    """
    sources = {name: array_source(each) for name, each in snapshot.parameters.items()}
    about: JsonObject = {
        "tenant": snapshot.tenant,
        "version": snapshot.version,
        "seed": snapshot.seed,
        "signature": signature,
    }
    return write_policy(folder, sources, policy=snapshot.policy, stats=snapshot.stats, about=about)


def write_policy(
    folder: Path,
    sources: Mapping[str, TensorSource],
    *,
    policy: PolicySpec,
    stats: PolicyStats | None,
    about: JsonObject,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write an export, its tensors one by one.

    Args:
        folder: Where to; other files in it stay.
        sources: The module's tensors by parameter name, in float32.
        policy: What they belong to.
        stats: Its statistics.
        about: ``tenant``, ``version``, ``seed`` and ``signature``.
        progress: Called with the number of bytes of each block that was written.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the disk refuses.
    """
    statistics = json.dumps(None if stats is None else policy_stats_to_json(stats), indent=1).encode()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{TEMPORARY}{MODULE}-{uuid.uuid4().hex}"
    try:
        digest = write_tensors(unfinished, sources, progress=progress)
        unfinished.replace(folder / MODULE)
    finally:
        unfinished.unlink(missing_ok=True)
    manifest: JsonObject = {
        "format": FORMAT,
        **about,
        "policy": policy.model_dump(mode="json"),
        "sha256": {MODULE: digest, STATS: hashlib.sha256(statistics).hexdigest()},
    }
    replace_file(folder / STATS, statistics)
    replace_file(folder / POLICY, json.dumps(manifest, indent=1).encode())
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """An export whose files have been checked; its tensors are read when they are asked for."""

    folder: Path
    about: JsonObject
    """``tenant``, ``version``, ``seed`` and ``signature``."""
    policy: PolicySpec
    stats: PolicyStats | None
    tensors: TensorFile

    def module_state(self) -> dict[str, Tensor]:
        """Read all tensors."""
        return {name: self.tensors.tensor(name) for name in self.tensors.infos}


def open_export(folder: Path) -> Export:
    """Open and check what :func:`write_export` wrote.

    Args:
        folder: The export.

    Returns:
        The policy, without its tensors.

    Raises:
        CheckpointError: If a file is missing or damaged, naming it.
    """
    try:
        manifest = _OBJECT.validate_json((folder / POLICY).read_bytes())
        hashes = object_in(manifest, "sha256")
        for name in (MODULE, STATS):
            if hashes.get(name) != file_sha256(folder / name):
                raise CheckpointError(f"{folder / name}: its SHA-256 is not the one in {POLICY}. Export it again.")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder / POLICY}: format {manifest['format']!r}, need {FORMAT!r}.")
        return Export(
            folder=folder,
            about={
                "tenant": str(manifest["tenant"]),
                "version": integer_in(manifest, "version"),
                "seed": integer_in(manifest, "seed"),
                "signature": str(manifest["signature"]),
            },
            policy=PolicySpec.model_validate(manifest["policy"]),
            stats=_stats(json.loads((folder / STATS).read_bytes())),
            tensors=TensorFile(folder / MODULE),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: is no export, or is damaged: {error}. Export it again.") from error


def read_export(folder: Path) -> PolicySnapshot:
    """Read what :func:`write_export` wrote, with its tensors.

    Raises:
        CheckpointError: As :func:`open_export`.
    """
    found = open_export(folder)
    return PolicySnapshot(
        tenant=found.about["tenant"],
        version=found.about["version"],
        policy=found.policy,
        parameters={name: each.numpy() for name, each in found.module_state().items()},
        stats=found.stats,
        seed=found.about["seed"],
    )


def _stats(encoded: Any) -> PolicyStats | None:  # noqa: ANN401  # what a JSON file holds
    return None if encoded is None else policy_stats_from_json(encoded)
