"""The counts of engines as plain values: added up, subtracted, and told by tenant. Without torch and numpy."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

SUMMED = (
    "busy_seconds",
    "wall_seconds",
    "capacity_seconds",
    "encoded",
    "reused",
    "carried",
    "num_groups",
    "device_seconds",
    "samples",
    "idle",
    "by_kind",
    "prefixes",
    "latency",
)
"""Numbers, and mappings of numbers by tenant, reason or kind."""
AVERAGED = ("mean_tenants", "mean_samples")
"""Over groups."""
OF_AN_ENGINE = ("busy_seconds", "wall_seconds", "capacity_seconds", "idle")
"""Told of each engine by itself too."""
Counts = Mapping[str, Any]
"""Of one engine or of several: what ``SUMMED`` and ``AVERAGED`` name, ``utilisation`` and, in ``engines``, what
``OF_AN_ENGINE`` names."""


def as_counts(usage: Any, *, engine: str = "") -> dict[str, Any]:  # noqa: ANN401  # an EngineUsage, which needs numpy
    """Turn an engine's usage into plain values.

    Args:
        usage: What the engine told.
        engine: Its name.
    """
    counts = {key: _copy(getattr(usage, key)) for key in (*SUMMED, *AVERAGED)}
    own = {key: _copy(counts[key]) for key in OF_AN_ENGINE}
    return _with_utilisation({**counts, "engines": [_with_utilisation({"name": engine, **own})]})


def merge_usage(counts: Sequence[Counts]) -> dict[str, Any]:
    """Add up the counts of several engines.

    Args:
        counts: Of engines, from :func:`as_counts`.

    Returns:
        Sums; means weighted by the number of groups; the engines side by side.
    """
    total: dict[str, Any] = as_counts(_Nothing())
    total["engines"] = [engine for each in counts for engine in each["engines"]]
    for each in counts:
        for key in AVERAGED:
            weighted = total[key] * total["num_groups"] + each[key] * each["num_groups"]
            total[key] = weighted / max(total["num_groups"] + each["num_groups"], 1)
        for key in SUMMED:
            total[key] = _plus(total[key], each[key])
    return _with_utilisation(total)


def usage_growth(before: Sequence[Counts], after: Sequence[Counts]) -> dict[str, Any]:
    """Return what was added to the counts of engines that may have served others before.

    Args:
        before: All counts at the begin.
        after: All counts at the end; none of them is less.
    """
    old, new = merge_usage(before), merge_usage(after)
    grown = {key: _plus(new[key], old[key], sign=-1) for key in SUMMED}
    for key in AVERAGED:
        weighted = new[key] * new["num_groups"] - old[key] * old["num_groups"]
        grown[key] = weighted / max(grown["num_groups"], 1)
    return _with_utilisation(grown)


def _with_utilisation(counts: dict[str, Any]) -> dict[str, Any]:
    capacity = counts["capacity_seconds"]
    return {**counts, "utilisation": counts["busy_seconds"] / capacity if capacity > 0 else None}


class _Nothing:
    """The usage of an engine that has done nothing."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in {"device_seconds", "samples", "idle", "by_kind", "prefixes", "latency"}:
            return {}
        return 0 if name in {"encoded", "reused", "carried", "num_groups"} else 0.0


def _copy(value: Any) -> Any:  # noqa: ANN401  # a number, or mappings of numbers
    if not isinstance(value, Mapping):
        return value
    return {name: _copy(each) for name, each in cast("Mapping[str, Any]", value).items()}


def _plus(left: Any, right: Any, *, sign: int = 1) -> Any:  # noqa: ANN401  # idem
    if not isinstance(left, Mapping):
        return left + sign * right
    first, second = cast("Mapping[str, Any]", left), cast("Mapping[str, Any]", right)
    total: dict[str, Any] = {}
    for name in dict.fromkeys([*first, *second]):
        missing: Any = {} if isinstance(first.get(name, second.get(name)), Mapping) else 0
        total[name] = _plus(first.get(name, missing), second.get(name, missing), sign=sign)
    return total
