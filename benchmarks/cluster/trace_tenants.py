"""The trace: one tenant that is fine-tuned and evaluated, three that learn by reinforcement, on one backbone.

The whole trace takes the quick start's tenants with their real simulators (LIBERO, ManiSkill), shortened. The quick one
takes a MuJoCo task of gymnasium, which starts in a second, and imitates made-up demonstrations: it shows the costs of
sharing, not learning. Its trajectories always bring their features: it is over before it is measured whether that pays.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from joynexus.data.demonstrations import generate_demonstrations
from joynexus.specs.loading import load_service, load_tenant
from joynexus.specs.service import HealthSpec, PrefixStoreSpec, ServiceSpec
from joynexus.specs.tenant import TenantSpec
from joynexus.types import ViewSpec

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
NO_STORE = PrefixStoreSpec(device_bytes=0, host_bytes=0)
SFT = "push-cube-sft"
NUM_DEMONSTRATIONS = 40
IMAGE = 64
REACHERS: Mapping[str, int] = {"reacher-rl": 64, "reacher-too-rl": 64, "reacher-wide-rl": 96}
"""By tenant: width of its action module. The task never ends an episode early, and a frame takes only 3 ms."""


def service_spec() -> ServiceSpec:
    """Return the quick start's service, with replicas that keep no features and progress that is told at once.

    Simulators hardly ever show a frame twice in one run, but they do in the next run of the same seeds, which would
    then seem cheaper. A second of the accelerator is taken to be worth a minute of a simulator, and a simulator may be
    kept waiting for about as long as it takes for its next chunk.
    """
    spec = load_service(QUICKSTART / "service.yaml")
    inference = spec.inference.model_copy(
        update={"prefix_store": NO_STORE, "device_second_worth": 60.0, "max_wait_ms": 250.0}
    )
    return spec.model_copy(update={"service": "trace", "inference": inference, "health": HealthSpec(period_s=0.3)})


def whole_trace(seed: int) -> list[TenantSpec]:
    """Return the four tenants with their real simulators; demonstrations are made first where there are none."""
    view = ViewSpec(cameras=("base_camera",), image_size=(IMAGE, IMAGE))
    demos = generate_demonstrations(
        "PushCube-v1", ROOT / "demos" / "quickstart", num_episodes=NUM_DEMONSTRATIONS, view=view
    )
    changes = ({"num_steps": 400}, {"num_episodes": 4, "video": 0})
    sft = _with(load_tenant(QUICKSTART / "push_cube_sft.yaml"), seed, *changes)
    sft["workloads"][0]["dataset"]["path"] = str(demos)
    tenants = [sft]
    for name, iterations in (("push_cube_rl", 5), ("pick_cube_rl", 5), ("libero_rl", 4)):
        tenants.append(_with(load_tenant(QUICKSTART / f"{name}.yaml"), seed, {"num_iterations": iterations}))
    return [TenantSpec.model_validate(each) for each in tenants]


def _with(tenant: TenantSpec, seed: int, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change a tenant's workloads, one mapping each, and shift its seed."""
    found = tenant.model_dump(mode="json")
    found["seed"] += 1000 * seed
    for workload, change in zip(found["workloads"], changes, strict=True):
        workload.update(change)
    return found


def quick_trace(folder: Path, seed: int) -> list[TenantSpec]:
    """Return four small tenants; the demonstrations are written to ``folder``."""
    return [
        TenantSpec.model_validate(each)
        for each in (
            _quick_sft(folder, seed),
            *(_quick_rl(name, seed, index) for index, name in enumerate(REACHERS, start=1)),
        )
    ]


def _policy(cameras: Sequence[str], state_dim: int, action_dim: int, module: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "backbone": "lite",
        "observation": {
            "cameras": list(cameras),
            "image_size": [IMAGE, IMAGE],
            "state_dim": state_dim,
            "max_prompt_tokens": 32,
        },
        "action": {"dim": action_dim, "horizon": 4, "num_action_steps": 4, "normalization": "identity"},
        "action_module": {"token_dim": 16, "max_prefix_tokens": 48, **module},
    }


def _quick_rl(name: str, seed: int, index: int) -> dict[str, Any]:
    policy = _policy(["render"], 10, 2, {"type": "gaussian", "hidden_dim": REACHERS[name]})
    policy["action"]["control_mode"] = "box"
    environment = {
        "type": "gym",
        "id": "Reacher-v5",
        "render": True,
        "max_episode_steps": 32,
        "kwargs": {"width": IMAGE, "height": IMAGE},
        "resources": {"num_cpus": 0.2},
    }
    workload = {
        "type": "rl",
        "algorithm": {"type": "ppo", "num_epochs": 4, "minibatch_size": 16},
        "environment": environment,
        "rollout": {"episodes_per_iteration": 4, "max_staleness": 1, "ship_features": "always"},
        "num_iterations": 2,
    }
    return {"tenant": name, "seed": 1000 * seed + index, "policy": policy, "workloads": [workload]}


def _quick_sft(folder: Path, seed: int) -> dict[str, Any]:
    path = _write_demonstrations(folder / "PushCube-v1.h5", seed)
    policy = _policy(["base_camera"], 9, 7, {"type": "oft", "hidden_dim": 64, "num_layers": 2})
    policy["action"] |= {"control_mode": "pd_ee_delta_pose", "gripper": "open_positive", "normalization": "mean_std"}
    workload = {
        "type": "sft",
        "dataset": {"type": "maniskill_h5", "path": str(path)},
        "num_steps": 96,
        "batch_size": 16,
        "optimizer": {"lr": 1e-3},
        "resources": {"num_cpus": 0.1},
    }
    return {"tenant": SFT, "seed": 1000 * seed, "checkpoint_every": 48, "policy": policy, "workloads": [workload]}


def _write_demonstrations(path: Path, seed: int, *, episodes: int = 8, steps: int = 16) -> Path:
    """Write noise in the layout of ManiSkill's demonstrations."""
    generator = np.random.default_rng(seed)
    listed: list[dict[str, Any]] = []
    with h5py.File(path, "w") as file:
        for index in range(episodes):
            group = file.create_group(f"traj_{index}")
            group["actions"] = generator.uniform(-1, 1, (steps, 7)).astype(np.float32)
            for flag in ("terminated", "truncated", "success"):
                group[flag] = np.zeros(steps, dtype=np.bool_)
            group["obs/agent/qpos"] = generator.standard_normal((steps + 1, 9)).astype(np.float32)
            group.create_group("obs/extra")
            frames = generator.integers(0, 256, (steps + 1, IMAGE, IMAGE, 3), dtype=np.uint8)
            group.create_dataset("obs/sensor_data/base_camera/rgb", data=frames)
            listed.append({"episode_id": index, "elapsed_steps": steps, "control_mode": "pd_ee_delta_pose"})
    kwargs = {"obs_mode": "rgb", "control_mode": "pd_ee_delta_pose", "robot_uids": "panda"}
    info = {"env_id": "PushCube-v1", "env_kwargs": kwargs, "max_episode_steps": 50}
    path.with_suffix(".json").write_text(json.dumps({"env_info": info, "commit_info": None, "episodes": listed}))
    return path
