"""From another project's checkpoint to a folder that a tenant can start from.

    backbone/      configuration, tokenizer and frozen tensors, as transformers lays them out: a backbone's ``path``
    policy/        module.safetensors, stats.json, policy.json: a policy's ``init_from``
    original/      what it takes to put the checkpoint together again: its header, its files, tensors nobody uses
    service.yaml   a service with that backbone
    tenant.yaml    a tenant with that policy, without workloads

The folder is written under a temporary name and renamed; tensors go from file to file in small blocks.
"""

import json
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.expected import check_tensors
from joynexus.models.formats.imported import ImportedPolicy, Part
from joynexus.models.formats.streaming import TensorSource, write_tensors
from joynexus.scheduling.admission import ServiceState, admit
from joynexus.scheduling.plan import compile_plan
from joynexus.specs.documents import write_documents
from joynexus.specs.loading import load_service, load_tenant
from joynexus.specs.service import QuotaSpec, ServiceSpec, TrainingSpec
from joynexus.specs.tenant import PolicySpec, TenantSpec
from joynexus.training.checkpoint import TEMPORARY, replace_file
from joynexus.training.export import write_policy
from joynexus.training.json_values import JsonObject

FORMAT = "joynexus-original/1"
BACKBONE, POLICY, ORIGINAL = "backbone", "policy", "original"
MANIFEST, HEADER, KEPT, FILES = "manifest.json", "header.bin", "kept.safetensors", "files"
MODEL = "model.safetensors"
SERVICE_FILE, TENANT_FILE = "service.yaml", "tenant.yaml"
HEADROOM = 2 << 30
"""Bytes on the device beside backbone and one slot: prefix store, activations."""
EMPTY_CAMERA = re.compile(r"^empty_camera_\d+$")

HEAD_OF_SERVICE = "# A service with the frozen model of the checkpoint {source}.\n"
HEAD_OF_TENANT = """\
# Goes on from the checkpoint {source}: version 0 is its module, with its statistics.
# Without workloads the tenant is driven through the Python API. To fine-tune it on demonstrations, add for example:
#
# workloads:
#   - type: sft
#     dataset: {{type: maniskill_h5, path: demos/trajectory.h5}}
#     num_steps: 1000
#     batch_size: 8
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenApart:
    """What was written."""

    folder: Path
    family: str
    tensors: Mapping[str, int]
    """Number of tensors by part."""
    parameters: Mapping[str, int]
    """Numbers in them by part."""
    has_stats: bool
    notes: tuple[str, ...]
    """What a person has to check."""


def take_apart(
    imported: ImportedPolicy,
    folder: Path,
    *,
    name: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> TakenApart:
    """Check a checkpoint and write its parts.

    Args:
        imported: Opened.
        folder: Where to; must not exist.
        name: Of the tenant; None makes one of the checkpoint's folder.
        progress: Called with the number of bytes of each block of tensors that was written.

    Returns:
        What was written.

    Raises:
        CheckpointError: If tensors are missing, unknown or of another shape, or the disk refuses; nothing is left.
        SpecError: If the policy can't be used here.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already. Name a new folder.")
    check_tensors(imported)
    source = imported.tensors.path.parent.resolve()
    tenant = name or _name(source.name if imported.project == "lerobot" else source.parent.name)
    policy, notes = _without_empty_cameras(imported)
    backbone = _name(str(imported.backbone["type"]))
    temporary = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        _write_backbone(temporary / BACKBONE, imported, progress)
        _write_original(temporary / ORIGINAL, imported, progress)
        write_policy(
            temporary / POLICY,
            imported.sources("policy"),
            policy=PolicySpec.model_validate({"backbone": backbone, **policy}),
            stats=imported.stats,
            about={"tenant": tenant, "version": 0, "seed": 0, "signature": ""},
            progress=progress,
        )
        _write_specs(temporary, imported, policy, source=source, tenant=tenant, backbone=backbone)
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}. Free space or correct the storage.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return TakenApart(
        folder=folder,
        family=imported.family,
        tensors={part: len(imported.names(part)) for part in ("backbone", "policy", "kept")},
        parameters={part: _numbers(imported, part) for part in ("backbone", "policy", "kept")},
        has_stats=imported.stats is not None,
        notes=(*imported.notes, *notes),
    )


