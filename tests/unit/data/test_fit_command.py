"""``joynexus fit`` on real files, and what a run shows of a fit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from joynexus.cli import app
from joynexus.cli.live import LiveProgress
from joynexus.data.normalization import policy_stats_to_json, read_policy_stats
from joynexus.data.producer import ProducerEngine
from joynexus.errors import DatasetError
from joynexus.observability.report import WorkloadReport
from joynexus.observability.summary import _workload_cells
from joynexus.specs.loading import load_tenant

TENANT = """\
tenant: pick-cube
policy:
  backbone: lite
  observation: {{cameras: [base_camera], image_size: [16, 24], state_dim: 20}}
  action: {{dim: 7, horizon: 4, num_action_steps: 2, normalization: min_max}}
  action_module: {{type: oft}}
workloads:
  - {{type: sft, num_steps: 2, batch_size: 2, dataset: {{type: maniskill_h5, path: {first}}}}}
  - {{type: sft, num_steps: 2, batch_size: 2, dataset: {{type: maniskill_h5, path: {second}}}}}
"""


@pytest.fixture
def tenant_file(tmp_path: Path, write_file: Callable[..., Path]) -> Path:
    first = write_file("a/PickCube-v1.h5", lengths=(10, 10))
    second = write_file("b/PickCube-v1.h5", lengths=(10, 10, 30))  # its third episode goes on where the others end
    path = tmp_path / "tenant.yaml"
    path.write_text(TENANT.format(first=first, second=second))
    return path


def fit(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["fit", *(str(each) for each in arguments)])


def test_a_second_dataset_is_compared_with_the_statistics_of_the_first(tenant_file: Path):
    result = fit(tenant_file)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "pick-cube: its statistics are those of this dataset."
    assert "50 frames against the statistics of" in lines[1]
    assert "action (min_max): 60.0% of frames beyond [min, max]" in lines[3]
    encoded = json.loads(fit(tenant_file, "--json").stdout)["pick-cube"]
    assert encoded[0] is None
    assert encoded[1]["action"]["any_beyond_range"] == pytest.approx(0.6)  # 30 of the 50 frames
    assert encoded[1]["action"]["worst"][0].startswith("action[")


def test_a_policy_that_normalises_nothing_has_nothing_to_fit(tenant_file: Path):
    tenant_file.write_text(tenant_file.read_text().replace("min_max", "identity"))
    assert fit(tenant_file).stdout == "pick-cube: has no sft workload, or normalises nothing.\n"


def test_the_producer_compares_with_what_the_policy_brings(tenant_file: Path):
    tenant = load_tenant(tenant_file)
    engines = [ProducerEngine.open(tenant, index, each) for index, each in enumerate(tenant.workloads)]
    own = engines[0].statistics()
    assert engines[0].fit(own, tenant.policy) is None
    found = engines[1].fit(own, tenant.policy)
    assert found is not None
    assert found.parts[1].any_beyond_range == pytest.approx(0.6)


def test_statistics_of_an_export_are_read_or_refused_by_name(tenant_file: Path, tmp_path: Path):
    tenant = load_tenant(tenant_file)
    stats = ProducerEngine.open(tenant, 0, tenant.workloads[0]).statistics()
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(policy_stats_to_json(stats)))
    read = read_policy_stats(tmp_path)
    assert read is not None
    assert read.source == stats.source
    path.write_text("null")
    assert read_policy_stats(tmp_path) is None
    for content, what in (("[]", "hold list"), ("{", "can't be read")):
        path.write_text(content)
        with pytest.raises(DatasetError, match=what):
            read_policy_stats(tmp_path)
    with pytest.raises(DatasetError, match=r"elsewhere/stats\.json: can't be read"):
        read_policy_stats(tmp_path / "elsewhere")


def test_a_run_tells_the_fit_once_and_the_summary_in_short(tenant_file: Path):
    tenant = load_tenant(tenant_file)
    engines = [ProducerEngine.open(tenant, index, each) for index, each in enumerate(tenant.workloads)]
    found = engines[1].fit(engines[0].statistics(), tenant.policy)
    assert found is not None
    console = Console(record=True, width=300)
    status = {
        "status": "RUNNING",
        "policy_version": 0,
        "workloads": [
            {"type": "sft", "status": "RUNNING", "results": {"steps": 1, "target": 2, "fit": found.to_json()}}
        ],
    }
    with LiveProgress(console) as live:
        live.show({"pick-cube": status})
        live.show({"pick-cube": status})
    assert console.export_text().count("50 frames against the statistics of") == 1
    report = WorkloadReport.from_results("sft", "COMPLETED", {"steps": 2, "fit": found.to_json()})
    assert report.to_json()["fit"]["action"]["mode"] == "min_max"
    assert "beyond the policy's [min, max]: state 60.0%, action 60.0% of frames" in _workload_cells(report)[-1]
