import json

import pytest
from rich.console import Console

from joynexus.observability.report import EngineTimes, GroupCounts, ServiceReport, TenantReport, WorkloadReport
from joynexus.observability.summary import build_summary, read_summary, summary_table, write_summary
from joynexus.rollout.report import summarize
from joynexus.types import EpisodeReport

SERVICE = ServiceReport(
    backbone="lite",
    wall_s=12.5,
    backbone_samples=300,
    training_samples=1000,
    store_hits=700,
    store_misses=300,
    training=GroupCounts(count=50, mean_tenants=2.5, mean_samples=20.0),
    inference=GroupCounts(count=9, mean_tenants=1.5, mean_samples=3.0),
)
ALICE = TenantReport(
    tenant="alice",
    status="COMPLETED",
    policy_version=7,
    signature="ab" * 32,
    device_seconds=3.25,
    workloads=(
        WorkloadReport(type="sft", status="COMPLETED", count=500, loss_first=1.5, loss_last=0.25),
        WorkloadReport(
            type="rl", status="COMPLETED", count=20, loss_first=0.1, loss_last=0.2, details={"return_mean": 3.0}
        ),
        WorkloadReport(
            type="evaluation",
            status="INCOMPLETE",
            count=8,
            success_once=0.75,
            success_at_end=0.5,
            details={"errors": 2, "baseline": {"success_once": 0.0}},
        ),
    ),
)
BOB = TenantReport(tenant="bob", status="FAILED", error="NonFiniteError: bob: NaN in state", details={"folder": "x"})


def test_the_summary_has_exactly_the_documented_form():
    assert build_summary(SERVICE, [ALICE, BOB]) == {
        "service": {
            "backbone": "lite",
            "wall_s": 12.5,
            "backbone_samples": 300,
            "training_samples": 1000,
            "prefix_store": {"hits": 700, "misses": 300},
            "group_batches": {
                "training": {"count": 50, "mean_tenants": 2.5, "mean_samples": 20.0},
                "inference": {"count": 9, "mean_tenants": 1.5, "mean_samples": 3.0},
            },
        },
        "tenants": {
            "alice": {
                "status": "COMPLETED",
                "policy_version": 7,
                "signature": "ab" * 32,
                "device_seconds": 3.25,
                "workloads": [
                    {"type": "sft", "status": "COMPLETED", "steps": 500, "loss_first": 1.5, "loss_last": 0.25},
                    {
                        "type": "rl",
                        "status": "COMPLETED",
                        "iterations": 20,
                        "loss_first": 0.1,
                        "loss_last": 0.2,
                        "return_mean": 3.0,
                    },
                    {
                        "type": "evaluation",
                        "status": "INCOMPLETE",
                        "episodes": 8,
                        "success_once": 0.75,
                        "success_at_end": 0.5,
                        "errors": 2,
                        "baseline": {"success_once": 0.0},
                    },
                ],
            },
            "bob": {
                "status": "FAILED",
                "policy_version": 0,
                "signature": "",
                "device_seconds": 0.0,
                "workloads": [],
                "error": "NonFiniteError: bob: NaN in state",
                "folder": "x",
            },
        },
    }


def test_a_written_summary_is_read_back_exactly(tmp_path):
    path = tmp_path / "run/summary.json"
    write_summary(path, SERVICE, [ALICE, BOB])
    assert read_summary(path) == (SERVICE, (ALICE, BOB))
    write_summary(path, SERVICE, [BOB])
    assert read_summary(path) == (SERVICE, (BOB,))
    assert [each.name for each in path.parent.iterdir()] == ["summary.json"]


def test_numbers_that_json_lacks_become_null(tmp_path):
    workload = WorkloadReport(type="sft", status="FAILED", loss_last=float("nan"), details={"deep": [float("inf")]})
    write_summary(tmp_path / "s.json", SERVICE, [TenantReport(tenant="a", status="FAILED", workloads=(workload,))])
    text = (tmp_path / "s.json").read_text()
    values = json.loads(text, parse_constant=pytest.fail)
    assert values["tenants"]["a"]["workloads"][0]["loss_last"] is None
    assert values["tenants"]["a"]["workloads"][0]["deep"] == [None]


def test_details_never_hide_a_field():
    workload = WorkloadReport(type="sft", status="COMPLETED", count=3, details={"status": "x", "steps": 9})
    assert workload.to_json() == {"type": "sft", "status": "COMPLETED", "steps": 3}


