import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from joynexus.observability.sinks import JsonLines, MetricsWriter, read_lines, read_metrics


def test_records_come_back_in_order_with_labels(tmp_path):
    with MetricsWriter(tmp_path / "alice", tensorboard=False) as writer:
        writer.write(1, {"training/loss": 0.5}, time_s=10.0, labels={"workload": 0})
        writer.write(2, {"training/loss": 0.25, "training/lr": 3e-4}, time_s=11.5)
    assert read_metrics(tmp_path / "alice") == [
        {"step": 1, "time_s": 10.0, "workload": 0, "training/loss": 0.5},
        {"step": 2, "time_s": 11.5, "training/loss": 0.25, "training/lr": 3e-4},
    ]
    assert read_metrics(tmp_path / "alice/metrics.jsonl") == read_metrics(tmp_path / "alice")


def test_a_second_writer_goes_on_where_the_first_ended(tmp_path):
    for step in (1, 2):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(step, {"training/loss": 1.0})
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2]


def test_a_torn_last_line_is_skipped_and_then_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"training/lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {})
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 3]


def test_a_file_that_is_torn_from_its_first_byte_is_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"st')
    assert read_lines(path) == []
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_damage_in_the_middle_is_told_and_not_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\nrubbish\n{"step":3}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        read_lines(path)


def test_no_file_is_no_record(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert read_metrics(tmp_path) == []


def test_numbers_that_json_lacks_become_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"training/loss": float("nan"), "training/kl": float("inf"), "training/rows": 3})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["training/loss"] is None
    assert json.loads(line)["training/rows"] == 3.0


def test_a_bad_name_is_refused_and_nothing_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="area/name"):
        writer.write(1, {"training/loss": 1.0, "loss": 1.0})
    assert read_metrics(tmp_path) == []


def test_closing_twice_is_harmless(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.close()
    writer.close()


def test_the_same_values_are_tensorboard_events(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(5, {"training/loss": 0.5, "rollout/return_mean": 2.0}, time_s=100.0)
        writer.write(6, {"training/loss": 0.25}, time_s=101.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["training/loss", "rollout/return_mean"]
    assert [(each.step, each.value, each.wall_time) for each in events.Scalars("training/loss")] == [
        (5, 0.5, 100.0),
        (6, 0.25, 101.0),
    ]


WRITER = """
import sys
from pathlib import Path
from joynexus.observability.sinks import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]), tensorboard=False)
step = 0
while True:
    step += 1
    writer.write(step, {"training/loss": 1.0 / step}, labels={"padding": "x" * 2000})
    if step == 50:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_every_whole_record(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    steps = [each["step"] for each in read_metrics(tmp_path)]
    assert len(steps) >= 50
    assert steps == list(range(1, len(steps) + 1))
