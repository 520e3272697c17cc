"""A package of somebody else's, made by the recipes of CONTRIBUTING, as a fresh process sees it when installed."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1] / "plugins" / "lab_models"

USE = """
import json
import numpy as np
import torch
from joynexus.models.backbone import load_backbone
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.loading import parse_service, parse_tenant
from joynexus.specs.registry import failed_plugins
from joynexus.testing.action_module_contracts import check_action_module
from joynexus.testing.model_contracts import check_backbone
from joynexus.testing.model_inputs import fake_observation
from joynexus.training.engine import TrainingEngine
from joynexus.types import Loss, TrainingBatch, TrainingCall

torch.set_num_threads(1)
service = parse_service({"service": "lab", "backbones": {"eyes": {"type": "patches", "chunk_size": 4}}}, "service.yaml")
spec = service.backbones["eyes"]
check_backbone(spec)
check_backbone(spec.model_copy(update={"dtype": "bfloat16"}))

def tenant(module):
    return parse_tenant({"tenant": module, "policy": {
        "backbone": "eyes",
        "observation": {"cameras": ["base"], "image_size": [32, 32], "state_dim": 3},
        "action": {"dim": 2, "horizon": 4, "num_action_steps": 2, "normalization": "identity"},
        "action_module": {"type": module},
    }}, "tenant.yaml")

tenants = [tenant("linear"), tenant("gaussian")]
check_action_module(tenants[0].policy.action_module)
backbone = load_backbone(spec)
engine = TrainingEngine(backbone, service.training, backbone_name="eyes")
losses = {}
for each in tenants:  # a module of the plugin's and a built-in one, on the plugin's backbone, in one group
    engine.open_slot(each.tenant, each.policy, seed=0, stats=None)
for step in range(10):
    futures = {}
    for each in tenants:
        batch = TrainingBatch(
            observation=fake_observation(each.policy.observation, 4),
            actions=np.full((4, 4, 2), 0.5, dtype=np.float32),
            action_is_pad=np.zeros((4, 4), dtype=np.bool_),
            sample_ids=("a", "b", "c", "d"),
        )
        call = TrainingCall(tenant=each.tenant, sequence=step, batch=batch, loss=Loss(name="supervised"),
                            optimizer=OptimizerSpec(lr=1e-2))
        futures[each.tenant] = engine.submit(call)
    while engine.step():
        pass
    for name, future in futures.items():
        losses.setdefault(name, []).append(future.result().metrics["loss"])
signatures = {engine.status(each.tenant).signature for each in tenants}
print(json.dumps({
    "failed": failed_plugins("backbones") | failed_plugins("action_modules"),
    "losses": losses, "signatures": len(signatures), "encoded": backbone.num_encoded,
}))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What an installer leaves of the plugin's metadata."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = tmp_path / "lab_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items())
        for group, each in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def test_a_plugin_by_the_recipe_keeps_the_contracts_and_trains_beside_built_in_modules(installed: Path):
    program = f"import sys; sys.path[:0] = [{str(PLUGIN)!r}, {str(installed)!r}]\n{USE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["failed"] == {}
    assert seen["signatures"] == 1
    assert seen["encoded"] == 4  # of 2 tenants, 10 steps and 4 rows each
    for losses in seen["losses"].values():
        assert losses[-1] < 0.5 * losses[0]


def test_its_specs_need_neither_torch_nor_numpy():
    program = "import sys; sys.path.insert(0, sys.argv[1]); import lab_models.lab_specs; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, str(PLUGIN)], capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout
    assert "'numpy'" not in done.stdout
