"""Episodes running side by side: which environment runs which, and who waits for what.

::

    take_start --> [idle env] --reset--> observation --+
                                                       |  all that are ready
        +----- first num_action_steps <--- predict (one call)
        v                                              |
    [busy env] --outcome--> goes on: observation ------+
                       `--> ended: final value if a time limit ended it, then the record

Environments run at their own pace: one that starts anew or hangs does not hold up the rest. Those that step are waited
for together for a moment, so that they share a forward. A simulator's crash ends its episode as a crash, never as a
failure of the task.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.session import Outcome, Session
from joynexus.errors import SimulatorError
from joynexus.rollout.chunking import executed_part, row_seed
from joynexus.rollout.episode import EpisodeRecord
from joynexus.scheduling.shipping import FeatureShipping
from joynexus.types import ActionChunk, Observation, PredictRequest

STRAGGLER_S = 0.5
"""How long ready environments wait for others that step, to share a forward with them."""
WAIT_S = 1.0
"""How often a stop is looked for while all environments are busy."""


@runtime_checkable
class PolicyClient(Protocol):
    """Where decisions come from."""

    def predict(self, request: PredictRequest) -> ActionChunk:
        """Answer a request; retries with back-off where the service is full are the client's."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeCrash:
    """An episode that the infrastructure ended; it says nothing about the policy."""

    start: EpisodeStart
    attempts: int
    """How often it was begun."""
    num_steps: int
    """Environment steps before the last crash."""
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How a run acts."""

    tenant: str
    num_action_steps: int
    seed: int
    """The tenant's; with the episode and the decision's index it seeds the noise of each decision."""
    deterministic: bool = False
    version: int | None = None
    max_attempts: int = 1
    """How often an episode that crashes is begun."""


class EpisodeRunner:
    """Runs episodes until there are none left. One thread; one run at a time.

    Args:
        session: The environments.
        policy: Where decisions come from.
        settings: How to act.
        wants_video: Whether an episode's frames are kept, by its index; None keeps none.
        shipping: Decides whether the policy is asked for prefix features, and is told what its answers weigh; None
            asks for none.
    """

    def __init__(
        self,
        session: Session,
        policy: PolicyClient,
        settings: RunSettings,
        *,
        wants_video: Callable[[int], bool] | None = None,
        shipping: FeatureShipping | None = None,
    ) -> None:
        self._session = session
        self._policy = policy
        self._settings = settings
        self._wants_video = wants_video
        self._shipping = shipping
        self._running: dict[int, EpisodeRecord] = {}

    def run(
        self, take_start: Callable[[], EpisodeStart | None], should_stop: Callable[[], bool]
    ) -> Iterator[EpisodeRecord | EpisodeCrash]:
        """Run episodes and give each as it ends.

        Args:
            take_start: Gives the next episode; None once there is none left.
            should_stop: Asked before every wait; running episodes are then given up.

        Yields:
            Ended episodes, and crashes of those that have used up their attempts.
        """
        has_more = True
        try:
            while not should_stop():
                has_more = has_more and self._fill(take_start)
                if not self._running:
                    return
                crashes = self._take_in(self._gather())
                crashes |= self._decide()
                ended = {env: each for env, each in self._running.items() if each.ended}
                for env in (*ended, *crashes):
                    del self._running[env]
                # First the results: whoever gives the next start may be waiting for them.
                yield from ended.values()
                yield from crashes.values()
        finally:
            self._running.clear()
            self._session.abandon()

    def _fill(self, take_start: Callable[[], EpisodeStart | None]) -> bool:
        """Give every idle environment an episode; False once there is none left."""
        for env in range(self._session.num_envs):
            if env in self._running:
                continue
            start = take_start()
            if start is None:
                return False
            self._begin(env, start, attempt=0)
        return True

    def _begin(self, env: int, start: EpisodeStart, *, attempt: int) -> None:
        is_recorded = self._wants_video is not None and self._wants_video(start.episode)
        self._running[env] = EpisodeRecord(start, attempt=attempt, is_recorded=is_recorded)
        self._session.begin_reset(env, start)

    def _gather(self) -> dict[int, Outcome]:
        """Wait for an answer, and a moment longer for environments that also step."""
        answers = self._session.wait(WAIT_S)
        until = time.monotonic() + STRAGGLER_S
        while answers and any(each.is_stepping for env, each in self._running.items() if env not in answers):
            more = self._session.wait(max(0.0, until - time.monotonic()))
            if not more:
                break
            answers |= more
        return answers

    def _take_in(self, answers: Mapping[int, Outcome]) -> dict[int, EpisodeCrash]:
        """Note what environments answered; return the episodes that crashed for good."""
        crashes: dict[int, EpisodeCrash] = {}
        for env, answer in answers.items():
            episode = self._running[env]
            if isinstance(answer, Observation):
                episode.observation = answer
            elif isinstance(answer, ChunkOutcome):
                episode.add(answer)
            else:
                crashes |= self._crash(env, answer)
        return crashes

    def _crash(self, env: int, error: SimulatorError) -> dict[int, EpisodeCrash]:
        episode = self._running[env]
        attempts = episode.attempt + 1
        if attempts < self._settings.max_attempts:
            self._begin(env, episode.start, attempt=attempts)
            return {}
        crash = EpisodeCrash(start=episode.start, attempts=attempts, num_steps=episode.num_steps, error=str(error))
        return {env: crash}

    def _decide(self) -> dict[int, EpisodeCrash]:
        """Ask the policy once for all that are ready, and send their actions; return crashes."""
        asking = {env: each for env, each in self._running.items() if self._is_asking(each)}
        if not asking:
            return {}
        chunk = self._predict(list(asking.values()))
        crashes: dict[int, EpisodeCrash] = {}
        for row, (env, episode) in enumerate(asking.items()):
            if episode.ended:
                episode.final_value = 0.0 if chunk.value is None else float(chunk.value[row])
                continue
            episode.decide(chunk, row)
            self._bound_features(episode)
            actions = executed_part(chunk.actions[row], self._settings.num_action_steps)
            try:
                self._session.begin_step(env, actions, record=episode.is_recorded)
            except SimulatorError as error:
                crashes |= self._crash(env, error)
        return crashes

    def _bound_features(self, episode: EpisodeRecord) -> None:
        """Drop the features of an episode that has become too long to take them along."""
        sizes = {"feature_bytes": episode.feature_bytes, "frame_bytes": episode.frame_bytes}
        if self._shipping is not None and episode.has_features and not self._shipping.fits(**sizes):
            episode.drop_features()

    def _is_asking(self, episode: EpisodeRecord) -> bool:
        if episode.ended:
            return episode.needs_final_value and not self._settings.deterministic
        return episode.observation is not None

    def _predict(self, episodes: list[EpisodeRecord]) -> ActionChunk:
        seeds = [
            row_seed(
                self._settings.seed,
                episode_seed=each.start.seed,
                episode=each.start.episode,
                decision=each.num_decisions,
            )
            for each in episodes
        ]
        request = PredictRequest(
            tenant=self._settings.tenant,
            observation=Observation.concatenate(
                [each.observation for each in episodes if each.observation is not None]
            ),
            seeds=tuple(seeds),
            deterministic=self._settings.deterministic,
            version=self._settings.version,
            with_features=self._wants_features(episodes),
        )
        chunk = self._policy.predict(request)
        if self._shipping is not None:
            self._shipping.note_answer(
                rows=len(episodes),
                feature_bytes=0 if chunk.features is None else chunk.features.nbytes,
                frame_bytes=request.observation.images.nbytes,
                encode_seconds=chunk.prefix_seconds,
            )
        return chunk

    def _wants_features(self, episodes: list[EpisodeRecord]) -> bool:
        """Whether a decision that is asked for belongs to an episode that can still ship its features."""
        if self._shipping is None or not self._shipping.wants_features:
            return False
        return any(each.has_features and not each.ended for each in episodes)
