"""SFT through every role, and with each of its roles killed: as many steps as asked for, each on its own batch.

Most of them come without frames: the dataset is small, and the prefix store has it after the first epoch.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from maniskill_file import ACTION_DIM, STATE_DIM, write_file
from ray_world import tenant_spec, wait_until
from safetensors.numpy import load_file

from joynexus.actors import names
from joynexus.actors.roles import find_role
from joynexus.api import Run, Service
from joynexus.specs.tenant import TenantSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

STEPS = 120


def supervised(name: str, path: Path, *, steps: int = STEPS) -> TenantSpec:
    """A tenant that imitates a tiny dataset; ``name`` enters nothing that is computed."""
    workload = {
        "type": "sft",
        "dataset": {"type": "maniskill_h5", "path": str(path)},
        "num_steps": steps,
        "batch_size": 4,
        "optimizer": {"lr": 0.01},
    }
    policy: dict[str, Any] = {
        "observation": {
            "cameras": ["front"],
            "image_size": [16, 16],
            "state_dim": STATE_DIM,
            "max_prompt_tokens": 48,
        },
        "action": {"dim": ACTION_DIM, "normalization": "min_max"},
        "action_module": {"type": "oft", "hidden_dim": 16, "token_dim": 4},
    }
    spec = tenant_spec(name, policy=policy, checkpoint_every=10, seed=5)
    return TenantSpec.model_validate({**spec.model_dump(mode="json"), "workloads": [workload]})


def kill(service: Service, role: str) -> None:
    handle = find_role(role, service.namespace)
    os.kill(ray.get(handle.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def finished(run: Run) -> dict[str, Any]:
    """Wait for the end, and return the module that came out, by tensor name."""
    status = run.wait(180.0)
    results = status["workloads"][0]["results"]
    assert results["steps"] == STEPS
    assert status["policy_version"] == STEPS // 10
    return load_file(Path(status["folder"]) / "export" / "module.safetensors")


@pytest.fixture(scope="module")
def undisturbed(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A dataset, and the module that an undisturbed run makes of it."""
    path = write_file(tmp_path_factory.mktemp("data") / "demos.h5", cameras=("front",))
    run = service.submit(supervised("calm", path))
    module = finished(run)
    moved = run.status()["workloads"][0]["results"]
    assert moved["light_items"] > STEPS / 2  # a few epochs later there are no frames left to send
    assert moved["fetched_items"] == 0
    losses = [each["training/loss"] for each in run.metrics()]
    assert len(losses) == STEPS
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    return path, module


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("producer", names.producer),
        ("trainer", lambda _: names.trainer("tiny")),
        ("queue", lambda _: names.queue("tiny")),
        ("master", lambda _: names.MASTER),
    ],
)
def test_a_killed_role_changes_nothing_in_what_is_learnt(
    service: Service, undisturbed: tuple[Path, dict[str, Any]], label: str, role: Callable[[str], str]
):
    path, expected = undisturbed
    run = service.submit(supervised(f"no-{label}", path))
    wait_until(lambda: run.status()["policy_version"] >= 2, timeout_s=100.0, what="versions before the fault")
    kill(service, role(run.name))
    found = finished(run)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] == tensor).all(), name


def test_c82_a_policy_that_goes_on_keeps_its_statistics_and_tells_how_new_data_fits(
    service: Service, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
):
    """Statistics come with ``init_from``; what of the new data lies outside of them is in the results."""
    export = Path(service.status()["calm"]["folder"]) / "export"
    new = write_file(tmp_path / "new.h5", episodes=6, cameras=("front",))
    spec = supervised("goes-on", new, steps=2).model_dump(mode="json")
    spec["policy"]["init_from"] = str(export)
    run = service.submit(TenantSpec.model_validate(spec))
    status = run.wait(120.0)
    fit = status["workloads"][0]["results"]["fit"]
    assert fit["num_frames"] == 36
    assert 0.2 < fit["action"]["any_beyond_range"] < 0.8
    kept = (Path(status["folder"]) / "export" / "stats.json").read_bytes()
    assert kept == (export / "stats.json").read_bytes()
    calm = service.status()["calm"]["workloads"][0]["results"]
    assert "fit" not in calm  # its statistics are those of its dataset
