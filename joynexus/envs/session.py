"""Several environments of one task, each in its own process, driven side by side by one thread.

``reset`` and ``step`` wait for all that they were asked of. A collector that wants to go on with those that are ready
uses ``begin_reset``, ``begin_step`` and ``wait`` in their place. One environment's crash, hang or restart is that
environment's answer, and the others never notice.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Set
from multiprocessing.connection import wait as wait_for_any

from jaxtyping import Float32

from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.frames import black_cameras
from joynexus.envs.process import SimulatorProcess
from joynexus.envs.stepping import check_actions
from joynexus.errors import InvalidBatchError, JoyNexusError, SimulatorError
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import EnvironmentSpec
from joynexus.types import Array, Observation, ViewSpec

Outcome = Observation | ChunkOutcome | SimulatorError
"""What an environment answers: to a reset, to a chunk, or in place of either."""


class Session(ABC):
    """What a collector needs of a session."""

    @property
    @abstractmethod
    def num_envs(self) -> int:
        """Number of environments; they are named 0 to ``num_envs - 1``."""

    @property
    @abstractmethod
    def contract(self) -> InterfaceContract:
        """The facts of the task; starts a simulator if none has told yet."""

    @abstractmethod
    def begin_reset(self, env: int, start: EpisodeStart) -> None:
        """Begin an episode in one environment; what it was doing is given up."""

    @abstractmethod
    def begin_step(self, env: int, actions: Float32[Array, "k a"], *, record: bool = False) -> None:
        """Execute a chunk in one environment."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> dict[int, Outcome]:
        """Wait until an environment has answered, and return all answers that are there."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up all that is under way."""


