"""Fake environments, sessions and policies: fast, exact, and able to fail in every way that real ones do.

Importing this module registers the gymnasium ids, so that a spec can name them in any process::

    GymSpec(id="joynexus.testing.fakes:Counter-v0", kwargs={"terminate_at": 5})
"""

import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from jaxtyping import Float32

from joynexus.envs.base import EpisodeStart
from joynexus.envs.gym import GymEnvironment
from joynexus.envs.session import Outcome, Session
from joynexus.errors import SimulatorError
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import GymSpec
from joynexus.types import ActionChunk, Array, PredictRequest, PrefixArrays, ViewSpec

COUNTER = "joynexus.testing.fakes:Counter-v0"
"""Gymnasium id of :class:`CounterEnv`."""


class CounterEnv(gymnasium.Env[Any, Any]):
    """Counts its steps. State: count, resets of this instance, initial state and seed of the episode.

    The reward of a step is its action.

    Args:
        first: Count after a reset.
        terminate_at: End with success at this count.
        fail_at: End without success at this count.
        truncate_at: Truncate at this count.
        raise_at: Raise ``RuntimeError`` at this count.
        die_at: End the process without a word at this count.
        hang_at: Sleep for an hour at this count.
        step_s: Sleep this long in every step.
        leak_bytes: Allocate, and keep, this many bytes at every reset.
        is_asking: Ask a question on the terminal at the first reset, as simulators do for missing assets.
        is_black: Render black frames.
        is_repeatable: Leave the number of resets, which tells one process of an environment from the next, at 0.
        render_mode: Gymnasium's own.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # gymnasium's own declaration

    def __init__(  # noqa: PLR0913  # one argument per fault
        self,
        *,
        first: int = 0,
        terminate_at: int | None = None,
        fail_at: int | None = None,
        truncate_at: int | None = None,
        raise_at: int | None = None,
        die_at: int | None = None,
        hang_at: int | None = None,
        step_s: float = 0.0,
        leak_bytes: int = 0,
        is_asking: bool = False,
        is_black: bool = False,
        is_repeatable: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-100.0, 100.0, (1,), np.float32)
        self.render_mode = render_mode
        self.num_renders = 0
        self._first = first
        self._terminate_at, self._fail_at, self._truncate_at = terminate_at, fail_at, truncate_at
        self._faults: list[tuple[int | None, Callable[[], None]]] = [
            (raise_at, _raise),
            (die_at, _die),
            (hang_at, _hang),
        ]
        self._step_s = step_s
        self._leak_bytes = leak_bytes
        self._is_asking = is_asking
        self._is_black = is_black
        self._is_repeatable = is_repeatable
        self._leaked: list[Array] = []
        self._count = 0
        self._resets = 0
        self._initial_state = 0
        self._seed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        if self._is_asking:
            input("Environment needs assets. Would you like to download them? (y|n)")
        if self._leak_bytes:
            self._leaked.append(np.ones(self._leak_bytes, dtype=np.uint8))
        self._resets += 1
        self._count = self._first
        self._seed = seed or 0
        self._initial_state = int((options or {}).get("initial_state", 0))
        return self._state(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Count one step, and fail where that was asked for."""
        self._count += 1
        time.sleep(self._step_s)
        for count, fault in self._faults:
            if count == self._count:
                fault()
        success = self._count == self._terminate_at
        terminated = success or self._count == self._fail_at
        truncated = self._count == self._truncate_at
        return self._state(), float(np.asarray(action)[0]), terminated, truncated, {"is_success": success}

    def render(self) -> Array:
        """Draw a frame whose red channel is the count; it is never quite black unless asked to be."""
        self.num_renders += 1
        frame = np.zeros((24, 32, 3), dtype=np.uint8)
        if not self._is_black:
            frame[..., 0] = self._count
            frame[..., 1] = 1
        return frame

    def _state(self) -> Array:
        resets = 0 if self._is_repeatable else self._resets
        return np.asarray([self._count, resets, self._initial_state, self._seed], dtype=np.float32)


def _raise() -> None:
    raise RuntimeError("the fake was told to fail")


def _die() -> None:
    os._exit(7)


