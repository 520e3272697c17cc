"""Normalisation statistics as JSON, exact to the bit: a float32 is a double, and a double survives its text."""

from typing import cast

import numpy as np
from pydantic import JsonValue

from joynexus.types import Array, NormalizationStats, PolicyStats

_VECTORS = ("mean", "std", "minimum", "maximum", "q01", "q99")


def stats_to_json(stats: PolicyStats | None) -> JsonValue:
    """Describe statistics as plain values; None stays None."""
    if stats is None:
        return None
    return {"state": _to_json(stats.state), "action": _to_json(stats.action), "source": stats.source}


def stats_from_json(value: JsonValue) -> PolicyStats | None:
    """Read what :func:`stats_to_json` wrote.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a value has another type.
    """
    if value is None:
        return None
    fields = cast("dict[str, JsonValue]", value)
    return PolicyStats(
        state=_from_json(fields["state"]), action=_from_json(fields["action"]), source=str(fields["source"])
    )


def _to_json(stats: NormalizationStats | None) -> JsonValue:
    if stats is None:
        return None
    vectors: dict[str, JsonValue] = {name: [float(each) for each in getattr(stats, name)] for name in _VECTORS}
    return {**vectors, "count": stats.count}


def _from_json(value: JsonValue) -> NormalizationStats | None:
    if value is None:
        return None
    fields = cast("dict[str, JsonValue]", value)
    vectors: dict[str, Array] = {name: np.array(fields[name], dtype=np.float32) for name in _VECTORS}
    return NormalizationStats(**vectors, count=int(cast("int", fields["count"])))