class VectorSession(Session):
    """``spec.num_envs`` simulator processes. Not thread-safe: one owner.

    Args:
        spec: The environment; its processes start at the first ``contract`` or ``reset``.
        view: What the policy looks at.
    """

    def __init__(self, spec: EnvironmentSpec, view: ViewSpec) -> None:
        self._spec = spec
        self._view = view
        self._processes = [SimulatorProcess(spec, view) for _ in range(spec.num_envs)]
        self._seen = [0] * spec.num_envs
        """Which of its processes each environment's frames were last checked of."""

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self._processes)

    @property
    def spec(self) -> EnvironmentSpec:
        """The environment."""
        return self._spec

    @property
    def num_starts(self) -> int:
        """Simulator processes started so far, over all environments."""
        return sum(each.num_starts for each in self._processes)

    @property
    def contract(self) -> InterfaceContract:
        """The facts of the task; starts all simulators, and waits for one, if none has told yet.

        Raises:
            AssetsMissingError: If the task needs files that are not on this machine.
            SpecError: If the task does not exist, or lacks a camera of the view.
            SimulatorError: If the simulator does not start.
        """
        known = self._known_contract()
        if known is not None:
            return known
        for each in self._processes:
            each.begin_open()
        while (known := self._known_contract()) is None:
            self._sleep(None)
            for each in self._processes:
                answer = each.poll()
                if isinstance(answer, JoyNexusError):
                    self.close()
                    raise answer
        for each in self._processes:
            each.abandon()
        return known

    def begin_reset(self, env: int, start: EpisodeStart) -> None:
        """Begin an episode in one environment; what it was doing is given up, the others go on untouched."""
        self._process(env).begin_reset(start)

    def begin_step(self, env: int, actions: Float32[Array, "k a"], *, record: bool = False) -> None:
        """Execute a chunk in one environment.

        Raises:
            InvalidBatchError: If there is no such environment, the actions have another width than the
                environment's, or one is not finite.
            SimulatorError: If the environment's process is gone.
        """
        check_actions(actions, self.contract.action_dim, source=self._spec.label)
        self._process(env).begin_step(actions, record=record)

    def wait(self, timeout_s: float | None = None) -> dict[int, Outcome]:
        """Wait until an environment has answered, and return all answers that are there.

        Args:
            timeout_s: Return nothing after this long; None waits as long as any environment may take.

        Returns:
            Answers by environment; empty after the time, or where nothing is under way.

        Raises:
            AssetsMissingError, SpecError: If a simulator says that it can never serve this spec.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            answers = self._collect()
            if answers or not any(each.is_busy for each in self._processes):
                return answers
            if until is not None and time.monotonic() >= until:
                return {}
            self._sleep(until)

    def reset(self, starts: Mapping[int, EpisodeStart]) -> dict[int, Observation | SimulatorError]:
        """Begin an episode in each of the named environments, and only in those; wait for all of them."""
        for env, start in starts.items():
            self.begin_reset(env, start)
        answers = self._wait_for(starts.keys())
        return {env: each for env, each in answers.items() if not isinstance(each, ChunkOutcome)}

    def step(
        self, actions: Mapping[int, Float32[Array, "k a"]], record: Container[int] = ()
    ) -> dict[int, ChunkOutcome | SimulatorError]:
        """Execute a chunk in each of the named environments; wait for all of them.

        Args:
            actions: Actions by environment.
            record: Environments that also render a frame per step.
        """
        answers: dict[int, Outcome] = {}
        for env, chunk in actions.items():
            try:
                self.begin_step(env, chunk, record=env in record)
            except SimulatorError as error:
                answers[env] = error
        answers |= self._wait_for(actions.keys() - answers.keys())
        return {env: each for env, each in answers.items() if not isinstance(each, Observation)}

    def abandon(self) -> None:
        """Give up all that is under way; every environment may be reset."""
        for each in self._processes:
            each.abandon()

    def pids(self) -> list[int]:
        """Return the process ids of the simulators that run."""
        return [each.pid for each in self._processes if each.pid is not None]

    def close(self) -> None:
        """End all simulators; harmless when called twice."""
        for each in self._processes:
            each.begin_close()
        for each in self._processes:
            each.close()

    def _known_contract(self) -> InterfaceContract | None:
        return next((each.contract for each in self._processes if each.contract is not None), None)

    def _process(self, env: int) -> SimulatorProcess:
        if not 0 <= env < self.num_envs:
            raise InvalidBatchError(
                f"{self._spec.label}: there is no environment {env}, there are 0 to {self.num_envs - 1}. "
                "Raise num_envs in the environment spec."
            )
        return self._processes[env]

    def _wait_for(self, envs: Set[int]) -> dict[int, Outcome]:
        answers: dict[int, Outcome] = {}
        while envs - answers.keys():
            some = self.wait()
            assert some, "an environment that was asked always answers: with an error, if it must"
            answers |= {env: each for env, each in some.items() if env in envs}
        return answers

    def _collect(self) -> dict[int, Outcome]:
        answers: dict[int, Outcome] = {}
        for env, process in enumerate(self._processes):
            answer = process.poll()
            if isinstance(answer, Observation):
                answers[env] = self._checked(env, answer)
            elif isinstance(answer, ChunkOutcome | SimulatorError):
                answers[env] = answer
            elif isinstance(answer, JoyNexusError):
                raise answer
        return answers

    def _checked(self, env: int, observation: Observation) -> Observation | SimulatorError:
        """Look at the first frames of each new process: a renderer that draws nothing must not go unnoticed."""
        process = self._processes[env]
        if self._seen[env] == process.num_starts:
            return observation
        self._seen[env] = process.num_starts
        black = black_cameras(observation, self._view.cameras)
        if not black:
            return observation
        process.close()
        return SimulatorError(
            f"{self._spec.label}: cameras {black} show nothing but black after a reset. "
            "Check the renderer of the machine (EGL for MuJoCo, Vulkan for SAPIEN)."
        )

    def _sleep(self, until: float | None) -> None:
        """Sleep until a process has something to say, one is out of time, or ``until``."""
        connections = [each.connection for each in self._processes if each.connection is not None]
        deadlines = [each.deadline for each in self._processes if each.deadline is not None]
        ends = [*deadlines, *([] if until is None else [until])]
        if connections and ends:
            wait_for_any(connections, timeout=max(0.0, min(ends) - time.monotonic()))
