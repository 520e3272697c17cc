"""Small trajectory files in ManiSkill's own layout, written without a simulator."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

Writer = Callable[..., Path]

SIZE = (16, 24)


def _episode(group: h5py.Group, index: int, steps: int, *, cameras: Sequence[str], size: tuple[int, int]) -> None:
    """Write an episode whose every value tells its episode, step and place."""
    time = np.arange(steps + 1, dtype=np.float32)
    group["actions"] = (100 * index + time[:steps, None]) + np.arange(7, dtype=np.float32) / 10
    for flag in ("terminated", "truncated", "success"):
        group[flag] = np.zeros(steps, dtype=np.bool_)
    group["success"][-1] = True
    group["env_states/articulations/panda"] = np.zeros((steps + 1, 31), dtype=np.float32)
    group["env_states/actors/cube"] = np.zeros((steps + 1, 13), dtype=np.float32)
    agent = group.create_group("obs/agent", track_order=True)
    qpos = np.full((steps + 1, 9), index, dtype=np.float32)
    qpos[:, 8] = time
    agent["qpos"] = qpos
    agent["qvel"] = np.full((steps + 1, 9), -1.0, dtype=np.float32)
    extra = group.create_group("obs/extra", track_order=True)
    extra["tcp_pose"] = np.broadcast_to(time[:, None], (steps + 1, 7)).copy()
    extra["is_grasped"] = (time % 2).astype(np.bool_)
    extra["goal_pos"] = np.full((steps + 1, 3), 5.0, dtype=np.float32)
    for number, camera in enumerate(cameras):
        frames = np.zeros((steps + 1, *size, 3), dtype=np.uint8)
        frames[..., 0], frames[..., 2] = index, number
        frames[..., 1] = time[:, None, None]
        group.create_dataset(f"obs/sensor_data/{camera}/rgb", data=frames, compression="gzip", compression_opts=5)


@pytest.fixture
def write_file(tmp_path: Path) -> Writer:
    """Return a function that writes one file with the given episode lengths."""

    def write(
        name: str = "PickCube-v1.h5",
        *,
        lengths: Sequence[int] = (10, 10, 10),
        cameras: Sequence[str] = ("base_camera", "hand_camera"),
        size: tuple[int, int] = SIZE,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kwargs = {"obs_mode": "rgb", "control_mode": "pd_ee_delta_pose", "sim_backend": "physx_cpu"}
        episodes: list[dict[str, Any]] = []
        with h5py.File(path, "w") as file:
            for index, steps in enumerate(lengths):
                _episode(file.create_group(f"traj_{index}"), index, steps, cameras=cameras, size=size)
                episodes.append(
                    {"episode_id": index, "elapsed_steps": steps, "control_mode": "pd_ee_delta_pose", "success": True}
                )
        info = {"env_id": "PickCube-v1", "env_kwargs": kwargs | dict(env_kwargs or {}), "max_episode_steps": 50}
        path.with_suffix(".json").write_text(json.dumps({"env_info": info, "commit_info": None, "episodes": episodes}))
        return path

    return write
