"""Costs from what the core benchmarks measured, for as much as they tell; the rest is stated as assumed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.simulation.costs import DeviceCosts, from_fields

ASSUMED_WIDTH = 512
"""Numbers of a prefix token, float32: the benchmark's table does not say."""
ACT_PART = 1 / 3
"""Of loss and backward that acting takes: a forward without a backward, which is about twice as dear."""


def load_costs(path: Path) -> DeviceCosts:
    """Read costs from a JSON file.

    Args:
        path: Either ``{"costs": {...}}`` with fields of :class:`~benchmarks.simulation.costs.DeviceCosts`, or a
            result of ``core/group_forward.py``.

    Raises:
        ValueError: If it is neither.
    """
    document = cast("dict[str, Any]", json.loads(path.read_text()))
    if document.get("name") == "core/group_forward":
        return fit_group_forward(document, path.name)
    if "costs" in document:
        return from_fields(document["costs"], path.name)
    raise ValueError(f"{path}: is no result of core/group_forward, and has no 'costs'. Give one of the two.")


def fit_group_forward(document: Mapping[str, Any], name: str) -> DeviceCosts:
    """Fit costs to a result of ``core/group_forward.py``.

    The backbone and prefix length with the most points are taken. A forward's fixed and per-row seconds are a line
    through its grouped forwards, dummies included. A tenant's own part, optimizer included, is what a whole step takes
    beyond the forward, by tenant, at one row; further rows of it are taken to be free, as a small module's nearly are.

    Args:
        document: The benchmark's JSON.
        name: Of the file, for messages.

    Raises:
        ValueError: If its tables hold no forward of at least two sizes, or no whole step beside them.
    """
    forward: Sequence[Mapping[str, Any]] = document["tables"]["Forward stage"]
    steps: Sequence[Mapping[str, Any]] = document["tables"]["Whole step"]
    counts = Counter((row["backbone"], row["tokens"]) for row in forward)
    useful = [kind for kind in counts if any((row["backbone"], row["tokens"]) == kind for row in steps)]
    if not useful:
        raise ValueError(f"{name}: no whole step at a prefix whose forwards were measured. Run group_forward anew.")
    kind = max(useful, key=lambda each: counts[each])
    points = [
        (float(row["tenants"] * row["batch"]), float(row["grouped_ms"]) / 1e3)
        for row in forward
        if (row["backbone"], row["tokens"]) == kind
    ]
    if len({rows for rows, _ in points}) < 2:  # noqa: PLR2004  # a line has two points
        raise ValueError(f"{name}: forwards of {kind} have one size only. Run group_forward with more.")
    fixed_s, row_s = fit_line(points)
    own_s = [
        float(row["grouped_ms"]) / 1e3 / row["tenants"] - (fixed_s / row["tenants"] + row["batch"] * row_s)
        for row in steps
        if (row["backbone"], row["tokens"]) == kind
    ]
    part_s = max(median(own_s), 0.0)
    return DeviceCosts(
        name=f"{kind[0]}, {kind[1]} tokens, {document['environment']['device']}",
        source=(
            f"fitted to {name} ({document['environment']['cpu']}); assumed: acting takes a third of loss and backward, "
            f"features have {ASSUMED_WIDTH} float32 a token, and look-ups, and rows of a module beyond the first, cost "
            "nothing"
        ),
        prefix_fixed_s=fixed_s,
        prefix_row_s=row_s,
        chunk_rows=max(int(rows) for rows, _ in points),
        pads=False,  # the measured forwards had their dummies
        train_fixed_s=part_s,
        train_row_s=0.0,
        optimizer_s=0.0,
        act_fixed_s=ACT_PART * part_s,
        act_row_s=0.0,
        row_bytes=4 * ASSUMED_WIDTH * int(kind[1]),
    )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit ``y = a + b x`` by least squares, both kept at 0 or more; returns ``(a, b)``."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope
