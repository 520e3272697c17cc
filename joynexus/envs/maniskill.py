"""ManiSkill 3 tasks on the CPU (Tao et al. 2024, https://arxiv.org/abs/2410.00425).

ManiSkill renders in every step of a visual observation mode. Here its own ``get_obs`` is switched off after the task
is made, and its parts are called when the policy looks: a chunk is rendered once, and without cameras never.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import numpy as np
from jaxtyping import Float32, UInt8

from joynexus.envs.base import EpisodeStart
from joynexus.envs.frames import check_cameras, one_row
from joynexus.envs.stepping import Step, SteppedEnvironment
from joynexus.errors import AssetsMissingError, SpecError
from joynexus.specs.contract import InterfaceContract, StateField
from joynexus.specs.environment import EnvironmentSpec, ManiSkillSpec
from joynexus.specs.maniskill import maniskill_gripper, maniskill_state_layout, maniskill_state_order, task_instruction
from joynexus.specs.messages import suggest
from joynexus.types import Array, Observation, ViewSpec

RECORD_SIZE = 256
"""Side in pixels of the frames that are recorded for a person."""

Parts = dict[tuple[str, ...], Array]
"""Flattened entries of a nested observation, by path."""


class ManiSkillEnvironment(SteppedEnvironment):
    """One ManiSkill task in this process.

    Args:
        spec: The task.
        view: What the policy looks at.
        env: The task, made, with its time limit.
    """

    def __init__(self, spec: ManiSkillSpec, view: ViewSpec, env: Any) -> None:  # noqa: ANN401  # has no types
        self._spec = spec
        self._view = view
        self._env = env
        self._base: Any = env.unwrapped
        self._base.get_obs = _look_at_nothing
        self._low, self._high = _bounds(self._base.single_action_space, spec)
        self._contract = InterfaceContract(
            source=spec.label,
            cameras=tuple(self._base._sensors),  # noqa: SLF001  # no other list has all cameras
            image_size=None,
            state=_layout(self._parts(), spec),
            action_dim=int(self._low.size),
            control_mode=str(self._base.control_mode),
            gripper=maniskill_gripper(str(self._base.agent.uid)),
            control_hz=float(self._base.control_freq),
        )
        check_cameras(view, self._contract.cameras, source=spec.label)

    @classmethod
    def open(cls, spec: EnvironmentSpec, view: ViewSpec) -> "ManiSkillEnvironment":
        """Make the task; see :class:`joynexus.envs.base.Environment`."""
        if not isinstance(spec, ManiSkillSpec):
            raise SpecError(f"{spec.label}: {cls.__name__} takes a ManiSkillSpec, got {type(spec).__name__}.")
        env = _make(spec, view)
        try:
            return cls(spec, view, env)
        except Exception:
            env.close()
            raise

    @property
    def contract(self) -> InterfaceContract:
        """The facts of this task."""
        return self._contract

    def _begin(self, start: EpisodeStart) -> None:
        self._env.reset(seed=start.seed)

    def _advance(self, action: Float32[Array, " a"]) -> Step:
        _, reward, terminated, truncated, info = self._env.step(np.clip(action, self._low, self._high))
        return Step(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=bool(info.get("success", False)),
        )

    def _look(self) -> Observation:
        parts = self._parts()
        state = np.concatenate([parts[path] for path in _order(parts, self._spec)])
        return one_row(self._view, self._frames(), state, task_instruction(self._spec.task))

    def _parts(self) -> Parts:
        """Observe everything but the cameras. The methods are those that tasks override; ``get_obs`` would render."""
        info = self._base.get_info()
        observed = {"agent": self._base._get_obs_agent(), "extra": self._base._get_obs_extra(info)}  # noqa: SLF001
        return dict(_flat(observed))

    def _frames(self) -> dict[str, Array]:
        if not self._view.cameras:
            return {}
        sensors = self._base._sensors  # noqa: SLF001
        for unseen in set(sensors) - set(self._view.cameras):  # some tasks build them anew at a reset
            del sensors[unseen]
        taken = self._base._get_obs_sensor_data()  # noqa: SLF001
        return {camera: taken[camera]["rgb"][0].numpy() for camera in self._view.cameras}

    def _record(self) -> UInt8[Array, "h w 3"] | None:
        frame: Any = self._base.render_rgb_array()
        return None if frame is None else frame[0].numpy()

    def close(self) -> None:
        """Close the task."""
        self._env.close()


def _make(spec: ManiSkillSpec, view: ViewSpec) -> Any:  # noqa: ANN401  # has no types
    import gymnasium
    import torch

    torch.set_num_threads(1)
    _check_task(spec)
    _check_assets(spec)
    height, width = view.image_size
    modes = ["rgb"] if view.cameras else []
    modes += ["state_dict"] if spec.state == "privileged" else []
    options: dict[str, Any] = {"max_episode_steps": spec.max_episode_steps} if spec.max_episode_steps else {}
    if spec.robot is not None:
        options["robot_uids"] = spec.robot
    try:
        return gymnasium.make(
            spec.task,
            obs_mode="+".join(modes) or "none",
            control_mode=spec.control_mode,
            reward_mode=spec.reward_mode,
            sim_backend="physx_cpu",
            render_backend="cpu",
            sensor_configs={"width": width, "height": height, "shader_pack": spec.shader},
            human_render_camera_configs={"width": RECORD_SIZE, "height": RECORD_SIZE, "shader_pack": spec.shader},
            **options,
        )
    except FileNotFoundError as error:
        raise AssetsMissingError(f"{spec.label}: a file is missing: {error}. {_download_hint(spec)}") from error
    except (AssertionError, NotImplementedError, KeyError) as error:  # how ManiSkill refuses modes
        raise SpecError(
            f"{spec.label}: ManiSkill refuses control_mode {spec.control_mode!r} with reward_mode "
            f"{spec.reward_mode!r}: {error}. Take modes that the task and its robot have."
        ) from error


def _check_task(spec: ManiSkillSpec) -> None:
    from mani_skill.agents.registration import REGISTERED_AGENTS
    from mani_skill.utils.registration import REGISTERED_ENVS

    import_module("mani_skill.envs")  # registers the tasks
    if spec.task not in REGISTERED_ENVS:
        raise SpecError(f"{spec.label}: no such task. {suggest(spec.task, REGISTERED_ENVS)}")
    if spec.robot is not None and spec.robot not in REGISTERED_AGENTS:
        raise SpecError(f"{spec.label}: robot {spec.robot!r} does not exist. {suggest(spec.robot, REGISTERED_AGENTS)}")


def _check_assets(spec: ManiSkillSpec) -> None:
    """Refuse a task whose files are not here, before ManiSkill asks on the terminal or begins to download them."""
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    os.environ.pop("MS_SKIP_ASSET_DOWNLOAD_PROMPT", None)  # it means *yes, download*
    needed: list[str] = []
    for name in REGISTERED_ENVS[spec.task].asset_download_ids or []:
        is_group = name in assets.DATA_GROUPS
        needed += assets.expand_data_group_into_individual_data_source_ids(name) if is_group else [name]
    missing = [name for name in needed if not assets.is_data_source_downloaded(name)]
    if missing:
        raise AssetsMissingError(
            f"{spec.label}: {len(missing)} sets of assets are not on this machine, such as {missing[0]!r}. "
            f"{_download_hint(spec)}"
        )


def _download_hint(spec: ManiSkillSpec) -> str:
    return f"Download them beforehand: python -m mani_skill.utils.download_asset {spec.task}"


def _look_at_nothing(info: object = None, *, unflattened: bool = False) -> dict[str, Any]:
    """Stand in for ``get_obs``, which ``step`` and ``reset`` call."""
    del info, unflattened
    return {}


def _bounds(space: Any, spec: ManiSkillSpec) -> tuple[Float32[Array, " a"], Float32[Array, " a"]]:  # noqa: ANN401
    from gymnasium.spaces import Box

    if not isinstance(space, Box):
        raise SpecError(f"{spec.label}: action space is {space}, expected a Box. Take a task with one robot.")
    return np.asarray(space.low, dtype=np.float32), np.asarray(space.high, dtype=np.float32)


def _flat(nested: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Array]]:
    """Flatten nested tensors with a leading axis of 1, in their own order."""
    found: list[tuple[tuple[str, ...], Array]] = []
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found += _flat(cast("Mapping[str, Any]", value), (*path, key))
        else:
            found.append(((*path, key), np.asarray(value, dtype=np.float32).reshape(-1)))
    return found


def _order(parts: Parts, spec: ManiSkillSpec) -> list[tuple[str, ...]]:
    """Tell which parts make up the state, in order: all of them, in ManiSkill's, where it is privileged."""
    if spec.state == "privileged":
        return list(parts)
    extra = {".".join(path[1:]): path for path in parts if path[0] == "extra"}
    return [extra[key] if group == "extra" else (group, key) for group, key in maniskill_state_order(extra)]


def _layout(parts: Parts, spec: ManiSkillSpec) -> tuple[StateField, ...]:
    if spec.state == "privileged":
        return tuple(StateField(name=".".join(path[1:]), dim=value.size) for path, value in parts.items())
    widths: dict[str, dict[str, int]] = {"agent": {}, "extra": {}}
    for path, value in parts.items():
        widths[path[0]][".".join(path[1:])] = value.size
    return maniskill_state_layout(widths["agent"], widths["extra"])
