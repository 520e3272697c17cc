"""LIBERO tasks (Liu et al. 2023, https://arxiv.org/abs/2306.03310) in the observation convention of LeRobot.

``image`` is the scene camera and ``image2`` the wrist's, both as LeRobot's datasets have them: the raw frame turned by
180 degrees, which is the mirror image of the true view. The state is the end effector's position (3) and axis-angle
(3) and the gripper's two joints; the action is OSC_POSE (7), with +1 closing the gripper.

LIBERO renders in every step. Here it never does: frames are rendered when the policy looks.
"""

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from joynexus.envs.base import EpisodeStart
from joynexus.envs.frames import check_cameras, one_row, rotated_180
from joynexus.envs.rendering import prepare_mujoco
from joynexus.envs.stepping import Step, SteppedEnvironment
from joynexus.errors import AssetsMissingError, SpecError
from joynexus.specs.contract import InterfaceContract, StateField
from joynexus.specs.environment import EnvironmentSpec, LiberoSpec
from joynexus.specs.messages import suggest
from joynexus.types import Array, Observation, ViewSpec

CAMERAS = {"image": "agentview", "image2": "robot0_eye_in_hand"}
"""LeRobot's names, and the simulator's."""
NO_OP = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""Stay, with an open gripper."""
STEP_LIMITS = {
    "libero_spatial": 280,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_90": 400,
    "libero_10": 520,
}
"""Of the standard suites, after settling; a variant such as ``libero_goal_swap`` has its suite's own."""
OTHER_STEP_LIMIT = 520
RECORD_SIZE = 256
"""Side in pixels of the frames that are recorded for a person."""

_TOLD_IN_TASK_FILE = ("_lan", "_task", "_study_table")
"""Ends of the suites whose instructions were changed: there the name of a task file still tells the old one."""


def step_limit(suite: str) -> int:
    """Return how many steps an episode of a suite may take."""
    fitting = [name for name in STEP_LIMITS if suite == name or suite.startswith(f"{name}_")]
    return STEP_LIMITS[fitting[0]] if fitting else OTHER_STEP_LIMIT


class LiberoEnvironment(SteppedEnvironment):
    """One LIBERO task in this process.

    Args:
        spec: The task.
        view: What the policy looks at.
        control: LIBERO's environment.
        initial_states: Flattened MuJoCo states, one per row.
        instruction: What the policy is told.
    """

    def __init__(
        self,
        spec: LiberoSpec,
        view: ViewSpec,
        *,
        control: Any,  # noqa: ANN401  # has no types
        initial_states: Array,
        instruction: str,
    ) -> None:
        self._spec = spec
        self._view = view
        self._control = control
        self._is_closed = False
        self._initial_states = initial_states
        self._instruction = instruction
        self._limit = spec.max_episode_steps or step_limit(spec.suite)
        self._num_steps = 0
        self._observed: Any = None
        self._contract = InterfaceContract(
            source=spec.label,
            cameras=tuple(CAMERAS),
            image_size=None,
            orientation="flipped_horizontal",
            state=(
                StateField(name="eef_pos", dim=3),
                StateField(name="eef_axis_angle", dim=3),
                StateField(name="gripper_qpos", dim=2),
            ),
            action_dim=7,
            control_mode="osc_pose",
            gripper="close_positive",
            control_hz=float(control.env.control_freq),
        )

    @classmethod
    def open(cls, spec: EnvironmentSpec, view: ViewSpec) -> "LiberoEnvironment":
        """Load the task; see :class:`joynexus.envs.base.Environment`."""
        if not isinstance(spec, LiberoSpec):
            raise SpecError(f"{spec.label}: {cls.__name__} takes a LiberoSpec, got {type(spec).__name__}.")
        check_cameras(view, tuple(CAMERAS), source=spec.label)
        _prepare_process()
        suite, task = _find_task(spec)
        task_file = _task_file(spec, task)
        try:
            initial_states = suite.get_task_init_states(spec.task_id)
        except FileNotFoundError as error:
            raise _missing(spec, str(error)) from error
        control = _make(task_file, can_render=bool(view.cameras))
        is_told_in_file = spec.suite.endswith(_TOLD_IN_TASK_FILE)
        instruction = str(control.language_instruction if is_told_in_file else task.language)
        return cls(spec, view, control=control, initial_states=initial_states, instruction=instruction)

    @property
    def contract(self) -> InterfaceContract:
        """The facts of this task."""
        return self._contract

    def _begin(self, start: EpisodeStart) -> None:
        for robot in self._control.robots:
            # A gripper moves relative to the action that it remembers, and a soft reset does not make it forget.
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        self._control.seed(start.seed % 2**32)
        self._control.reset()
        self._observed = self._control.set_init_state(
            self._initial_states[start.initial_state % len(self._initial_states)]
        )
        for _ in range(self._spec.num_settling_steps):
            self._observed, *_ = self._control.step(NO_OP)
        self._num_steps = 0

    def _advance(self, action: Float32[Array, " a"]) -> Step:
        self._observed, *_ = self._control.step(np.clip(action, -1.0, 1.0))
        self._num_steps += 1
        success = bool(self._control.check_success())
        return Step(
            reward=float(success), terminated=success, truncated=self._num_steps >= self._limit, success=success
        )

    def _look(self) -> Observation:
        transforms: Any = import_module("robosuite.utils.transform_utils")
        seen = self._observed
        rotation = transforms.quat2axisangle(seen["robot0_eef_quat"])
        parts = (seen["robot0_eef_pos"], rotation, seen["robot0_gripper_qpos"])
        height, width = self._view.image_size
        frames = {name: rotated_180(self._render(CAMERAS[name], height, width)) for name in self._view.cameras}
        return one_row(self._view, frames, np.concatenate(parts).astype(np.float32), self._instruction)

    def _record(self) -> UInt8[Array, "h w 3"] | None:
        if not self._view.cameras:
            return None
        return np.ascontiguousarray(self._render(CAMERAS["image"], RECORD_SIZE, RECORD_SIZE)[::-1])

    def _render(self, camera: str, height: int, width: int) -> UInt8[Array, "h w 3"]:
        """Render a raw frame: upside down, as OpenGL has it."""
        return self._control.sim.render(camera_name=camera, height=height, width=width)

    def close(self) -> None:
        """Free the simulator."""
        if not self._is_closed:
            self._is_closed = True
            self._control.close()


