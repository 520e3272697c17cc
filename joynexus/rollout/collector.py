"""A policy acting in environments: trajectories for training, reports for evaluation."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from joynexus.envs.base import EpisodeStart
from joynexus.envs.session import Session
from joynexus.rollout.episode import EpisodeRecord
from joynexus.rollout.runner import EpisodeCrash, EpisodeRunner, PolicyClient, RunSettings
from joynexus.rollout.video import VideoSink
from joynexus.scheduling.shipping import FeatureShipping
from joynexus.specs.tenant import ActionSpec
from joynexus.types import EpisodeReport, Trajectory

__all__ = ["Collector", "EpisodeCrash", "PolicyClient"]

EVALUATION_ATTEMPTS = 2
"""An episode that crashes in evaluation is begun once more."""


class Collector:
    """Runs episodes of one tenant in one session. One thread; one iteration at a time.

    Args:
        session: The environments.
        policy: Where decisions come from.
        tenant: Whose policy acts.
        action: How much of a chunk is executed.
        seed: The tenant's; with the episode and the decision's index it seeds the noise of each decision.
        ids: Prefix of trajectory ids.
        shipping: Decides whether trajectories take their prefix features along; None: never.
    """

    def __init__(
        self,
        session: Session,
        policy: PolicyClient,
        *,
        tenant: str,
        action: ActionSpec,
        seed: int = 0,
        ids: str = "",
        shipping: FeatureShipping | None = None,
    ) -> None:
        self._session = session
        self._policy = policy
        self._tenant = tenant
        self._action = action
        self._seed = seed
        self._ids = ids
        self._shipping = shipping

    def collect(
        self, take_start: Callable[[], EpisodeStart | None], *, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Trajectory | EpisodeCrash]:
        """Collect trajectories, each as its episode ends.

        Args:
            take_start: Gives the next episode; None once there is none left. It may block, and all wait with it.
            should_stop: Asked at least once a second; running episodes are then given up.

        Yields:
            The trajectory of every episode that ended; or its crash, after which it is not begun again. One that takes
            its prefix features along leaves its frames behind: nothing after this reads them.

        Raises:
            InvalidBatchError: If the policy gives an action that is NaN or infinite.
            AssetsMissingError, SpecError: If the environment can't be opened at all.
        """
        settings = RunSettings(tenant=self._tenant, num_action_steps=self._action.num_action_steps, seed=self._seed)
        runner = EpisodeRunner(self._session, self._policy, settings, shipping=self._shipping)
        for ended in runner.run(take_start, should_stop):
            yield ended if isinstance(ended, EpisodeCrash) else self._trajectory(ended)

    def _trajectory(self, episode: EpisodeRecord) -> Trajectory:
        """Assemble a trajectory, with its prefix features in place of its frames where they are to travel."""
        bare = episode.trajectory(tenant=self._tenant, ids=self._ids)
        if self._shipping is None:
            return bare
        features = episode.features()
        self._shipping.note_trajectory(is_shipped=features is not None)
        if features is None:
            return bare
        return dataclasses.replace(bare, features=features, observation=bare.observation.without_frames())

    def evaluate(
        self,
        starts: Iterable[EpisodeStart],
        *,
        version: int | None = None,
        video: VideoSink | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[EpisodeReport]:
        """Evaluate without exploration, and report each episode as it ends.

        Args:
            starts: The episodes.
            version: Policy version that acts; None takes the newest.
            video: Records the episodes that it wants.
            should_stop: Asked at least once a second; running episodes are then given up, unreported.

        Yields:
            One report per episode. One that crashed is begun once more, and reported as ``crash`` if it crashes again.

        Raises:
            InvalidBatchError: If the policy gives an action that is NaN or infinite.
            AssetsMissingError, SpecError: If the environment can't be opened at all.
        """
        settings = RunSettings(
            tenant=self._tenant,
            num_action_steps=self._action.num_action_steps,
            seed=self._seed,
            deterministic=True,
            version=version,
            max_attempts=EVALUATION_ATTEMPTS,
        )
        runner = EpisodeRunner(self._session, self._policy, settings, wants_video=video.wants if video else None)
        remaining = iter(starts)
        for ended in runner.run(lambda: next(remaining, None), should_stop):
            if isinstance(ended, EpisodeCrash):
                yield _crash_report(ended, version or 0)
            else:
                yield ended.report(video=self._write(video, ended))

    def _write(self, video: VideoSink | None, episode: EpisodeRecord) -> str | None:
        if video is None or not episode.is_recorded:
            return None
        rate = self._session.contract.control_hz
        return video.write(episode.start.episode, episode.frames, fps=rate, outcome=episode.outcome)


def _crash_report(crash: EpisodeCrash, version: int) -> EpisodeReport:
    return EpisodeReport(
        episode=crash.start.episode,
        seed=crash.start.seed,
        initial_state=crash.start.initial_state,
        status="crash",
        success_once=False,
        success_at_end=False,
        num_steps=crash.num_steps,
        episode_return=0.0,
        policy_version=version,
        error=crash.error,
    )
