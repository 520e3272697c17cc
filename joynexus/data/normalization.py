"""Statistics of states and actions, exact over all frames, and their exact way into JSON and back.

Nothing is sampled, merged from parts or estimated: means are summed in float64 and quantiles are taken over all
frames at once, since a weighted mean of per-episode quantiles is no quantile of the whole.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float32

from joynexus.errors import DatasetError
from joynexus.types import Array, NormalizationStats, PolicyStats

STATS_FILE = "stats.json"
"""Name of the statistics in an exported policy."""
_VECTORS = ("mean", "std", "minimum", "maximum", "q01", "q99")


def compute_stats(frames: Float32[Array, "n d"]) -> NormalizationStats:
    """Compute per-dimension statistics over all frames.

    Args:
        frames: Raw states or actions, every frame of the dataset once.

    Returns:
        Mean, population standard deviation, extremes, and the 1 % and 99 % quantiles (linear interpolation, as
        ``numpy.quantile``).

    Raises:
        DatasetError: If there is no frame, or one holds NaN or infinity.
    """
    if len(frames) == 0:
        raise DatasetError("statistics: there are no frames. Give a dataset with at least one episode.")
    if not np.isfinite(frames).all():
        row, column = (int(each) for each in np.argwhere(~np.isfinite(frames))[0])
        raise DatasetError(
            f"statistics: frame {row}, dimension {column} is {float(frames[row, column])}. Repair or drop its episode."
        )
    exact = frames.astype(np.float64)
    q01, q99 = np.quantile(exact, (0.01, 0.99), axis=0)
    return NormalizationStats(
        mean=exact.mean(axis=0).astype(np.float32),
        std=exact.std(axis=0).astype(np.float32),
        minimum=frames.min(axis=0),
        maximum=frames.max(axis=0),
        q01=q01.astype(np.float32),
        q99=q99.astype(np.float32),
        count=len(frames),
    )


def stats_to_json(stats: NormalizationStats) -> dict[str, Any]:
    """Turn statistics into JSON values; every float32 survives the way back bit for bit."""
    encoded: dict[str, Any] = {name: [float(x) for x in getattr(stats, name)] for name in _VECTORS}
    encoded["count"] = stats.count
    return encoded


def stats_from_json(encoded: Mapping[str, object]) -> NormalizationStats:
    """Rebuild what :func:`stats_to_json` wrote.

    Raises:
        DatasetError: If a field is missing, is no list of numbers, or differs in length from the others.
    """
    vectors = {name: _vector(encoded, name) for name in _VECTORS}
    count = encoded.get("count")
    if not isinstance(count, int) or isinstance(count, bool):
        raise DatasetError(f"statistics: 'count' is {count!r}, not a whole number. Compute the statistics again.")
    lengths = {name: len(vector) for name, vector in vectors.items()}
    if len(set(lengths.values())) != 1:
        raise DatasetError(f"statistics: fields differ in length: {lengths}. Compute the statistics again.")
    return NormalizationStats(**vectors, count=count)


def policy_stats_to_json(stats: PolicyStats) -> dict[str, Any]:
    """Turn a policy's statistics into JSON values."""
    return {
        "state": None if stats.state is None else stats_to_json(stats.state),
        "action": None if stats.action is None else stats_to_json(stats.action),
        "source": stats.source,
    }


def policy_stats_from_json(encoded: Mapping[str, object]) -> PolicyStats:
    """Rebuild what :func:`policy_stats_to_json` wrote.

    Raises:
        DatasetError: If a part is malformed.
    """
    parts: dict[str, NormalizationStats | None] = {}
    for name in ("state", "action"):
        part = encoded.get(name)
        if part is not None and not isinstance(part, dict):
            raise DatasetError(f"statistics: {name!r} is {part!r}, not an object. Compute the statistics again.")
        parts[name] = None if part is None else stats_from_json(cast("dict[str, object]", part))
    return PolicyStats(state=parts["state"], action=parts["action"], source=str(encoded.get("source", "")))


def read_policy_stats(folder: Path) -> PolicyStats | None:
    """Read the statistics of an exported policy.

    Args:
        folder: The export.

    Returns:
        The statistics; None where the policy has none.

    Raises:
        DatasetError: If the file is missing or malformed, naming it.
    """
    path = folder / STATS_FILE
    try:
        encoded: object = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(f"statistics {path}: can't be read: {error}. Export the policy again.") from error
    if encoded is None:
        return None
    if not isinstance(encoded, dict):
        raise DatasetError(f"statistics {path}: hold {type(encoded).__name__}, not an object. Export the policy again.")
    return policy_stats_from_json(cast("dict[str, object]", encoded))


def stats_digest(stats: PolicyStats) -> str:
    """Return the SHA-256 of a policy's statistics: equal digests normalise alike. ``source`` does not enter."""
    encoded = policy_stats_to_json(stats)
    del encoded["source"]
    return hashlib.sha256(json.dumps(encoded, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _vector(encoded: Mapping[str, object], name: str) -> Float32[Array, " d"]:
    values = encoded.get(name)
    if not isinstance(values, list) or not all(isinstance(x, int | float) for x in cast("list[object]", values)):
        raise DatasetError(f"statistics: {name!r} is {values!r}, not a list of numbers. Compute the statistics again.")
    return np.asarray(cast("list[float]", values), dtype=np.float32)
