from pathlib import Path

import pytest

from joynexus.actors import records
from joynexus.actors.environment import read_reports
from joynexus.actors.evaluation import EvaluationWatch
from joynexus.actors.records import RecordStore, TenantRecord, WorkloadRecord, write_atomically
from joynexus.specs.environment import GymSpec
from joynexus.specs.tenant import EvaluationSpec, TenantSpec

SPEC = TenantSpec.model_validate(
    {
        "tenant": "a",
        "policy": {
            "backbone": "tiny",
            "observation": {"state_dim": 1},
            "action": {"dim": 1, "horizon": 1, "num_action_steps": 1, "normalization": "identity"},
            "action_module": {"type": "gaussian"},
        },
    }
)
REPORT = (
    '{{"episode": {0}, "seed": {0}, "initial_state": 0, "status": "{1}", "success_once": {2}, "success_at_end": {2}, '
    '"num_steps": 3, "episode_return": 1.0, "policy_version": 4, "video": null, "error": null}}\n'
)


def test_a_record_survives_the_master(tmp_path: Path):
    record = TenantRecord(
        spec=SPEC, folder=tmp_path, status="RUNNING", workloads=[WorkloadRecord(type="rl")], workload=0
    )
    RecordStore(tmp_path / "state").save(record)
    assert RecordStore(tmp_path / "state").load() == {"a": record}


def test_a_crash_while_writing_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(records.os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_reports_are_read_from_all_workers_without_torn_lines_or_repetitions(tmp_path: Path):
    (tmp_path / "episodes_0.jsonl").write_text(REPORT.format(2, "success", "true") + '{"episode": 3, "se')
    (tmp_path / "episodes_1.jsonl").write_text(
        REPORT.format(1, "failure", "false") + REPORT.format(2, "crash", "false")
    )
    found = read_reports(tmp_path)
    assert [(each["episode"], each["status"]) for each in found] == [(1, "failure"), (2, "success")]


def test_an_evaluation_is_finished_when_every_pass_has_every_episode(tmp_path: Path):
    environment = GymSpec(type="gym", id="Pendulum-v1")
    watch = EvaluationWatch(EvaluationSpec(environment=environment, num_episodes=2, baseline=True), 1, tmp_path)
    newest, base = tmp_path / "evaluation_1", tmp_path / "evaluation_1" / "baseline"
    for folder in (newest, base):
        folder.mkdir(parents=True, exist_ok=True)
    (newest / "episodes_0.jsonl").write_text(REPORT.format(0, "success", "true") + REPORT.format(1, "success", "true"))
    assert not watch.finished()
    (base / "episodes_0.jsonl").write_text(REPORT.format(0, "failure", "false") + REPORT.format(1, "failure", "false"))
    assert watch.finished()
    results = watch.results()
    assert (results["success_rate"], results["baseline"]["success_rate"]) == (1.0, 0.0)
