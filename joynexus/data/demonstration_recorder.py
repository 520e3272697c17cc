"""The process that plans, replays and renders demonstrations; started by :mod:`joynexus.data.demonstrations` alone.

Reports go to what was standard output, one JSON object a line; whatever ManiSkill prints goes to standard error.
ManiSkill's modules are imported by name, since it is optional and has hardly any types.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import gymnasium
import h5py
import numpy as np
import torch

from joynexus.data.demonstrations import DemonstrationRecipe
from joynexus.data.maniskill_file import DIGEST_KEY
from joynexus.errors import AssetsMissingError, DatasetError, JoyNexusError, SimulatorError, SpecError
from joynexus.specs.messages import suggest

Report = Callable[[dict[str, Any]], None]
Tree = dict[str, Any]
"""Nested dictionaries of arrays."""


class ActionLog(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Remembers the actions of an episode and how it was reset."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401, D102
        self.actions: list[np.ndarray[Any, Any]] = []
        self.reset_kwargs = kwargs
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401, D102
        self.actions.append(np.asarray(action, dtype=np.float32).reshape(-1))
        return self.env.step(self.actions[-1])


class Stage(ActionLog):
    """The environment of the recording: keeps what each step led to, and renders nothing until it is asked to.

    Proprioception is taken live, since some of it (contact forces, hence ``is_grasped``) can't be had again from a
    saved state; what a camera sees can.
    """

    def __init__(self, env: Any) -> None:  # noqa: ANN401
        super().__init__(env)
        # In mode "none" neither reset nor step renders; obs_mode_struct still says what the cameras give.
        env.unwrapped._obs_mode = "none"  # noqa: SLF001  # ManiSkill has no public switch

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401, D102
        self.states: list[Tree] = []
        self.observations: list[Tree] = []
        self.flags: list[tuple[bool, bool, bool]] = []
        obs, info = super().reset(**kwargs)
        self._keep(info)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401, D102
        outcome = super().step(action)
        _, _, terminated, truncated, info = outcome
        self.flags.append((bool(terminated), bool(truncated), bool(info["success"])))
        self._keep(info)
        return outcome

    def _keep(self, info: dict[str, Any]) -> None:
        base: Any = self.unwrapped
        self.states.append(_arrays(base.get_state_dict()))
        self.observations.append(_arrays(base._get_obs_state_dict(info)))  # noqa: SLF001  # what get_obs puts beside images

    def render_states(self, cameras: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
        """Render every visited state once; one array [time, height, width, 3] per camera."""
        base: Any = self.unwrapped
        frames: dict[str, list[np.ndarray[Any, Any]]] = {camera: [] for camera in cameras}
        for unseen in set(base.scene.sensors) - set(cameras):
            del base.scene.sensors[unseen]  # rendering costs the same for every camera
        for state in self.states:
            base.set_state_dict(_tensors(state))
            seen = base._get_obs_sensor_data()  # noqa: SLF001  # get_obs would also read proprioception
            for camera in cameras:
                frames[camera].append(seen[camera]["rgb"][0].cpu().numpy().copy())
        return {camera: np.stack(each) for camera, each in frames.items()}


def record(recipe: DemonstrationRecipe, folder: Path, report: Report) -> None:
    """Record a whole file.

    Raises:
        SpecError: If the task has no planner, or a camera or control mode does not exist.
        DatasetError: If the planner succeeds too seldom.
    """
    solve = _planner(recipe.task)
    fixed: dict[str, Any] = {"sim_backend": "physx_cpu", "render_backend": "cpu", "reward_mode": "none"}
    if recipe.robot is not None:
        fixed["robot_uids"] = recipe.robot
    height, width = recipe.image_size
    sensors = {"height": height, "width": width, "shader_pack": recipe.shader}
    shown = fixed | {"obs_mode": "rgb", "control_mode": recipe.control_mode, "sensor_configs": sensors}
    planned = fixed | {"obs_mode": "none", "control_mode": "pd_joint_pos"}
    make: Any = gymnasium.make
    planner, stage = ActionLog(make(recipe.task, **planned)), Stage(make(recipe.task, **shown))
    _check_cameras(stage, recipe)
    base: Any = stage.unwrapped
    shown["robot_uids"] = base.robot_uids
    episodes: list[dict[str, Any]] = []
    limit = 4 * recipe.num_episodes + 20
    with h5py.File(folder / f"{recipe.task}.h5", "w", track_order=True) as file:
        file.attrs[DIGEST_KEY] = recipe.digest
        for tried in range(1, limit + 1):
            seed = recipe.seed + tried - 1
            if _perform(solve, seed, planner, stage, recipe.control_mode):
                _write_episode(file.create_group(f"traj_{len(episodes)}", track_order=True), stage, recipe.cameras)
                episodes.append(_describe(len(episodes), seed, stage, recipe.control_mode))
            report({"kept": len(episodes), "tried": tried})
            if len(episodes) == recipe.num_episodes:
                break
    if len(episodes) < recipe.num_episodes:
        raise DatasetError(
            f"demonstrations of {recipe.task}: {len(episodes)} of {limit} tries succeeded in {recipe.control_mode!r}, "
            f"{recipe.num_episodes} are wanted. Take another control mode, or fewer episodes."
        )
    info = {"env_id": recipe.task, "env_kwargs": shown, "control_hz": base.control_freq}
    info["max_episode_steps"] = import_module("mani_skill.utils.gym_utils").find_max_episode_steps_value(stage)
    described = {"env_info": info, "commit_info": None, "episodes": episodes, DIGEST_KEY: recipe.digest}
    described |= {"source_type": "motionplanning", "source_desc": "ManiSkill's motion planning solution, replayed"}
    described["recipe"] = recipe.model_dump(mode="json")
    (folder / f"{recipe.task}.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def _planner(task: str) -> Callable[..., Any]:
    if int(np.__version__.split(".")[0]) > 1:
        raise SimulatorError(f"demonstrations: mplib crashes on numpy {np.__version__}. Install numpy 1.26.4.")
    import_module("mani_skill.envs")  # registers the tasks
    solutions: dict[str, Callable[..., Any]]
    solutions = import_module("mani_skill.examples.motionplanning.panda.run").MP_SOLUTIONS
    if task not in solutions:
        raise SpecError(f"demonstrations: ManiSkill has no planner for task {task!r}. {suggest(task, solutions)}")
    return solutions[task]


def _check_cameras(stage: Stage, recipe: DemonstrationRecipe) -> None:
    base: Any = stage.unwrapped
    stage.reset(seed=recipe.seed)
    offered = sorted(base.scene.sensors)
    missing = [camera for camera in recipe.cameras if camera not in offered]
    if missing:
        raise SpecError(
            f"demonstrations of {recipe.task}: cameras {missing} do not exist, it has {offered}. Take one of them, or "
            f"the robot 'panda_wristcam' for 'hand_camera'."
        )


def _perform(solve: Callable[..., Any], seed: int, planner: ActionLog, stage: Stage, control_mode: str) -> bool:
    """Plan one seed, and execute the plan in the control mode of the recording; tell whether that succeeded."""
    try:
        solved = solve(planner, seed=seed, debug=False, vis=False)
    except Exception as error:  # noqa: BLE001  # planners raise whatever they like where they find no path
        sys.stderr.write(f"seed {seed}: no plan: {error}\n")
        return False
    if isinstance(solved, int) or not bool(solved[-1]["success"]):
        return False
    plan, reset_kwargs = planner.actions, planner.reset_kwargs
    stage.reset(**reset_kwargs)
    if control_mode == "pd_joint_pos":
        for action in plan:
            stage.step(action)
    else:
        # The converter follows the plan in the planner's own environment, for the targets that it commands.
        planner.reset(**reset_kwargs)
        conversion = import_module("mani_skill.trajectory.utils.actions.conversion")
        conversion.from_pd_joint_pos(control_mode, plan, planner, stage)
    return stage.flags[-1][2]


def _write_episode(group: Any, stage: Stage, cameras: tuple[str, ...]) -> None:  # noqa: ANN401  # h5py has no types
    """Write one episode as ManiSkill's recorder does, but one frame a chunk: training reads frames singly."""
    group["actions"] = np.stack(stage.actions)
    for name, values in zip(("terminated", "truncated", "success"), zip(*stage.flags, strict=True), strict=True):
        group[name] = np.asarray(values, dtype=np.bool_)
    _write_tree(group.create_group("env_states", track_order=True), stage.states)
    observed = group.create_group("obs", track_order=True)
    _write_tree(observed, stage.observations)
    for camera, frames in stage.render_states(cameras).items():
        observed.create_dataset(
            f"sensor_data/{camera}/rgb",
            data=frames,
            chunks=(1, *frames.shape[1:]),
            compression="gzip",
            compression_opts=4,
        )


