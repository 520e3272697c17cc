"""What the trace makes of its runs, without running them."""

from typing import Any

import numpy as np
import pytest

from benchmarks.cluster.trace import report
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
        name: TenantOutcome(name=name, wall_s=wall, losses=(1.0, 0.5) if name == SFT else None, module=module)
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
    spec, tenants = service_spec(), quick_trace(tmp_path, 0)
    assert SHARED.service(spec).training == spec.training
    assert CONVENTIONAL.service(spec).training.prefix_store.device_bytes == 0
    assert ALONE.service(spec).inference.max_batch_size == 1
    shipping = WITHOUT[1].tenant(tenants[1]).workloads[0]
    assert shipping.rollout.ship_features == "never"
    assert SHARED.tenant(tenants[1]) == tenants[1]
