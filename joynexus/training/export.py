"""A policy to take away: module, spec and statistics, in formats that run no code when they are read.

module.safetensors   the action module's tensors, and nobody else's
stats.json           normalisation statistics; ``null`` where there are none
policy.json          spec, version, seed, and the SHA-256 of the other two
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError

from joynexus.data.normalization import policy_stats_from_json, policy_stats_to_json
from joynexus.errors import CheckpointError
from joynexus.specs.tenant import PolicySpec
from joynexus.training.checkpoint import replace_file
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
    tensors = {name: torch.from_numpy(value.copy()) for name, value in snapshot.parameters.items()}
    contents = {
        MODULE: safetensors.torch.save(tensors),
        STATS: json.dumps(None if snapshot.stats is None else policy_stats_to_json(snapshot.stats), indent=1).encode(),
    }
    manifest: JsonObject = {
        "format": FORMAT,
        "tenant": snapshot.tenant,
        "version": snapshot.version,
        "seed": snapshot.seed,
        "signature": signature,
        "policy": snapshot.policy.model_dump(mode="json"),
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    for name, content in contents.items():
        replace_file(folder / name, content)
    replace_file(folder / POLICY, json.dumps(manifest, indent=1).encode())
    return folder


def read_export(folder: Path) -> PolicySnapshot:
    """Read what :func:`write_export` wrote.

    Args:
        folder: The export.

    Returns:
        The policy version.

    Raises:
        CheckpointError: If a file is missing or damaged, naming it.
    """
    try:
        manifest = _OBJECT.validate_json((folder / POLICY).read_bytes())
        contents = {name: (folder / name).read_bytes() for name in (MODULE, STATS)}
        for name, content in contents.items():
            if object_in(manifest, "sha256").get(name) != hashlib.sha256(content).hexdigest():
                raise CheckpointError(f"{folder / name}: its SHA-256 is not the one in {POLICY}. Export it again.")
        tensors = safetensors.torch.load(contents[MODULE])
        return PolicySnapshot(
            tenant=str(manifest["tenant"]),
            version=integer_in(manifest, "version"),
            policy=PolicySpec.model_validate(manifest["policy"]),
            parameters={name: each.numpy() for name, each in tensors.items()},
            stats=_stats(json.loads(contents[STATS])),
            seed=integer_in(manifest, "seed"),
        )
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: is no export, or is damaged: {error}. Export it again.") from error


def _stats(encoded: Any) -> PolicyStats | None:  # noqa: ANN401  # what a JSON file holds
    return None if encoded is None else policy_stats_from_json(encoded)
