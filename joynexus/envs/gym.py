"""Any gymnasium environment with Box observations and a Box action (Towers et al. 2024, arXiv 2407.17032).

The observation becomes the flat state; a ``Dict`` of boxes is flattened in the order of its keys. With
``render: true`` its ``rgb_array`` frames are the camera ``render``.
"""

from difflib import get_close_matches
from typing import Any, TypeGuard, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from jaxtyping import Float32, UInt8

from joynexus.envs.base import EpisodeStart
from joynexus.envs.frames import check_cameras, fit, one_row
from joynexus.envs.stepping import Step, SteppedEnvironment
from joynexus.errors import SpecError
from joynexus.specs.contract import InterfaceContract, StateField
from joynexus.specs.environment import EnvironmentSpec, GymSpec
from joynexus.types import Array, Observation, ViewSpec

CAMERA = "render"
"""The one camera: what ``env.render()`` draws."""


class GymEnvironment(SteppedEnvironment):
    """One gymnasium environment."""

    def __init__(self, spec: GymSpec, view: ViewSpec, env: "gymnasium.Env[Any, Any]") -> None:
        self._spec = spec
        self._view = view
        self._env = env
        self._observed: Any = None
        self._low, self._high, self._shape = _action_bounds(env.action_space, spec.label)
        self._contract = InterfaceContract(
            source=spec.label,
            cameras=(CAMERA,) if spec.render else (),
            image_size=None,
            state=tuple(_layout(env.observation_space, "state", spec.label)),
            action_dim=int(self._low.size),
            control_mode="box",
            gripper="none",
        )

    @classmethod
    def open(cls, spec: EnvironmentSpec, view: ViewSpec) -> "GymEnvironment":
        """Make the environment; see :class:`joynexus.envs.base.Environment`."""
        if not isinstance(spec, GymSpec):
            raise SpecError(f"{spec.label}: {cls.__name__} takes a GymSpec, got {type(spec).__name__}.")
        check_cameras(view, (CAMERA,) if spec.render else (), source=spec.label)
        env = _make(spec)
        try:
            return cls(spec, view, env)
        except Exception:
            env.close()
            raise

    @property
    def contract(self) -> InterfaceContract:
        """The facts of this environment."""
        return self._contract

    def _begin(self, start: EpisodeStart) -> None:
        self._observed, _ = self._env.reset(seed=start.seed, options={"initial_state": start.initial_state})

    def _advance(self, action: Float32[Array, " a"]) -> Step:
        bounded = np.clip(action, self._low, self._high).astype(self._low.dtype).reshape(self._shape)
        self._observed, reward, terminated, truncated, info = self._env.step(bounded)
        success = bool(info.get(self._spec.success_key, False)) if self._spec.success_key else False
        return Step(reward=float(reward), terminated=bool(terminated), truncated=bool(truncated), success=success)

    def _look(self) -> Observation:
        frame = self._record() if self._view.cameras else None
        frames = {} if frame is None else {CAMERA: fit(frame, self._view.image_size)}
        state = np.concatenate([np.zeros(0, dtype=np.float32), *_values(self._env.observation_space, self._observed)])
        return one_row(self._view, frames, state, self._spec.instruction)

    def _record(self) -> UInt8[Array, "h w 3"] | None:
        if not self._spec.render:
            return None
        frame = cast("Any", self._env.render())
        return None if frame is None else np.ascontiguousarray(frame, dtype=np.uint8)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _make(spec: GymSpec) -> "gymnasium.Env[Any, Any]":
    options: dict[str, Any] = dict(spec.kwargs)
    if spec.render:
        options["render_mode"] = "rgb_array"
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    try:
        return gymnasium.make(spec.id, disable_env_checker=True, **options)
    except ModuleNotFoundError as error:
        raise SpecError(f"{spec.label}: cannot be imported: {error} Install it, or correct the id.") from error
    except gymnasium.error.Error as error:
        near = get_close_matches(spec.id.rpartition(":")[2], list(gymnasium.registry), n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else "Is the module that registers it named, as in 'module:Id'?"
        raise SpecError(f"{spec.label}: cannot be made: {str(error).rstrip('.')}. {hint}") from error


def _action_bounds(
    space: "spaces.Space[Any]", label: str
) -> tuple[Float32[Array, " a"], Float32[Array, " a"], tuple[int, ...]]:
    if not isinstance(space, spaces.Box):
        raise SpecError(f"{label}: action space is {space}, expected a Box. Wrap the environment.")
    low = np.asarray(space.low, dtype=np.float32).reshape(-1)
    high = np.asarray(space.high, dtype=np.float32).reshape(-1)
    return low, high, tuple(space.shape)


def _layout(space: "spaces.Space[Any]", name: str, label: str) -> list[StateField]:
    if isinstance(space, spaces.Box):
        return [StateField(name=name, dim=int(np.prod(space.shape)))]
    if _is_dict(space):
        prefix = "" if name == "state" else f"{name}."
        return [each for key, part in space.spaces.items() for each in _layout(part, f"{prefix}{key}", label)]
    raise SpecError(f"{label}: observation {name!r} is {space}, expected a Box or a Dict of Box. Wrap the environment.")


def _values(space: "spaces.Space[Any]", observed: Any) -> list[Float32[Array, " d"]]:  # noqa: ANN401  # gymnasium's own
    if _is_dict(space):
        return [each for key, part in space.spaces.items() for each in _values(part, observed[key])]
    return [np.asarray(observed, dtype=np.float32).reshape(-1)]


def _is_dict(space: "spaces.Space[Any]") -> "TypeGuard[spaces.Dict[Any]]":
    return isinstance(space, spaces.Dict)
