"""The smallest trajectory file in ManiSkill's layout that a tenant can train on, written without a simulator."""

import json
from pathlib import Path

import h5py
import numpy as np

STEPS = 6
STATE_DIM = 9
ACTION_DIM = 7


def write_file(
    path: Path,
    *,
    control_mode: str = "pd_ee_delta_pose",
    robot: str = "panda",
    episodes: int = 2,
    cameras: tuple[str, ...] = (),
) -> Path:
    """Write episodes whose state is ``qpos`` alone, without cameras or with frames of 16 x 16 noise."""
    with h5py.File(path, "w") as file:
        for index in range(episodes):
            group = file.create_group(f"traj_{index}")
            rng = np.random.default_rng(index)
            group["actions"] = rng.uniform(-1.0, 1.0, (STEPS, ACTION_DIM)).astype(np.float32)
            for flag in ("terminated", "truncated", "success"):
                group[flag] = np.zeros(STEPS, dtype=np.bool_)
            group["obs/agent/qpos"] = rng.standard_normal((STEPS + 1, STATE_DIM)).astype(np.float32)
            group.create_group("obs/extra")
            for camera in cameras:
                frames = rng.integers(0, 256, (STEPS + 1, 16, 16, 3), dtype=np.uint8)
                group[f"obs/sensor_data/{camera}/rgb"] = frames
    kwargs = {"obs_mode": "rgb", "control_mode": control_mode, "robot_uids": robot}
    listed = [{"episode_id": index, "elapsed_steps": STEPS, "control_mode": control_mode} for index in range(episodes)]
    info = {"env_id": "PickCube-v1", "env_kwargs": kwargs, "max_episode_steps": 50}
    path.with_suffix(".json").write_text(json.dumps({"env_info": info, "commit_info": None, "episodes": listed}))
    return path


def truncate(path: Path) -> Path:
    """Cut a file in the middle, as an interrupted copy does."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path
