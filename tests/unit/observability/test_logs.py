import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from joynexus.observability.logs import (
    JsonLogHandler,
    format_record,
    read_logs,
    setup_logging,
    tenant_logger,
)


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[JsonLogHandler]:
    logger = logging.getLogger("joynexus")
    level = logger.level
    handler = setup_logging(tmp_path, role="trainer:lite")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    handler.close()


def test_a_tenants_log_holds_its_own_records_alone(tmp_path, handler):
    tenant_logger("joynexus.training", "alice").info("step %d", 3)
    tenant_logger("joynexus.training", "bob").warning("NaN")
    logging.getLogger("joynexus.actors").error("group %s", "lost", extra={"policy_version": 4})
    alice, bob, service = (list(read_logs(tmp_path / name)) for name in ("alice", "bob", "_service"))
    assert [(each["message"], each["tenant"], each["role"]) for each in alice] == [("step 3", "alice", "trainer:lite")]
    assert [each["level"] for each in bob] == ["WARNING"]
    assert [(each["message"], each["policy_version"], "tenant" in each) for each in service] == [
        ("group lost", 4, False)
    ]
    assert (tmp_path / "alice/logs/trainer_lite.jsonl").exists()


def test_extras_of_a_call_join_those_of_the_logger(tmp_path, handler):
    tenant_logger("joynexus.x", "alice", workload=1).info("m", extra={"episode": 7})
    (record,) = read_logs(tmp_path / "alice")
    assert (record["workload"], record["episode"], record["tenant"]) == (1, 7, "alice")


def test_no_tenant_name_leaves_the_folder(tmp_path, handler):
    logging.getLogger("joynexus").info("m", extra={"tenant": "../../evil"})
    (record,) = read_logs(tmp_path / "_service")
    assert record["tenant"] == "../../evil"
    assert {each.name for each in tmp_path.iterdir()} == {"_service"}


def test_an_exception_is_kept_with_its_traceback(tmp_path, handler):
    try:
        int("lost")
    except ValueError:
        logging.getLogger("joynexus").exception("failed")
    (record,) = read_logs(tmp_path / "_service")
    assert "Traceback" in record["exception"]
    assert format_record(record).endswith("with base 10: 'lost'")


def test_roles_are_read_together_by_time(tmp_path):
    for role, times in {"a": (1.0, 3.0), "b": (2.0,)}.items():
        path = tmp_path / f"alice/logs/{role}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"time_s": t, "level": "INFO", "role": role, "message": str(t), "tenant": "alice"} for t in times]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    records = list(read_logs(tmp_path / "alice"))
    assert [each["message"] for each in records] == ["1.0", "2.0", "3.0"]
    assert format_record(records[1]).endswith("INFO    b[alice]: 2.0")


def test_a_broken_message_stops_nobody(tmp_path, handler, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("joynexus"), "propagate", False)  # pytest's own handler does raise
    logging.getLogger("joynexus").info("%d", "not a number")
    logging.getLogger("joynexus").info("next")
    assert [each["message"] for each in read_logs(tmp_path / "_service")] == ["next"]
    assert "not a number" in capsys.readouterr().err


def test_a_departed_tenants_file_is_closed_and_may_come_back(tmp_path, handler):
    tenant_logger("joynexus", "alice").info("one")
    handler.forget("alice")
    handler.forget("alice")
    tenant_logger("joynexus", "alice").info("two")
    assert [each["message"] for each in read_logs(tmp_path / "alice")] == ["one", "two"]
