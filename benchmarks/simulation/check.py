"""The simulation against a trace that was run: predicted and measured busy seconds, side by side.

The file is JSON with

- ``costs``: fields of :class:`~benchmarks.simulation.costs.DeviceCosts`, measured;
- ``tenants``: a list of ``{"name", "work": {"type": "sft" | "rl" | "evaluation", ...}}`` with the fields of
  :mod:`benchmarks.simulation.workload`, optionally ``weight``, ``arrival_s`` and ``signature``. A tenant with several
  workloads has an entry for each, named ``tenant/workload``;
- ``busy_s``: measured busy seconds by tenant, training and inference together;
- optionally ``store_bytes``, ``ship_features``, and fields of the service's ``training`` and ``inference``, as the
  service was set.

``cluster/trace.py`` writes all of it: costs measured of tenants that share nothing, and the busy seconds of the shared
run, which the costs do not know.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from benchmarks.harness import Measured, Row
from benchmarks.simulation.costs import from_fields
from benchmarks.simulation.service import simulate
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.workload import EvaluationWork, RlWork, SftWork, Tenant, Work

WORKS: Mapping[str, type[SftWork] | type[RlWork] | type[EvaluationWork]] = {
    "sft": SftWork,
    "rl": RlWork,
    "evaluation": EvaluationWork,
}


def check_trace(path: Path) -> Measured:
    """Simulate a trace that a file holds, and compare; see :func:`check`."""
    return check(cast("dict[str, Any]", json.loads(path.read_text())), path.name)


def check(document: Mapping[str, Any], name: str) -> Measured:
    """Simulate a trace on one GPU (or one CPU's engines), and compare.

    Args:
        document: As the module says.
        name: Of the trace, for messages.

    Raises:
        ValueError: If the document lacks something.
    """
    missing = [each for each in ("costs", "tenants", "busy_s") if each not in document]
    if missing:
        raise ValueError(f"{name}: lacks {missing}. See benchmarks/simulation/check.py for what a trace has to say.")
    tenants = [_tenant(entry, index) for index, entry in enumerate(document["tenants"])]
    plain = Settings()
    settings = Settings(
        store_bytes=int(document.get("store_bytes", plain.store_bytes)),
        ship_features=document.get("ship_features", plain.ship_features),
        training=plain.training.model_copy(update=document.get("training", {})),
        inference=plain.inference.model_copy(update=document.get("inference", {})),
    )
    outcome = simulate(tenants, from_fields(document["costs"], name), settings)
    predicted: dict[str, float] = {}
    for each, kinds in outcome.ledger.seconds.items():
        owner = each.partition("/")[0]
        predicted[owner] = predicted.get(owner, 0.0) + sum(kinds.values())
    return compare(predicted, {each: float(value) for each, value in document["busy_s"].items()})


def compare(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Measured:
    """Set predicted beside measured seconds."""
    names = [*measured, *(name for name in predicted if name not in measured)]
    rows: list[Row] = [
        {
            "tenant": name,
            "simulated_busy_s": predicted.get(name, 0.0),
            "measured_busy_s": measured.get(name, 0.0),
            "simulated_over_measured": _ratio(predicted.get(name, 0.0), measured.get(name, 0.0)),
        }
        for name in names
    ]
    total = _ratio(sum(predicted.values()), sum(measured.values()))
    return Measured(
        headline={"simulated_over_measured_busy": total or 0.0},
        tables={"Simulated and measured busy seconds": rows},
        notes=(
            "The costs are those that the trace measured of tenants that share nothing, one for all modules.",
            "Predicted is what grouping and reuse make of them when all share.",
        ),
    )


def _ratio(one: float, other: float) -> float | None:
    return one / other if other else None


def _tenant(entry: Mapping[str, Any], index: int) -> Tenant:
    fields = dict(cast("Mapping[str, Any]", entry["work"]))
    kind = fields.pop("type", None)
    if kind not in WORKS:
        raise ValueError(f"trace: tenant {entry.get('name')!r}: work.type is {kind!r}. Take one of {sorted(WORKS)}.")
    return Tenant(
        name=str(entry["name"]),
        arrival_s=float(entry.get("arrival_s", 0.0)),
        signature=str(entry.get("signature", "layout-0")),
        work=_work(kind, fields),
        weight=float(entry.get("weight", 1.0)),
        seed=index,
    )


def _work(kind: str, fields: Mapping[str, Any]) -> Work:
    try:
        return WORKS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"trace: a work of type {kind!r}: {error}. See benchmarks/simulation/workload.py.") from error