TRAINING = EngineTimes(
    busy_seconds=2.0,
    wall_seconds=8.0,
    capacity_seconds=16.0,
    idle={"no_data": 3.0, "control": 1.0},
    by_kind={"prefix": 1.5, "backward": 0.5},
)
INFERENCE = EngineTimes(busy_seconds=1.0, wall_seconds=5.0, capacity_seconds=5.0, idle={"no_data": 4.0})
COUNTED = ServiceReport(backbone="lite", engines={"training": TRAINING, "inference": INFERENCE})
CAROL = TenantReport(
    tenant="carol",
    status="COMPLETED",
    device_seconds=2.0,
    device_seconds_by_kind={"prefix": 1.5, "backward": 0.5},
    prefixes={
        "training": {"encoded": 4, "reused": 12, "carried": 2},
        "inference": {"encoded": 1, "reused": 1, "carried": 0},
    },
    samples={"training": 18, "inference": 2},
)


def test_where_time_and_prefixes_went_is_told_and_read_back(tmp_path):
    write_summary(tmp_path / "s.json", COUNTED, [CAROL])
    assert read_summary(tmp_path / "s.json") == (COUNTED, (CAROL,))
    values = json.loads((tmp_path / "s.json").read_text())
    assert values["service"]["idle"] == {"no_data": 7.0, "control": 1.0}
    assert values["service"]["engines"]["training"]["utilisation"] == 0.125
    assert values["tenants"]["carol"]["device_seconds_by_kind"] == {"prefix": 1.5, "backward": 0.5}
    assert values["tenants"]["carol"]["prefixes"]["training"] == {"encoded": 4, "reused": 12, "carried": 2}
    assert values["tenants"]["carol"]["samples"] == {"training": 18, "inference": 2}


def test_times_of_isolated_services_add_up():
    both = TRAINING + INFERENCE
    assert (both.busy_seconds, both.idle, both.by_kind) == (3.0, {"no_data": 7.0, "control": 1.0}, TRAINING.by_kind)
    assert both.utilisation == pytest.approx(3.0 / 21.0)
    assert EngineTimes().utilisation is None


def test_the_table_tells_why_engines_were_idle():
    console = Console(width=200)
    with console.capture() as captured:
        console.print(summary_table(COUNTED, [CAROL]))
    text = captured.get()
    assert "training: busy 2.0 s (12% of its capacity); idle: control 1.0 s, no data 3.0 s" in text
    assert "5 of 20" in text


def episode(index: int, status: str) -> EpisodeReport:
    return EpisodeReport(
        episode=index,
        seed=index,
        initial_state=index,
        status=status,
        success_once=status == "success",
        success_at_end=False,
        num_steps=10,
        episode_return=1.0,
        policy_version=3,
    )


def test_c44_an_evaluation_that_lost_episodes_is_reported_as_incomplete():
    outcomes = ["success"] * 6 + ["failure"] * 2 + ["crash"] * 2
    results = dict(summarize([episode(index, outcome) for index, outcome in enumerate(outcomes)]))
    report = WorkloadReport.from_results("evaluation", "COMPLETED", {**results, "baseline": dict(results)})
    assert (report.status, report.count, report.success_once, report.success_at_end) == ("INCOMPLETE", 8, 0.75, 0.0)
    assert report.details["errors"] == 2
    assert report.details["baseline"]["success_once"] == 0.75


def test_learners_results_become_reports():
    results = {"steps": 5, "target": 5, "loss_first": 2.0, "loss_last": 1.0, "dropped_stale": 0}
    report = WorkloadReport.from_results("sft", "FAILED", results, error="DatasetError: gone")
    assert (report.count, report.loss_first, report.loss_last, report.error) == (5, 2.0, 1.0, "DatasetError: gone")
    assert report.details == {"target": 5, "dropped_stale": 0}
    assert WorkloadReport.from_results("rl", "PENDING", {}).count == 0


def test_the_table_shows_every_workload_and_why_a_tenant_failed():
    console = Console(width=200)
    with console.capture() as captured:
        console.print(summary_table(SERVICE, [ALICE, BOB]))
    text = captured.get()
    for part in (
        "500 steps",
        "1.5 -> 0.25",
        "75% (untrained 0%)",
        "NonFiniteError: bob: NaN in state",
        "2.5 tenants per",
    ):
        assert part in text
