"""Reading and verifying a ManiSkill trajectory file: ``name.h5`` with ``name.json`` beside it.

Layout, as ManiSkill's recorder writes it for an episode of T actions: ``traj_i/actions`` [T, a], ``obs/agent/*``,
``obs/extra/*`` and ``obs/sensor_data/<camera>/rgb`` with T + 1 entries each (the last is what the last action led to,
and starts no sample). All that is small is read here, once; images are left to
:class:`joynexus.data.frame_reader.FrameReader`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import h5py
import numpy as np
from jaxtyping import Float32
from pydantic import BaseModel, Field, ValidationError

from joynexus.errors import ContractError, DatasetError
from joynexus.specs.contract import StateField
from joynexus.specs.maniskill import maniskill_gripper, maniskill_state_layout, maniskill_state_order
from joynexus.types import Array

DIGEST_KEY = "recipe_digest"
"""Attribute of the ``.h5`` and key of the ``.json`` that tie the two to one generated recording, where present."""


class EnvironmentInfo(BaseModel):
    """``env_info`` of the JSON; other keys are ignored."""

    env_id: str
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    control_hz: float | None = None


class EpisodeInfo(BaseModel):
    """One entry of ``episodes`` of the JSON."""

    episode_id: int
    elapsed_steps: int | None = None
    control_mode: str | None = None


class FileInfo(BaseModel):
    """What the JSON must tell."""

    env_info: EnvironmentInfo
    episodes: list[EpisodeInfo]
    recipe_digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One demonstration, without its images."""

    name: str
    """Its group in the file, such as ``traj_3``."""
    states: Float32[Array, "t s"]
    """Before each action, in the layout of ``Trajectories.state``."""
    actions: Float32[Array, "t a"]
    cameras: Mapping[str, tuple[int, int]]
    """Height and width of its frames, by camera."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectories:
    """A verified file."""

    path: Path
    env_id: str
    robot: str
    control_mode: str
    control_hz: float | None
    state: tuple[StateField, ...]
    episodes: tuple[Episode, ...]
    """In the order of the JSON; never empty. All have the same widths and cameras."""


def find_file(path: Path) -> Path:
    """Find the ``.h5`` file that a dataset's path means.

    Args:
        path: The file, or a folder that holds exactly one.

    Raises:
        DatasetError: If there is none, more than one, or the file is no ``.h5`` with a ``.json`` beside it.
    """
    found = path
    if path.is_dir():
        files = sorted(each.name for each in path.glob("*.h5"))
        if len(files) != 1:
            _refuse(path, f"the folder holds {len(files)} .h5 files {files}. Name the one to use")
        found = path / files[0]
    if not found.is_file():
        _refuse(path, "no such file. Check the path, which is relative to the folder of the tenant's YAML")
    if found.suffix != ".h5":
        _refuse(path, f"a ManiSkill trajectory file ends in .h5, this one in {found.suffix!r}. Give the .h5 file")
    if not found.with_suffix(".json").is_file():
        _refuse(path, f"{found.with_suffix('.json').name} is missing beside it. Copy it too, or record the file again")
    return found


def read_trajectories(path: Path, *, max_episodes: int | None) -> Trajectories:
    """Verify a file and read all of it but the images, of which each episode's first and last are decoded.

    Args:
        path: From :func:`find_file`.
        max_episodes: Use the first N episodes of the JSON; None uses all.

    Raises:
        DatasetError: Naming the file, the episode and the remedy. The file is closed again in every case.
    """
    info = _read_info(path)
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check_pair(path, file, info)
            episodes = info.episodes[:max_episodes]
            state = _state_layout(path, file[f"traj_{episodes[0].episode_id}"])
            read = tuple(_read_episode(path, file[f"traj_{each.episode_id}"], each) for each in episodes)
            robot = _robot(path, info, file[read[0].name])
    except (OSError, RuntimeError) as error:
        raise DatasetError(f"dataset {path}: damaged or truncated ({error}). Copy or record it again.") from error
    _check_alike(path, read)
    return Trajectories(
        path=path,
        env_id=info.env_info.env_id,
        robot=robot,
        control_mode=_control_mode(path, info),
        control_hz=info.env_info.control_hz,
        state=state,
        episodes=read,
    )


def _refuse(path: Path, problem: str) -> NoReturn:
    raise DatasetError(f"dataset {path}: {problem}.")


def _read_info(path: Path) -> FileInfo:
    beside = path.with_suffix(".json")
    try:
        info = FileInfo.model_validate(json.loads(beside.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        what = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, what['loc']))}: {what['msg']}" if what else str(error)
        raise DatasetError(f"dataset {beside}: not a ManiSkill description ({reason}). Record it again.") from error
    if not info.episodes:
        _refuse(beside, "it lists no episodes. Record at least one successful demonstration")
    return info


def _check_pair(path: Path, file: Any, info: FileInfo) -> None:  # noqa: ANN401  # h5py has no types
    """Refuse an ``.h5`` and a ``.json`` that were not written together."""
    listed = [f"traj_{each.episode_id}" for each in info.episodes]
    missing = [name for name in listed if name not in file]
    unlisted = sorted(set(file) - set(listed))
    if missing or unlisted or len(set(listed)) != len(listed):
        _refuse(
            path,
            f"it does not belong to the .json beside it: listed there but missing {missing[:5]}, unlisted "
            f"{unlisted[:5]}, {len(listed) - len(set(listed))} listed twice. Copy both again",
        )
    digest = file.attrs.get(DIGEST_KEY)
    if digest != info.recipe_digest:
        _refuse(path, f"recipe digest {digest!r} differs from {info.recipe_digest!r} in the .json. Generate both again")


def _state_layout(path: Path, group: Any) -> tuple[StateField, ...]:  # noqa: ANN401
    observed = group.get("obs")
    if not isinstance(observed, h5py.Group) or "agent" not in observed:
        _refuse(
            path,
            f"{group.name} has no obs/agent. Replay it with observations: "
            "python -m mani_skill.trajectory.replay_trajectory --save-traj -o rgb --traj-path FILE",
        )
    widths = {name: _widths(observed.get(name, {})) for name in ("agent", "extra")}
    try:
        return maniskill_state_layout(widths["agent"], widths["extra"])
    except ContractError as error:
        raise DatasetError(f"dataset {path}: {group.name}: {error}") from error


def _widths(group: Any) -> dict[str, int]:  # noqa: ANN401
    """Flattened width of every dataset below a group; nested ones are named ``outer.inner``."""
    widths: dict[str, int] = {}
    for key, value in group.items():
        if isinstance(value, h5py.Dataset):
            widths[str(key)] = math.prod(cast("tuple[int, ...]", value.shape)[1:])
        else:
            widths |= {f"{key}.{inner}": width for inner, width in _widths(value).items()}
    return widths


def _read_episode(path: Path, group: Any, info: EpisodeInfo) -> Episode:  # noqa: ANN401
    name = f"traj_{info.episode_id}"
    actions = group.get("actions")
    if not isinstance(actions, h5py.Dataset) or actions.ndim != 2 or len(actions) == 0:  # noqa: PLR2004
        _refuse(path, f"{name}/actions is no table of actions. Give a file of one robot with a flat action space")
    steps = len(actions)
    if info.elapsed_steps not in (None, steps):
        _refuse(path, f"{name} has {steps} actions, the .json says {info.elapsed_steps}. Copy both again")
    for flag in ("terminated", "truncated", "success"):
        if flag in group and len(group[flag]) != steps:
            _refuse(path, f"{name}/{flag} has {len(group[flag])} entries for {steps} actions. Record it again")
    return Episode(
        name=name,
        states=_read_states(path, group, name, steps),
        actions=_finite(path, f"{name}/actions", cast("Array", actions[:]).astype(np.float32)),
        cameras=_check_images(path, group, name, steps),
    )


def _read_states(path: Path, group: Any, name: str, steps: int) -> Float32[Array, "t s"]:  # noqa: ANN401
    parts: list[Array] = []
    for kind, key in maniskill_state_order(_widths(group.get("obs/extra", {}))):
        place = f"obs/{kind}/{key.replace('.', '/')}"
        values = group.get(place)
        if values is None or len(values) != steps + 1:
            found = None if values is None else len(values)
            _refuse(path, f"{name}/{place} has {found} entries for {steps} actions, not {steps + 1}. Record it again")
        flat = cast("Array", values[:]).reshape(steps + 1, -1).astype(np.float32)
        parts.append(_finite(path, f"{name}/{place}", flat)[:steps])
    return np.concatenate(parts, axis=1)


def _finite(path: Path, place: str, values: Float32[Array, "t d"]) -> Float32[Array, "t d"]:
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0, 0])
        _refuse(path, f"{place} holds NaN or infinity at step {row}. Drop the episode or record it again")
    return values


def _check_images(path: Path, group: Any, name: str, steps: int) -> dict[str, tuple[int, int]]:  # noqa: ANN401
    sizes: dict[str, tuple[int, int]] = {}
    for camera, data in group["obs"].get("sensor_data", {}).items():
        rgb = data.get("rgb")
        if rgb is None:
            continue
        place = f"{name}/obs/sensor_data/{camera}/rgb"
        if rgb.dtype != np.uint8 or rgb.ndim != 4 or rgb.shape[-1] != 3:  # noqa: PLR2004
            _refuse(
                path, f"{place} is {rgb.dtype} {rgb.shape}, not uint8 frames of height x width x 3. Record it again"
            )
        if len(rgb) != steps + 1:
            _refuse(path, f"{place} has {len(rgb)} frames for {steps} actions, not {steps + 1}. Record it again")
        try:
            _ = rgb[0], rgb[steps]
        except OSError as error:
            raise DatasetError(
                f"dataset {path}: {place} can't be decoded ({error}). Copy or record it again."
            ) from error
        sizes[str(camera)] = (int(rgb.shape[1]), int(rgb.shape[2]))
    return sizes


def _check_alike(path: Path, episodes: tuple[Episode, ...]) -> None:
    first = episodes[0]
    for each in episodes[1:]:
        for what, mine, others in (
            ("actions", first.actions.shape[1], each.actions.shape[1]),
            ("state", first.states.shape[1], each.states.shape[1]),
            ("cameras", dict(first.cameras), dict(each.cameras)),
        ):
            if mine != others:
                _refuse(path, f"{what} are {mine} in {first.name} and {others} in {each.name}. Split the file")


def _control_mode(path: Path, info: FileInfo) -> str:
    modes = {each.control_mode for each in info.episodes if each.control_mode is not None}
    modes |= {str(mode) for mode in [info.env_info.env_kwargs.get("control_mode")] if mode is not None}
    if len(modes) != 1:
        _refuse(path.with_suffix(".json"), f"control_mode is {sorted(modes)}, not one word. Split or repair the file")
    return modes.pop()


def _robot(path: Path, info: FileInfo, group: Any) -> str:  # noqa: ANN401
    """Take the robot that the JSON names, or else the one known robot among the recorded articulations."""
    named = info.env_info.env_kwargs.get("robot_uids")
    if isinstance(named, list | tuple) and len(cast("list[object]", named)) == 1:
        named = cast("list[object]", named)[0]
    if isinstance(named, str):
        return named
    recorded = [str(each) for each in group.get("env_states/articulations", {})]
    known = [each for each in recorded if _is_known(each)]
    if named is not None or len(known) != 1:
        _refuse(
            path.with_suffix(".json"),
            f"the robot is not clear: robot_uids {named!r}, articulations {recorded}. Write one "
            "'robot_uids' into env_info.env_kwargs",
        )
    return known[0]


def _is_known(robot: str) -> bool:
    try:
        maniskill_gripper(robot)
    except ContractError:
        return False
    return True
