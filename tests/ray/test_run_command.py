"""``joynexus run`` on a service of its own: shared and isolated, with everything that a run leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_world import SERVICE, evaluation_workload, rl_workload, tenant_spec

from joynexus.specs.loading import dump_yaml

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "joynexus.cli", "run", *arguments, "--local", "--num-cpus", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A service and two tenants that share a signature."""
    (tmp_path / "service.yaml").write_text(dump_yaml(SERVICE))
    tenants = [tenant_spec(name, rl_workload(iterations=2), evaluation_workload(episodes=2)) for name in ("ann", "bob")]
    (tmp_path / "tenants.yaml").write_text(dump_yaml(*tenants))
    return ["tenants.yaml", "--service", "service.yaml"]


def check_accounting(summary: dict) -> None:
    """Every second and every prefix of a run is somebody's, and every engine tells why it was idle."""
    service, tenants = summary["service"], summary["tenants"].values()
    engines = service["engines"].values()
    for tenant in tenants:
        assert sum(tenant["device_seconds_by_kind"].values()) == pytest.approx(tenant["device_seconds"], abs=1e-9)
        assert {"head_forward", "backward", "optimizer"} <= set(tenant["device_seconds_by_kind"])
        assert min(tenant["samples"]["training"], tenant["samples"]["inference"]) > 0
    charged = sum(tenant["device_seconds"] for tenant in tenants)
    assert charged == pytest.approx(sum(each["busy_seconds"] for each in engines), abs=1e-9)
    encoded = sum(kind["encoded"] for tenant in tenants for kind in tenant["prefixes"].values())
    assert encoded == service["backbone_samples"]
    assert sum(tenant["samples"]["training"] for tenant in tenants) == service["training_samples"]
    for each in engines:
        assert 0 < each["utilisation"] < 1
        assert each["busy_seconds"] + sum(each["idle"].values()) < 1.2 * each["wall_seconds"]
    assert service["engines"]["training"]["idle"]["copying"] > 0
    assert set(service["idle"]) <= {"no_data", "waiting_for_group", "copying", "control"}


def test_a_shared_run_leaves_summary_metrics_plot_and_export(tmp_path: Path, files: list[str]):
    done = run(tmp_path, *files, "--output", "out", "--json", "-")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())

    service = summary["service"]
    assert set(service) == {
        "backbone",
        "wall_s",
        "backbone_samples",
        "training_samples",
        "prefix_store",
        "group_batches",
        "idle",
        "engines",
    }
    check_accounting(summary)
    assert service["prefix_store"]["misses"] == service["backbone_samples"] > 0
    assert {"count", "mean_tenants", "mean_samples"} == set(service["group_batches"]["training"])
    for name, tenant in summary["tenants"].items():
        assert (tenant["status"], tenant["policy_version"]) == ("COMPLETED", 2)
        rl, evaluation = tenant["workloads"]
        assert (rl["type"], rl["iterations"]) == ("rl", 2)
        assert (evaluation["episodes"], evaluation["success_once"], evaluation["success_at_end"]) == (2, 1.0, 1.0)
        folder = tmp_path / "out" / "tenants" / name
        assert (folder / "metrics.jsonl").read_text().count("\n") >= 2
        assert list((folder / "tensorboard").iterdir())
        assert (folder / "export" / "module.safetensors").exists()
    assert (tmp_path / "out" / "run.png").stat().st_size > 10_000


def test_isolated_tenants_run_one_after_the_other_and_never_share(tmp_path: Path, files: list[str]):
    done = run(tmp_path, *files, "--output", "alone", "--isolated", "--json", "summary.json")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: each["status"] for name, each in summary["tenants"].items()} == {
        "ann": "COMPLETED",
        "bob": "COMPLETED",
    }
    groups = summary["service"]["group_batches"]
    assert groups["training"]["mean_tenants"] == groups["inference"]["mean_tenants"] == 1.0


def test_a_failed_tenant_ends_the_command_with_1_and_its_reason(tmp_path: Path, files: list[str]):
    broken = tenant_spec("cleo", rl_workload(iterations=1), policy={"observation": {"state_dim": 5}})
    (tmp_path / "broken.yaml").write_text(dump_yaml(broken))
    done = run(tmp_path, "broken.yaml", *files[1:], "--output", "out")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("joynexus: error: ")]
    assert len(errors) == 1
    assert "cleo: ContractError" in errors[0]
    assert "state_dim is 4" in errors[0]