def _write_backbone(folder: Path, imported: ImportedPolicy, progress: Callable[[int], None] | None) -> None:
    folder.mkdir()
    for file in imported.vlm_files:
        shutil.copyfile(file, folder / file.name)
    replace_file(folder / "config.json", json.dumps(imported.vlm_config, indent=1).encode())
    _write_part(folder / MODEL, imported.sources("backbone"), progress)


def _write_original(folder: Path, imported: ImportedPolicy, progress: Callable[[int], None] | None) -> None:
    for name, file in imported.original_files.items():
        target = folder / FILES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    _write_part(folder / KEPT, imported.sources("kept"), progress)
    replace_file(folder / HEADER, imported.tensors.header)
    manifest: JsonObject = {
        "format": FORMAT,
        "project": imported.project,
        "family": imported.family,
        "layout": dict(imported.layout),
        "places": {name: [place.part, place.name] for name, place in imported.places.items()},
    }
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _write_part(path: Path, sources: Mapping[str, TensorSource], progress: Callable[[int], None] | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, sources, metadata={"format": "pt"}, progress=progress)


def _without_empty_cameras(imported: ImportedPolicy) -> tuple[dict[str, Any], list[str]]:
    """Leave out cameras that LeRobot fills with masked blanks: they change no number unless tokens frame them."""
    seen = imported.policy["observation"]
    kept = [each for each in seen["cameras"] if not EMPTY_CAMERA.match(each)]
    empty = [each for each in seen["cameras"] if each not in kept]
    if not empty:
        return dict(imported.policy), []
    if imported.backbone.get("image_special_tokens"):
        return dict(imported.policy), [f"policy.observation.cameras: {empty} are to be masked in every observation"]
    policy = {**imported.policy, "observation": {**seen, "cameras": kept}}
    return policy, [f"policy.observation.cameras: {empty}, which the checkpoint fills with masked blanks, are left out"]


def _write_specs(
    folder: Path, imported: ImportedPolicy, policy: Mapping[str, Any], *, source: Path, tenant: str, backbone: str
) -> None:
    """Write both YAML files, and check that the tenant fits the service."""
    service: JsonObject = {"backbones": {backbone: {**imported.backbone, "path": f"./{BACKBONE}"}}}
    written: JsonObject = {"tenant": tenant, "policy": {"backbone": backbone, "init_from": f"./{POLICY}", **policy}}
    service |= _room(TenantSpec.model_validate(written), imported, backbone)
    for file, head, document in (
        (SERVICE_FILE, HEAD_OF_SERVICE, service),
        (TENANT_FILE, HEAD_OF_TENANT, written),
    ):
        replace_file(folder / file, (head.format(source=source) + write_documents([document])).encode())
    loaded = load_service(folder / SERVICE_FILE)
    admit(compile_plan(load_tenant(folder / TENANT_FILE), loaded), ServiceState(service=loaded))


def _room(tenant: TenantSpec, imported: ImportedPolicy, backbone: str) -> JsonObject:
    """Raise the limits that the tenant or its backbone would not fit into."""
    spec = imported.backbone_spec(BACKBONE)
    plan = compile_plan(tenant, ServiceSpec(backbones={backbone: spec}, quotas=QuotaSpec(max_module_bytes=sys.maxsize)))
    device = _gibibytes(max(spec.parameter_bytes(), _stored_bytes(imported)) + plan.memory.total + HEADROOM)
    quota = _gibibytes(plan.memory.module)
    raised: JsonObject = {}
    if device > TrainingSpec().device_bytes:
        raised["training"] = {"device_bytes": device}
    if quota > QuotaSpec().max_module_bytes:
        raised["quotas"] = {"max_module_bytes": quota}
    return raised


def _stored_bytes(imported: ImportedPolicy) -> int:
    """Bytes of the frozen model in the type that it will have in memory."""
    return _numbers(imported, "backbone") * (2 if imported.backbone["dtype"] == "bfloat16" else 4)


def _numbers(imported: ImportedPolicy, part: Part) -> int:
    infos = imported.tensors.infos
    return sum(infos[original].num_elements for original in imported.names(part).values())


def _gibibytes(nbytes: int) -> int:
    return -(-nbytes // (1 << 30)) << 30


def _name(text: str) -> str:
    """Make a name of a folder's."""
    found = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("_-")[:63].strip("_-")
    if not found:
        raise SpecError(f"{text!r}: no name can be made of it. Give --name.")
    return found
