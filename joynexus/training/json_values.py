"""Reading plain values out of JSON objects, each with the type that it must have."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""What a JSON object becomes: strings, finite numbers, booleans, None, lists and objects of such."""


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
