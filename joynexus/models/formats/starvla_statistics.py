"""StarVLA's ``dataset_statistics.json``: by robot, the statistics of action and state, with a mask.

A dimension whose mask is false is left as it is; it gets statistics that leave it so in every mode.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from joynexus.errors import CheckpointError
from joynexus.models.formats.imported import some_of
from joynexus.models.formats.lerobot_processors import NEUTRAL, STATISTICS, read_json
from joynexus.types import Array, NormalizationStats, PolicyStats


def read_statistics(path: Path, robot: str | None) -> tuple[str | None, PolicyStats | None]:
    """Read one robot's statistics.

    Args:
        path: The file; a run may lack it.
        robot: Its key; None takes the only one.

    Returns:
        The robot and its statistics; None where the file is missing.

    Raises:
        CheckpointError: If the file is damaged, has no such robot, or has several and none is named.
    """
    if not path.is_file():
        return None, None
    content = read_json(path)
    if robot is None and len(content) != 1:
        names = some_of(sorted(content))
        raise CheckpointError(f"{path}: statistics of {len(content)} robots: {names}. Name one with --robot.")
    name = next(iter(content)) if robot is None else robot
    entry: object = content.get(name)
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: no statistics of robot {name!r}. Known: {some_of(sorted(content))}.")
    parts = cast("dict[str, Any]", entry)
    count = parts.get("num_transitions")
    found = {
        each: _stats(path, f"{name}.{each}", parts[each], count if isinstance(count, int) else 0)
        for each in ("state", "action")
        if parts.get(each)
    }
    return name, PolicyStats(state=found.get("state"), action=found.get("action"), source=str(path))


def write_statistics(content: dict[str, Any], robot: str, stats: PolicyStats) -> dict[str, Any]:
    """Put statistics into the content of a file, as far as the dimensions are not masked."""
    entry = dict(content[robot])
    for each, values in (("state", stats.state), ("action", stats.action)):
        if values is not None and entry.get(each):
            entry[each] = _replaced(entry[each], values)
    return {**content, robot: entry}


def _replaced(part: Mapping[str, Any], stats: NormalizationStats) -> dict[str, Any]:
    replaced = dict(part)
    mask = np.asarray(part.get("mask", [True] * len(stats.mean)), dtype=np.bool_)
    for ours, theirs in STATISTICS.items():
        if theirs in part:
            kept = np.asarray(part[theirs], dtype=np.float64)
            replaced[theirs] = np.where(mask, getattr(stats, ours).astype(np.float64), kept).tolist()
    return replaced


def _stats(path: Path, name: str, part: Mapping[str, Any], count: int) -> NormalizationStats:
    try:
        vectors: dict[str, Array] = {
            ours: np.asarray(part[theirs], dtype=np.float32) for ours, theirs in STATISTICS.items() if theirs in part
        }
        mask = np.asarray(part["mask"], dtype=np.bool_) if "mask" in part else None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name}: need lists of numbers: {error}. Copy it again.") from error
    shapes = {each.shape for each in (*vectors.values(), *([] if mask is None else [mask]))}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        raise CheckpointError(f"{path}: {name}: its lists differ in length. Copy it again.")
    used = np.ones(shape, dtype=np.bool_) if mask is None else mask
    filled = {
        ours: np.where(used, vectors.get(ours, np.full(shape, neutral)), neutral).astype(np.float32)
        for ours, neutral in NEUTRAL.items()
    }
    return NormalizationStats(**filled, count=count)