def _prepare_process() -> None:
    """Set up what robosuite reads at its import, which is once in a process."""
    import torch

    torch.set_num_threads(1)
    renderer = prepare_mujoco(os.environ)
    if renderer is not None and renderer.warning is not None:
        logging.getLogger(__name__).warning(renderer.warning)
    # robosuite logs into one fixed file in the temporary folder, which fails where another user of the machine owns it.
    private = ModuleType("robosuite.macros_private")
    private.FILE_LOGGING_LEVEL = None  # pyright: ignore[reportAttributeAccessIssue]
    private.CONSOLE_LOGGING_LEVEL = "WARN"  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules.setdefault("robosuite.macros_private", private)


def _find_task(spec: LiberoSpec) -> tuple[Any, Any]:
    benchmark: Any = import_module("libero.libero.benchmark")
    suites: dict[str, Any] = benchmark.get_benchmark_dict()
    if spec.suite not in suites:
        raise SpecError(f"{spec.label}: no such suite. {suggest(spec.suite, suites)}")
    suite = suites[spec.suite]()
    names: list[str] = suite.get_task_names()
    if not names:
        raise _missing(spec, "the suite has no tasks here")
    if spec.task_id >= len(names):
        known = ", ".join(f"{index} {name}" for index, name in enumerate(names[:10]))
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""  # noqa: PLR2004  # as above
        raise SpecError(f"{spec.label}: the suite has tasks 0 to {len(names) - 1}: {known}{more}. Correct task_id.")
    return suite, suite.get_task(spec.task_id)


def _task_file(spec: LiberoSpec, task: Any) -> Path:  # noqa: ANN401  # has no types
    paths: Any = import_module("libero.libero")
    path = Path(paths.get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
    if not path.is_file():
        raise _missing(spec, f"there is no {task.problem_folder}/{task.bddl_file}")
    return path


def _missing(spec: LiberoSpec, what: str) -> AssetsMissingError:
    return AssetsMissingError(
        f"{spec.label}: {what}. Install the package whole (its assets are packages of their own), or take one of the "
        "standard suites: libero_spatial, libero_object, libero_goal, libero_90, libero_10."
    )


def _make(task_file: Path, *, can_render: bool) -> Any:  # noqa: ANN401  # has no types
    wrapper: Any = import_module("libero.libero.envs.env_wrapper")
    control = wrapper.ControlEnv(
        bddl_file_name=str(task_file),
        use_camera_obs=False,
        has_offscreen_renderer=can_render,
        hard_reset=False,  # the model is loaded once; a reset takes 0.4 s in place of 2
        ignore_done=True,  # the time limit is ours
    )
    if can_render:
        _render_fast(control.sim)
    return control


def _render_fast(sim: Any) -> None:  # noqa: ANN401  # has no types
    """Switch off multisampling and reflections: 2.5 times the frames, which differ by 2.7 of 255 in the mean.

    The same in training and evaluation, as every frame comes from here.
    """
    mujoco: Any = import_module("mujoco")
    context = sim._render_context_offscreen  # noqa: SLF001  # robosuite has no other way to its context
    context.model._model.vis.quality.offsamples = 0  # noqa: SLF001
    context.con.free()
    context._set_mujoco_context_and_buffers()  # noqa: SLF001
    context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
