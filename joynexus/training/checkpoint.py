"""Checkpoint folders: safetensors and JSON, checked by hash, written so that a crash leaves the old or the new one.

A folder holds ``<name>.safetensors`` files and ``state.json``, which names each file's SHA-256 and ends with a hash of
itself. It is written under a temporary name, synced, and renamed. Nothing in it is code: never pickle.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from joynexus.errors import CheckpointError
from joynexus.training.json_values import JsonObject

STATE = "state.json"
TEMPORARY = ".writing-"
"""Prefix of folders that are not complete; a crash may leave one, which :func:`remove_leftovers` takes away."""

_OBJECT = TypeAdapter(dict[str, Any])

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by the name of the file without its ending."""


def write_checkpoint(folder: Path, tensors: Tensors, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint, durable when this returns.

    Args:
        folder: Its place; a complete checkpoint there is replaced.
        tensors: For each file, its tensors; copied to host memory.
        state: Everything else; finite numbers only.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the disk refuses; what was there before is still there.
    """
    temporary = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        hashes: JsonObject = {}
        for name, named in tensors.items():
            content = safetensors.torch.save(host_copies(named))
            hashes[f"{name}.safetensors"] = hashlib.sha256(content).hexdigest()
            _write_synced(temporary / f"{name}.safetensors", content)
        _write_synced(temporary / STATE, _seal({**state, "sha256": hashes}))
        _sync(temporary)
        _put_in_place(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{folder}: cannot be written: {error}. Free space or correct the storage.") from error
    return folder


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory; each has its own, as safetensors wants it."""
    return {name: each.detach().cpu().contiguous().clone() for name, each in tensors.items()}


def read_checkpoint(folder: Path) -> tuple[dict[str, dict[str, Tensor]], JsonObject]:
    """Read a checkpoint, whole or not at all.

    Args:
        folder: As :func:`write_checkpoint` left it.

    Returns:
        Its tensors by file and name, on the CPU, and its state.

    Raises:
        CheckpointError: If a file is missing or damaged, naming it.
    """
    state = _unseal(folder / STATE)
    hashes: JsonObject = state.pop("sha256", {})
    if not hashes or any(Path(name).name != name for name in hashes):
        raise _damaged(folder / STATE, "it does not name its files")
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, expected in hashes.items():
        content = _read(folder / name)
        if hashlib.sha256(content).hexdigest() != expected:
            raise _damaged(folder / name, "its SHA-256 is not the one in state.json")
        try:
            tensors[name.removesuffix(".safetensors")] = safetensors.torch.load(content)
        except SafetensorError as error:
            raise _damaged(folder / name, str(error)) from error
    return tensors, state


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that a reader finds whole, old or new.

    Raises:
        CheckpointError: If the disk refuses.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(temporary, content)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error}. Free space or correct the storage.") from error


def remove_leftovers(parent: Path) -> None:
    """Take away the incomplete folders that a crash left."""
    for leftover in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _put_in_place(temporary: Path, folder: Path) -> None:
    if folder.exists():
        if not (folder / STATE).is_file():
            raise FileExistsError(f"{folder} exists and is no checkpoint")
        replaced = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex}"
        folder.rename(replaced)
        temporary.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        temporary.rename(folder)
    _sync(folder.parent)


def _seal(state: Mapping[str, Any]) -> bytes:
    return json.dumps({**state, "checksum": _checksum(state)}, indent=1).encode()


def _unseal(path: Path) -> JsonObject:
    try:
        state = _OBJECT.validate_json(_read(path))
    except ValidationError as error:
        raise _damaged(path, "it is not a JSON object") from error
    checksum = state.pop("checksum", None)
    if _checksum(state) != checksum:
        raise _damaged(path, "its content does not match its checksum")
    return state


def _checksum(state: Mapping[str, Any]) -> str:
    content = json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(path, f"it can't be read ({error.strerror})") from error


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged or missing: {reason}. Take an older checkpoint.")
