"""From a trained module and an imported folder back to the other project's checkpoint.

The header of the checkpoint is written again as it was, and behind it each tensor from its place: what the tenant
trained from the export, in the checkpoint's own type, everything else from where the import has put it. Files other
than the weights are the checkpoint's own; statistics are the policy's.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from joynexus.data.normalization import stats_digest
from joynexus.errors import CheckpointError
from joynexus.models.formats.imported import Place, describe_misfit
from joynexus.models.formats.lerobot_processors import read_json
from joynexus.models.formats.lerobot_stats import write_lerobot_stats
from joynexus.models.formats.starvla import STATISTICS
from joynexus.models.formats.starvla_statistics import read_statistics, write_statistics
from joynexus.models.formats.streaming import (
    TensorFile,
    TensorInfo,
    TensorSource,
    read_header,
    tensor_source,
    write_tensors,
)
from joynexus.training import take_apart as parts
from joynexus.training.checkpoint import TEMPORARY
from joynexus.training.export import Export, open_export
from joynexus.types import PolicyStats

ADAPTER = "adapter."


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """What an import has kept of a checkpoint."""

    folder: Path
    """Of the import."""
    project: str
    family: str
    layout: Mapping[str, Any]
    places: Mapping[str, Place]
    header: bytes
    infos: Mapping[str, TensorInfo]
    """By name, in the order of their bytes in the checkpoint."""


def put_together(
    export: Path,
    folder: Path,
    *,
    project: str,
    imported: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Original:
    """Write a policy as a checkpoint of the project that it came from.

    Args:
        export: In joynexus' own format.
        folder: Where to; must not exist.
        project: ``lerobot`` or ``starvla``.
        imported: Folder of the import; None finds it by the policy's ``init_from``, or beside the export.
        progress: Called with the number of bytes of each block of tensors that was written.

    Returns:
        What it was put together with.

    Raises:
        CheckpointError: If the policy is no continuation of an imported one, or the disk refuses; nothing is left.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already. Name a new folder.")
    policy = open_export(export)
    original = read_original(_find(policy, imported))
    if original.project != project:
        raise CheckpointError(
            f"{export}: its policy came from a {original.project} checkpoint ({original.family}). "
            f"Export it with --format {original.project}."
        )
    sources = _sources(policy, original)
    temporary = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex}"
    try:
        shutil.copytree(original.folder / parts.ORIGINAL / parts.FILES, temporary)
        weights = temporary / str(original.layout["weights"])
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(weights, sources, header=original.header, progress=progress)
        if policy.stats is not None:
            _write_stats(temporary, original, policy.stats)
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}. Free space or correct the storage.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return original


def read_original(folder: Path) -> Original:
    """Read what :func:`joynexus.training.take_apart.take_apart` has kept.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    kept = folder / parts.ORIGINAL
    manifest = read_json(kept / parts.MANIFEST)
    try:
        if manifest["format"] != parts.FORMAT:
            raise CheckpointError(f"{kept / parts.MANIFEST}: format {manifest['format']!r}, need {parts.FORMAT!r}.")
        header = (kept / parts.HEADER).read_bytes()
        infos, _, _ = read_header(kept / parts.HEADER, header)
        places = {name: Place(part=part, name=inner) for name, (part, inner) in manifest["places"].items()}
        if set(places) != set(infos):
            raise CheckpointError(f"{kept / parts.MANIFEST}: does not fit {parts.HEADER}. Import it again.")
        return Original(
            folder=folder,
            project=str(manifest["project"]),
            family=str(manifest["family"]),
            layout=cast("dict[str, Any]", manifest["layout"]),
            places=places,
            header=header,
            infos=infos,
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{kept}: is damaged: {error!r}. Import the checkpoint again.") from error


def _find(policy: Export, imported: Path | None) -> Path:
    """Find the import that a policy came from."""
    looked = [imported] if imported is not None else [policy.folder.parent]
    if imported is None and policy.policy.init_from is not None:
        looked.insert(0, Path(policy.policy.init_from).parent)
    for folder in looked:
        if (folder / parts.ORIGINAL / parts.MANIFEST).is_file():
            return folder
    where = " nor ".join(str(each / parts.ORIGINAL) for each in looked)
    raise CheckpointError(
        f"{policy.folder}: its policy came from no import: no {where}. Name the folder with --import, "
        "or export it with --format joynexus."
    )


def _sources(policy: Export, original: Original) -> dict[str, TensorSource]:
    """Return every tensor of the checkpoint, in the order of its bytes."""
    _check_module(policy, original)
    files = {
        "backbone": TensorFile(original.folder / parts.BACKBONE / parts.MODEL),
        "kept": TensorFile(original.folder / parts.ORIGINAL / parts.KEPT),
    }
    sources: dict[str, TensorSource] = {}
    for name, info in original.infos.items():
        place = original.places[name]
        if place.part == "policy":
            sources[name] = _converted(policy.tensors, place.name, info)
        elif files[place.part].infos.get(place.name) == info:
            sources[name] = files[place.part].source(place.name)
        else:
            raise CheckpointError(
                f"{files[place.part].path}: lacks {place.name!r} as it was imported. Import it again."
            )
    return sources


def _check_module(policy: Export, original: Original) -> None:
    expected = {place.name: original.infos[name].shape for name, place in original.places.items() if _is_own(place)}
    found = {name: each.shape for name, each in policy.tensors.infos.items()}
    if any(name.startswith(ADAPTER) for name in found):
        raise CheckpointError(
            f"{policy.folder}: its policy has a LoRA adapter, which a {original.project} checkpoint can't hold. "
            "Export it with --format peft, or with --format joynexus."
        )
    problems = describe_misfit(expected, found, name={})
    if problems:
        raise CheckpointError(
            f"{policy.folder}: its module is not that of {original.folder} ({original.family}): {'; '.join(problems)}. "
            "Name the import that it came from with --import."
        )


def _is_own(place: Place) -> bool:
    return place.part == "policy"


def _converted(tensors: TensorFile, name: str, info: TensorInfo) -> TensorSource:
    if tensors.infos[name].dtype == info.dtype:
        return tensors.source(name)
    return TensorSource(info=info, blocks=lambda: tensor_source(tensors.tensor(name), info.dtype).blocks())


def _write_stats(folder: Path, original: Original, stats: PolicyStats) -> None:
    """Put the policy's statistics into the files, where they are not there already."""
    if original.project == "lerobot":
        write_lerobot_stats(folder, stats)
        return
    path, robot = folder / STATISTICS, original.layout.get("robot")
    if robot is None:
        return
    _, known = read_statistics(path, str(robot))
    if known is None or stats_digest(known) != stats_digest(stats):
        content = write_statistics(read_json(path), str(robot), stats)
        path.write_text(json.dumps(content, indent=1))
