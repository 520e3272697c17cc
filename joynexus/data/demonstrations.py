"""Demonstrations from ManiSkill's own motion planner, recorded as a policy will see and act: images, control mode.

``python -m joynexus.data.demonstrations --task PushCube-v1 --num-episodes 30 --out demos`` writes
``demos/PushCube-v1.h5`` and ``.json``, which a ``maniskill_h5`` dataset reads. This process never imports a simulator:
planner and renderer run in a child process (:mod:`joynexus.data.demonstration_recorder`), whose crash can be told.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer
from pydantic import Field, ValidationError

from joynexus import errors
from joynexus.data.maniskill_file import DIGEST_KEY, read_trajectories
from joynexus.errors import DatasetError, JoyNexusError, SimulatorError, SpecError
from joynexus.specs.base import Spec
from joynexus.specs.messages import describe_errors
from joynexus.types import ViewSpec

ControlMode = Literal[
    "pd_joint_pos",
    "pd_joint_delta_pos",
    "pd_joint_target_delta_pos",
    "pd_ee_delta_pos",
    "pd_ee_delta_pose",
    "pd_ee_target_delta_pos",
    "pd_ee_target_delta_pose",
    "pd_ee_pose",
]
"""What ManiSkill can convert a planner's joint positions into."""

RECORDER = "joynexus.data.demonstration_recorder"
DEFAULT_VIEW = ViewSpec(cameras=("base_camera",), image_size=(128, 128))
Progress = Callable[[int, int], None]
"""Called with the episodes kept and the episodes tried so far, after each try."""


