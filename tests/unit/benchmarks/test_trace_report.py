"""What the trace makes of its runs, without running them."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from benchmarks.cluster.trace import report
from benchmarks.cluster.trace_costs import for_simulation
from benchmarks.cluster.trace_run import (
    ALONE,
    CONVENTIONAL,
    IN_TURN,
    SHARED,
    WITHOUT,
    Outcome,
    TenantOutcome,
    Way,
    jain,
)
from benchmarks.cluster.trace_tenants import SFT, quick_trace, service_spec
from benchmarks.simulation.check import check_trace
from joynexus.scheduling.plan import compile_plan
from joynexus.specs.tenant import RlSpec, TenantSpec

TENANTS = (SFT, "a-rl", "b-rl")


def outcome(way: Way, *, busy: float, wall: float, shift: float = 0.0) -> Outcome:
    each = busy / 2 / len(TENANTS)
    counts: dict[str, Any] = {
        "busy_seconds": busy / 2,
        "device_seconds": dict.fromkeys(TENANTS, each),
        "by_kind": {name: {"prefix": each} for name in TENANTS},
        "encoded": 10,
        "samples": dict.fromkeys(TENANTS, 40),
        "prefixes": {SFT: {"encoded": 10, "reused": 30, "carried": 0}},
        "mean_tenants": 1.0,
        "latency": {"a-rl": {"50": 10}},
    }
    module = {"weight": np.full(2, 1.0 + shift, dtype=np.float32)}
    tenants = {
        name: TenantOutcome(
            name=name, wall_s=wall, running_s=wall, losses=(1.0, 0.5) if name == SFT else None, module=module
        )
        for name in TENANTS
    }
    return Outcome(way=way, makespan_s=2 * wall, usage={"training": counts, "inference": counts}, tenants=tenants)


def runs(**shifts: float) -> dict[str, Outcome]:
    busy = {SHARED: 2.0, ALONE: 3.0, CONVENTIONAL: 8.0, IN_TURN: 3.0}
    return {way.name: outcome(way, busy=seconds, wall=seconds, **shifts) for way, seconds in busy.items()}


def test_ratios_are_of_busy_seconds_over_those_of_the_shared_run():
    headline = report(runs(), quick=True).headline
    assert headline["busy_ratio_conventional"] == pytest.approx(4.0)
    assert headline["busy_ratio_reuse"] == pytest.approx(1.5)
    assert headline["sft_parameter_difference"] == 0.0


def test_another_module_is_noticed():
    found = runs()
    found[ALONE.name] = outcome(ALONE, busy=3.0, wall=3.0, shift=0.25)
    assert report(found, quick=True).headline["sft_parameter_difference"] == 0.25


def test_the_whole_trace_tells_wall_times_and_what_was_encoded_per_sample():
    measured = report(runs(), quick=False)
    assert measured.headline["makespan_ratio_in_turn"] == pytest.approx(1.5)
    assert measured.headline["jain_index_of_speeds"] == pytest.approx(1.0)
    rows = {str(row["tenant"]): row for row in measured.tables["Tenants"]}
    assert rows[SFT]["encoded per sample trained on"] == 0.25
    assert rows["a-rl"]["encoded per sample trained on"] == 0.0


def test_jains_index_is_one_for_equals_and_a_part_for_one_that_has_all():
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_each_way_changes_what_its_name_says_and_nothing_else(tmp_path):
    service, tenants = service_spec(), quick_trace(tmp_path, 0)
    plans = {
        way.name: [compile_plan(way.tenant(each, index), service) for index, each in enumerate(tenants)]
        for way in (SHARED, ALONE, CONVENTIONAL)
    }
    assert len({each.signature for each in plans[SHARED.name]}) == 1
    assert len({each.signature for each in plans[ALONE.name]}) == len(tenants)
    assert [each.memory for each in plans[ALONE.name]] == [each.memory for each in plans[SHARED.name]]
    assert [SHARED.tenant(each, index) for index, each in enumerate(tenants)] == tenants
    assert ALONE.tenant(tenants[0], 0) == tenants[0]
    assert not CONVENTIONAL.tenant(tenants[0], 0).policy.reuse_prefixes
    shipping = WITHOUT[1].tenant(tenants[1], 1).workloads[0]
    assert isinstance(shipping, RlSpec)
    assert shipping.rollout.ship_features == "never"


def test_the_simulation_is_told_enough_to_predict_the_shared_run(tmp_path):
    tenants = quick_trace(tmp_path, 0)
    found = {way: recount(outcome(way, busy=3.0, wall=3.0), tenants) for way in (SHARED, ALONE)}
    data = for_simulation(service_spec(), tenants, found[SHARED], found[ALONE])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    rows = check_trace(path).tables["Simulated and measured busy seconds"]
    assert {str(row["tenant"]) for row in rows} == {each.tenant for each in tenants}
    assert all(float(row["simulated_busy_s"] or 0) > 0 for row in rows)
    assert data["costs"]["prefix_fixed_s"] == pytest.approx(0.002)
    assert data["costs"]["prefix_row_s"] == pytest.approx(0.001)


def recount(original: Outcome, tenants: list[TenantSpec]) -> Outcome:
    """The same run of the quick trace, in which a forward takes 2 ms and another ms for each row."""
    names = [each.tenant for each in tenants]
    training = {
        **original.usage["training"],
        "encoded": 128,
        "carried": 96,
        "samples": {name: 128 * 12 if name == SFT else 32 * 2 * 4 for name in names},
        "prefixes": {SFT: {"encoded": 128}},
        "by_kind": {SFT: {"prefix": 16 * 0.010, "backward": 0.1, "optimizer": 0.05, "copy": 0.01}},
    }
    acting = {
        **original.usage["inference"],
        "encoded": 192,
        "samples": {name: 64 for name in names if name != SFT},
        "by_kind": {name: {"prefix": 64 * 0.003, "head_forward": 0.1} for name in names if name != SFT},
    }
    outcomes = dict.fromkeys(names, original.tenants[SFT])
    return dataclasses.replace(original, usage={"training": training, "inference": acting}, tenants=outcomes)