def _write_tree(group: Any, moments: list[Tree]) -> None:  # noqa: ANN401
    for key, value in moments[0].items():
        column = [moment[key] for moment in moments]
        if isinstance(value, dict):
            _write_tree(group.create_group(key, track_order=True), column)
        else:
            group[key] = np.concatenate(column)


def _describe(index: int, seed: int, stage: Stage, control_mode: str) -> dict[str, Any]:
    return {
        "episode_id": index,
        "episode_seed": seed,
        "control_mode": control_mode,
        "elapsed_steps": len(stage.actions),
        "reset_kwargs": stage.reset_kwargs,
        "success": stage.flags[-1][2],
    }


def _arrays(tree: Mapping[str, Any]) -> Tree:
    """Copy a tree of tensors; every leaf keeps its first axis of one environment."""
    copied: Tree = {}
    for key, value in tree.items():
        copied[key] = _arrays(cast("Tree", value)) if isinstance(value, dict) else value.cpu().numpy().copy()
    return copied


def _tensors(tree: Mapping[str, Any]) -> Tree:
    return {
        key: _tensors(cast("Tree", value)) if isinstance(value, dict) else torch.from_numpy(value)
        for key, value in tree.items()
    }


def _typed(error: Exception, task: str) -> JoyNexusError:
    """Say in joynexus's own classes what went wrong in the simulator."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, JoyNexusError):
        return error
    if isinstance(error, EOFError | FileNotFoundError):
        return AssetsMissingError(f"demonstrations of {task}: it needs assets that are not here ({text}).")
    if any(word in text.lower() for word in ("vulkan", "physical device", "vk::")):
        return SimulatorError(
            f"demonstrations of {task}: no usable Vulkan device ({text}). Install one; on a CPU, Mesa 25 or newer "
            f"(package mesa-vulkan-drivers)."
        )
    return SimulatorError(f"demonstrations of {task}: the simulator failed: {text}")


def main() -> None:
    """Record what the first argument, a recipe in JSON, says into the folder that the second one names."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # ManiSkill prints what it likes to standard output

    def report(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    recipe = DemonstrationRecipe.model_validate_json(sys.argv[1])
    torch.set_num_threads(1)
    try:
        record(recipe, Path(sys.argv[2]), report)
    except Exception as error:  # whatever it is has to reach the parent
        typed = _typed(error, recipe.task)
        report({"error": type(typed).__name__, "message": str(typed)})
        raise SystemExit(1) from error
    report({"finished": True})


if __name__ == "__main__":
    main()