class DemonstrationRecipe(Spec):
    """All that decides what a recording holds; equal recipes give equal files."""

    task: str
    """Gymnasium id of a task that ManiSkill has a planner for."""
    num_episodes: int = Field(ge=1)
    """Successful episodes to keep."""
    cameras: tuple[str, ...] = Field(min_length=1)
    image_size: tuple[int, int]
    """Height and width of every camera, in pixels."""
    control_mode: ControlMode
    shader: Literal["minimal", "default"]
    robot: str | None
    """None takes the task's own."""
    seed: int = Field(ge=0)
    """Of the first try; try i is reset with ``seed + i``."""
    recorder: int = 1
    """Raised when the recorder changes what it writes."""

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def generate_demonstrations(  # noqa: PLR0913  # a recipe, by keyword
    task: str,
    out_dir: Path,
    *,
    num_episodes: int,
    view: ViewSpec = DEFAULT_VIEW,
    control_mode: str = "pd_ee_delta_pose",
    shader: str = "minimal",
    robot: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    stall_timeout_s: float = 300.0,
    progress: Progress | None = None,
) -> Path:
    """Record successful demonstrations of a ManiSkill task, or keep the file if the same recording is there already.

    The planner solves each seed in joint positions; its solution is converted step by step into ``control_mode`` and
    executed there, and only episodes that succeed *so* are kept, with exactly the actions that were executed. Images
    are rendered afterwards from the visited states, so that failures cost no rendering.

    Args:
        task: Gymnasium id, such as ``PushCube-v1``.
        out_dir: Folder for ``<task>.h5`` and ``<task>.json``; made if missing.
        num_episodes: Successful episodes to keep.
        view: Cameras and image size.
        control_mode: What the recorded actions mean; a :data:`ControlMode`.
        shader: ``minimal`` or ``default``; the same as in training and evaluation.
        robot: ``robot_uids``; None takes the task's own. ``panda_wristcam`` adds ``hand_camera``.
        seed: Of the first try. Evaluate on other seeds.
        overwrite: Replace a file of another recipe.
        stall_timeout_s: Give up when an episode takes longer.
        progress: Told after each try.

    Returns:
        The ``.h5`` file. Until it is complete it has another name, so that an interrupted run leaves none.

    Raises:
        DatasetError: If a file of another recipe is in the way, or the planner succeeds too seldom.
        SpecError: If the task has no planner, a camera or control mode does not exist, or a number is out of range.
        SimulatorError: If ManiSkill or a Vulkan device is missing, or the simulator died or hung.
        AssetsMissingError: If the task needs files that are not on this machine.
    """
    recipe = _recipe(
        task=task,
        num_episodes=num_episodes,
        cameras=view.cameras,
        image_size=view.image_size,
        control_mode=control_mode,
        shader=shader,
        robot=robot,
        seed=seed,
    )
    target = out_dir / f"{task}.h5"
    if _is_finished(target, recipe):
        return target
    if not overwrite and (target.exists() or target.with_suffix(".json").exists()):
        raise DatasetError(
            f"demonstrations {target}: a recording by another recipe, or a damaged one, is there. Give another folder, "
            f"or overwrite it."
        )
    if find_spec("mani_skill") is None or find_spec("mplib") is None:
        raise SimulatorError("demonstrations: ManiSkill or mplib is not installed. Install the extra joynexus[sim].")
    out_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{task}.", suffix=".partial", dir=out_dir))
    try:
        _record(recipe, folder, stall_timeout_s=stall_timeout_s, progress=progress)
        read_trajectories(folder / target.name, max_episodes=None)
        target.with_suffix(".json").unlink(missing_ok=True)  # an .h5 without it is no dataset: never half old, half new
        (folder / target.name).replace(target)
        (folder / target.name).with_suffix(".json").replace(target.with_suffix(".json"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _recipe(**values: object) -> DemonstrationRecipe:
    try:
        return DemonstrationRecipe.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(describe_errors(error, DemonstrationRecipe).lines)
        raise SpecError(f"demonstrations of {values['task']}: {problems}") from error


def _is_finished(target: Path, recipe: DemonstrationRecipe) -> bool:
    beside = target.with_suffix(".json")
    if not target.is_file() or not beside.is_file():
        return False
    try:
        if json.loads(beside.read_text(encoding="utf-8")).get(DIGEST_KEY) != recipe.digest:
            return False
        read_trajectories(target, max_episodes=None)
    except (OSError, ValueError):  # DatasetError is a ValueError
        return False
    return True


def _record(recipe: DemonstrationRecipe, folder: Path, *, stall_timeout_s: float, progress: Progress | None) -> None:
    """Run the recorder in a process of its own and follow its reports, one JSON object a line."""
    threads = {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", RECORDER, recipe.model_dump_json(), str(folder)],
            stdin=subprocess.DEVNULL,  # a question about downloads fails at once instead of waiting for an answer
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | threads,
            text=True,
        )
        with process:
            try:
                report, stalled = _follow(process, stall_timeout_s=stall_timeout_s, progress=progress)
            except BaseException:
                process.kill()
                raise
        if report.get("finished") and process.returncode == 0:
            return
        if "error" in report:
            raise getattr(errors, report["error"], SimulatorError)(report["message"])
        reason = f"no episode within {stall_timeout_s:g} s" if stalled else f"exit status {process.returncode}"
        raise SimulatorError(
            f"demonstrations of {recipe.task}: the recorder died: {reason}. mplib needs numpy 1.26, and ManiSkill a "
            f"Vulkan device (on a CPU: Mesa 25 or newer). Its last words:\n{_tail(log)}"
        )


def _follow(
    process: subprocess.Popen[str], *, stall_timeout_s: float, progress: Progress | None
) -> tuple[dict[str, Any], bool]:
    """Read reports until the recorder ends; return the last one, and whether it was killed for silence."""
    report: dict[str, Any] = {}
    stalled = threading.Event()

    def give_up() -> None:
        stalled.set()
        process.kill()

    lines = iter(process.stdout or ())
    while True:
        watchdog = threading.Timer(stall_timeout_s, give_up)
        watchdog.daemon = True
        watchdog.start()
        line = next(lines, None)
        watchdog.cancel()
        if line is None:
            return report, stalled.is_set()
        report = json.loads(line)
        if progress is not None and "kept" in report:
            progress(report["kept"], report["tried"])


def _tail(log: IO[bytes], *, lines: int = 8) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


def main(  # noqa: PLR0913  # one per option of the command line
    *,
    task: Annotated[str, typer.Option(help="Gymnasium id of a ManiSkill task with a motion planner.")],
    out: Annotated[Path, typer.Option(help="Folder for TASK.h5 and TASK.json.")] = Path("demos"),
    num_episodes: Annotated[int, typer.Option(help="Successful episodes to keep.")] = 30,
    camera: Annotated[list[str] | None, typer.Option(help="Repeatable; base_camera if left out.")] = None,
    size: Annotated[int, typer.Option(help="Height and width of the images, in pixels.")] = 128,
    control_mode: Annotated[str, typer.Option(help="What the recorded actions mean.")] = "pd_ee_delta_pose",
    shader: Annotated[str, typer.Option(help="minimal or default.")] = "minimal",
    robot: Annotated[str | None, typer.Option(help="robot_uids; panda_wristcam adds hand_camera.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first try.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of another recipe.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Record demonstrations of a ManiSkill task."""
    begin = time.monotonic()

    def show(kept: int, tried: int) -> None:
        typer.echo(f"{task}: kept {kept} of {num_episodes}, tried {tried}, {time.monotonic() - begin:.0f} s", err=True)

    try:
        recipe = {"control_mode": control_mode, "shader": shader, "robot": robot, "seed": seed}
        view = ViewSpec(cameras=tuple(camera or DEFAULT_VIEW.cameras), image_size=(size, size))
        options: dict[str, Any] = recipe | {"overwrite": overwrite, "progress": show}
        path = generate_demonstrations(task, out, num_episodes=num_episodes, view=view, **options)
    except JoyNexusError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    lengths = [len(each.actions) for each in read_trajectories(path, max_episodes=None).episodes]
    sizes = {"episodes": len(lengths), "frames": sum(lengths), "longest_episode": max(lengths)}
    result = {"path": str(path), **sizes, "seconds": round(time.monotonic() - begin, 1)}
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{path}: {len(lengths)} episodes, {sum(lengths)} frames, the longest has {max(lengths)} steps")


if __name__ == "__main__":
    typer.run(main)
