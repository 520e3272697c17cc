"""Plain values that go into JSON, and normalisation statistics among them.

Statistics are exact to the bit: a float32 is a double, and a double survives its text.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from joynexus.types import Array, NormalizationStats, PolicyStats

JsonObject = dict[str, Any]
"""What a JSON object becomes: strings, finite numbers, booleans, None, lists and objects of such."""

_VECTORS = ("mean", "std", "minimum", "maximum", "q01", "q99")


def stats_to_json(stats: PolicyStats | None) -> JsonObject | None:
    """Describe statistics as plain values; None stays None."""
    if stats is None:
        return None
    return {"state": _to_json(stats.state), "action": _to_json(stats.action), "source": stats.source}


def stats_from_json(value: Mapping[str, Any] | None) -> PolicyStats | None:
    """Read what :func:`stats_to_json` wrote.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a value has another type.
    """
    if value is None:
        return None
    return PolicyStats(
        state=_from_json(value["state"]), action=_from_json(value["action"]), source=str(value["source"])
    )


def object_in(values: Mapping[str, Any], name: str) -> JsonObject:
    """Read an object.

    Raises:
        TypeError: If it is missing or something else.
    """
    value = values.get(name)
    if not isinstance(value, dict):
        raise TypeError(f"{name!r} is {value!r}, need an object")
    return value  # pyright: ignore[reportUnknownVariableType]  # keys of JSON are strings


def integer_in(values: Mapping[str, Any], name: str) -> int:
    """Read a whole number.

    Raises:
        TypeError: If it is missing or something else.
    """
    value = values.get(name)
    if not isinstance(value, int):
        raise TypeError(f"{name!r} is {value!r}, need a whole number")
    return value


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """Read a number; None where there is none."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def numbers_in(values: Mapping[str, Any], name: str) -> dict[str, float]:
    """Read numbers by name."""
    return {key: float(each) for key, each in object_in(values, name).items() if isinstance(each, int | float)}


def _to_json(stats: NormalizationStats | None) -> JsonObject | None:
    if stats is None:
        return None
    vectors = {name: [float(each) for each in getattr(stats, name)] for name in _VECTORS}
    return {**vectors, "count": stats.count}


def _from_json(value: Mapping[str, Any] | None) -> NormalizationStats | None:
    if value is None:
        return None
    vectors: dict[str, Array] = {name: np.array(value[name], dtype=np.float32) for name in _VECTORS}
    return NormalizationStats(**vectors, count=integer_in(value, "count"))