def _hang() -> None:
    time.sleep(3600.0)


gymnasium.register(id="Counter-v0", entry_point="joynexus.testing.fakes:CounterEnv")


class InProcessSession(Session):
    """A :class:`joynexus.envs.session.Session` without processes: every environment answers at the next ``wait``.

    Args:
        spec: A gymnasium environment.
        view: What the policy looks at.
        crashes: Answers to replace: ``(env, index of its answer)`` become a ``SimulatorError``.
    """

    def __init__(self, spec: GymSpec, view: ViewSpec, *, crashes: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.environments = [GymEnvironment.open(spec, view) for _ in range(spec.num_envs)]
        self.starts: list[EpisodeStart] = []
        """Every episode that was begun, in order."""
        self.executed: list[tuple[int, list[float]]] = []
        """Environment and first action dimension of every chunk that was sent, in order."""
        self._crashes = crashes
        self._answered = [0] * spec.num_envs
        self._ready: dict[int, Outcome] = {}

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self.environments)

    @property
    def contract(self) -> InterfaceContract:
        """The facts of the environment."""
        return self.environments[0].contract

    def begin_reset(self, env: int, start: EpisodeStart) -> None:
        """Begin an episode."""
        self.starts.append(start)
        self._answer(env, self.environments[env].reset(start))

    def begin_step(self, env: int, actions: Float32[Array, "k a"], *, record: bool = False) -> None:
        """Execute a chunk."""
        self.executed.append((env, [float(each) for each in actions[:, 0]]))
        self._answer(env, self.environments[env].step_chunk(actions, record=record))

    def wait(self, timeout_s: float | None = None) -> dict[int, Outcome]:
        """Return all answers that are there."""
        del timeout_s
        ready, self._ready = self._ready, {}
        return ready

    def abandon(self) -> None:
        """Give up all that is under way."""
        self._ready.clear()

    def _answer(self, env: int, outcome: Outcome) -> None:
        index = self._answered[env]
        self._answered[env] += 1
        self._ready[env] = SimulatorError(f"fake: crash {index}") if (env, index) in self._crashes else outcome


class FakePolicy:
    """A policy client that answers at once and remembers what it was asked.

    Action i of every chunk is ``i`` in all dimensions, so that what was executed can be read off. With ``has_value``
    the log-probability is -0.5 and the value is the first state dimension. Features have one position of
    ``feature_width`` numbers, each the first state dimension; with width 0 it has none to give.
    """

    def __init__(
        self,
        *,
        horizon: int,
        action_dim: int = 1,
        version: int = 0,
        has_value: bool = False,
        feature_width: int = 0,
        prefix_seconds: float = 0.0,
    ) -> None:
        self.requests: list[PredictRequest] = []
        self.version = version
        self.feature_width = feature_width
        self._prefix_seconds = prefix_seconds
        self._horizon = horizon
        self._action_dim = action_dim
        self._has_value = has_value

    def predict(self, request: PredictRequest) -> ActionChunk:
        """Answer with the ramp 0, 1, 2, ..."""
        self.requests.append(request)
        rows = len(request.observation)
        ramp = np.arange(self._horizon, dtype=np.float32)[None, :, None]
        actions = np.broadcast_to(ramp, (rows, self._horizon, self._action_dim)).copy()
        return ActionChunk(
            actions=actions,
            policy_version=self.version if request.version is None else request.version,
            log_prob=np.full(rows, -0.5, dtype=np.float32) if self._has_value else None,
            value=request.observation.state[:, 0].astype(np.float32) if self._has_value else None,
            trace={"raw": actions[:, 0]} if self._has_value else {},
            features=self._features(request) if request.with_features and self.feature_width else None,
            prefix_seconds=self._prefix_seconds,
        )

    def _features(self, request: PredictRequest) -> PrefixArrays:
        first = request.observation.state[:, 0].astype(np.float32)
        hidden = np.broadcast_to(first[:, None, None], (len(first), 1, self.feature_width)).copy()
        pad = np.zeros((len(first), 1), dtype=np.bool_)
        return PrefixArrays(arrays={"hidden": hidden, "pad": pad}, dtype="float32", signature="fake")
