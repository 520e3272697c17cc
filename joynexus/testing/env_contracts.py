"""Contract check for environments: what a plugin has to satisfy, tried on the real thing in its own process."""

from collections.abc import Callable

import numpy as np

from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.frames import black_cameras
from joynexus.envs.session import VectorSession
from joynexus.errors import ContractError, InvalidBatchError, SimulatorError
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import EnvironmentSpec
from joynexus.types import Array, Observation, ViewSpec

CHECK_STEPS = 5
"""Time limit of the episodes that are run."""


def check_env(spec: EnvironmentSpec, view: ViewSpec) -> InterfaceContract:
    """Check that an environment keeps the contract of :class:`joynexus.envs.base.Environment`.

    Args:
        spec: The environment; one process is started, and its episodes are cut to a few steps.
        view: What a policy looks at; name every camera that is to be checked.

    Returns:
        What the environment declares.

    Raises:
        ContractError: Naming everything that is wrong.
        AssetsMissingError, SpecError, SimulatorError: If the environment can't be opened or run.
    """
    short = spec.model_copy(update={"num_envs": 1, "max_episode_steps": CHECK_STEPS})
    session = VectorSession(short, view)
    try:
        problems = _Checks(session, view).run()
        contract = session.contract
    finally:
        session.close()
    if problems:
        raise ContractError(f"{spec.label}: {'; '.join(problems)}. Correct the environment's implementation.")
    return contract


class _Checks:
    """The checks of one session, and what they found."""

    def __init__(self, session: VectorSession, view: ViewSpec) -> None:
        self._session = session
        self._view = view
        self._problems: list[str] = []

    def run(self) -> list[str]:
        """Run all checks and return the problems."""
        contract = self._session.contract
        self._expect(set(self._view.cameras) <= set(contract.cameras), "it was opened with cameras that it lacks")
        first = self._reset(0)
        self._observation(first, contract)
        self._expect_refused(
            lambda: self._step(np.full((1, contract.action_dim), np.nan, dtype=np.float32)), "a NaN action is executed"
        )
        still = np.zeros((CHECK_STEPS - 2, contract.action_dim), dtype=np.float32)
        outcome = self._step(still, record=bool(self._view.cameras))
        self._outcome(outcome, len(still), contract)
        self._repeatable(first, outcome, still)
        self._end(contract)
        return self._problems

    def _observation(self, observation: Observation, contract: InterfaceContract) -> None:
        cameras = len(self._view.cameras)
        self._expect(len(observation) == 1, f"an observation has {len(observation)} rows, expected 1")
        width = observation.state.shape[1]
        self._expect(width == contract.state_dim, f"the state has width {width}, declared is {contract.state_dim}")
        shape = (1, cameras, *self._view.image_size, 3)
        self._expect(observation.images.shape == shape, f"images have shape {observation.images.shape}, not {shape}")
        self._expect(observation.state.dtype == np.float32, f"the state is {observation.state.dtype}, not float32")
        self._expect(bool(np.isfinite(observation.state).all()), "the state holds NaN or infinity")
        self._expect(bool(observation.instructions[0].strip()), "the instruction is empty")
        missing = [name for name, seen in zip(self._view.cameras, observation.image_mask[0], strict=True) if not seen]
        self._expect(not missing, f"cameras {missing} give no frame")
        black = black_cameras(observation, self._view.cameras)
        self._expect(not black, f"cameras {black} show nothing but black")

    def _outcome(self, outcome: ChunkOutcome, num_steps: int, contract: InterfaceContract) -> None:
        self._observation(outcome.observation, contract)
        executed = outcome.num_steps
        fits = executed == num_steps or (outcome.ended and 0 < executed < num_steps)
        self._expect(fits, f"{executed} of {num_steps} actions were executed, and the episode has not ended")
        self._expect(len(outcome.success) == executed, "success is not told for every executed step")
        self._expect(len(outcome.frames) in (0, executed), "recording does not give one frame per executed step")

    def _repeatable(self, first: Observation, outcome: ChunkOutcome, actions: Array) -> None:
        again = self._reset(0)
        self._expect(np.array_equal(first.state, again.state), "the same start gives another first state")
        self._expect(np.array_equal(first.images, again.images), "the same start gives other first frames")
        same = np.array_equal(self._step(actions).observation.state, outcome.observation.state)
        self._expect(same, "the same start and actions give another state")

    def _end(self, contract: InterfaceContract) -> None:
        self._reset(1)
        many = np.zeros((CHECK_STEPS + 3, contract.action_dim), dtype=np.float32)
        outcome = self._step(many)
        self._expect(outcome.ended, f"max_episode_steps {CHECK_STEPS} did not end the episode")
        self._expect(outcome.num_steps <= CHECK_STEPS, "steps are executed past max_episode_steps")
        self._expect(not (outcome.terminated and outcome.truncated), "an episode both terminated and was truncated")
        self._expect_refused(lambda: self._step(many), "a step after the end of the episode is executed")
        self._reset(2)

    def _reset(self, episode: int) -> Observation:
        start = EpisodeStart(episode=episode, seed=episode, initial_state=episode)
        answer = self._session.reset({0: start})[0]
        if isinstance(answer, SimulatorError):
            raise answer
        return answer

    def _step(self, actions: Array, *, record: bool = False) -> ChunkOutcome:
        answer = self._session.step({0: actions}, record={0} if record else ())[0]
        if isinstance(answer, SimulatorError):
            raise answer
        return answer

    def _expect(self, holds: bool, problem: str) -> None:  # noqa: FBT001  # reads as a sentence
        if not holds and problem not in self._problems:
            self._problems.append(problem)

    def _expect_refused(self, action: Callable[[], object], problem: str) -> None:
        try:
            action()
        except (SimulatorError, InvalidBatchError):
            return
        self._problems.append(problem)
