"""The EnvironmentActor: a tenant's simulators, and what is done with them.

    rollout thread:  take an episode index -> session <-> replicas -> trajectory, by value -> the tenant's lane
                     (with prefix features in place of frames, where its timings say that it pays)
    evaluation thread:  given episodes -> session <-> replicas -> one report line per episode, on disk at once

The simulators live in child processes (``joynexus.envs.session``); the actor itself stays responsive. A worker that
was replaced is given the same assignment again: episode indices come from the queue, and reports that are on disk are
not made twice.
"""

import asyncio
import json
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from joynexus.actors import names
from joynexus.actors.queue_client import QueueClient
from joynexus.actors.replica_client import ReplicaClient
from joynexus.actors.timed_lane import TimedLane
from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.session import VectorSession
from joynexus.errors import JoyNexusError, SimulatorError
from joynexus.observability.logs import setup_logging, tenant_logger
from joynexus.rollout.assignment import episode_start
from joynexus.rollout.collector import Collector, EpisodeCrash
from joynexus.rollout.video import VideoSink
from joynexus.scheduling.shipping import FeatureShipping, ShippingMode, max_feature_bytes
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import EnvironmentSpec
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import EvaluationSpec, RlSpec, TenantSpec
from joynexus.types import Array, LaneItem, Observation, Trajectory, ViewSpec

FULL_DELAY_S = 0.05
"""Pause while the lane holds all that the next update needs."""
STOP_S = 60.0
"""How long what is running may take to end."""
CRASHES_IN_A_ROW = 5
"""A rollout whose simulators crash this often without one finished episode gives up."""


class EnvironmentActor:
    """One worker of a tenant."""

    def __init__(self, service: str, tenant: str, index: int) -> None:
        spec = ServiceSpec.model_validate_json(service)
        self._tenant = TenantSpec.model_validate_json(tenant)
        setup_logging(spec.storage.root / names.LOGS, role=names.environment(self._tenant.tenant, index))
        self._log = tenant_logger(__name__, self._tenant.tenant)
        self._index = index
        backbone = self._tenant.policy.backbone
        self._queue = QueueClient(spec.service, backbone)
        self._service = spec.service
        self._lane_bytes = spec.queue.lane_bytes
        self._incarnation = uuid.uuid4().hex[:8]  # an episode begun anew by a new process is another trajectory
        self._session: VectorSession | None = None
        self._opened: EnvironmentSpec | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._assignment = ""
        self._error: str | None = None
        self._done = 0
        self._crashes = 0
        self._finished = False
        self._shipping: FeatureShipping | None = None

    async def ping(self) -> dict[str, Any]:
        """Tell that the actor lives, how many episodes it has ended, what stopped it, and whether features travel."""
        shipping = None if self._shipping is None else self._shipping.report()
        return {
            "episodes": self._done,
            "crashes": self._crashes,
            "error": self._error,
            "finished": self._finished,
            "shipping": shipping,
        }

    async def process_ids(self) -> list[int]:
        """Return the simulators' process ids, for fault tests."""
        return [] if self._session is None else self._session.pids()

    async def describe(self, environment: EnvironmentSpec) -> InterfaceContract:
        """Open an environment and return what it declares.

        Raises:
            AssetsMissingError: If the task needs files that are not here.
            SpecError: If the task does not exist.
        """
        return await asyncio.to_thread(self._contract, environment)

    def _open(self, spec: EnvironmentSpec) -> VectorSession:
        if self._session is not None and self._opened == spec:
            return self._session
        self._close()
        seen = self._tenant.policy.observation
        self._session = VectorSession(spec, ViewSpec(cameras=seen.cameras, image_size=seen.image_size))
        self._opened = spec
        return self._session

    def _contract(self, spec: EnvironmentSpec) -> InterfaceContract:
        """Open an environment and ask it; the session starts its simulators only now, which takes seconds."""
        return self._open(spec).contract

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._opened = None, None

    async def start_rollout(self, workload: int, spec: RlSpec) -> None:
        """Collect trajectories of workload number ``workload`` into the tenant's lane until ``stop``."""
        await self._start(f"rollout {workload}", lambda stop: self._rollout(workload, spec, stop))

    async def start_evaluation(
        self, spec: EvaluationSpec, episodes: list[int], passes: list[tuple[str, int | None]]
    ) -> None:
        """Run the given episodes once per pass, a folder for the reports and a policy version (None: the newest).

        Reports are written as episodes end; those that a folder already holds are not run again.
        """

        def run(stop: threading.Event) -> None:
            for folder, version in passes:
                self._evaluate(spec, episodes, Path(folder), version, stop)

        await self._start(f"evaluation {passes}", run)

    async def stop(self) -> None:
        """End what is running; harmless when nothing is.

        Raises:
            SimulatorError: If it does not end: its simulators are then still in use.
        """
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_S)
            if self._thread.is_alive():
                raise SimulatorError(f"{self._tenant.tenant}: a simulator did not stop within {STOP_S:.0f} s.")
        self._thread = None

    async def close(self) -> None:
        """Stop, and end the simulators."""
        await self.stop()
        await asyncio.to_thread(self._close)

    async def _start(self, assignment: str, work: Callable[[threading.Event], None]) -> None:
        """Run work in the worker's thread; an assignment that runs already goes on undisturbed."""
        if self._thread is not None and self._thread.is_alive() and self._assignment == assignment:
            return
        await self.stop()
        self._assignment = assignment
        self._stop = threading.Event()
        self._error, self._finished = None, False
        stop = self._stop

        def run() -> None:
            try:
                work(stop)
                self._finished = True
            except Exception as error:  # noqa: BLE001  # a thread's error has to reach whoever asks
                if stop.is_set():
                    return  # it was given up, and nobody asks
                self._log.exception("worker thread")
                self._error = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="worker", daemon=True)
        self._thread.start()

    def _collector(
        self, session: VectorSession, stop: threading.Event, shipping: FeatureShipping | None = None
    ) -> Collector:
        policy = self._tenant.policy
        return Collector(
            session,
            ReplicaClient(self._service, policy.backbone, stop=stop),
            tenant=self._tenant.tenant,
            action=policy.action,
            seed=self._tenant.seed,
            ids=f"{self._incarnation}/",
            shipping=shipping,
        )

    # ---- rollout

    def _rollout(self, workload: int, spec: RlSpec, stop: threading.Event) -> None:
        enough = spec.rollout.episodes_per_iteration * max(1, spec.rollout.max_staleness)
        name = self._tenant.tenant
        ships = spec.algorithm.reads_features and self._tenant.policy.shares_prefixes
        mode: ShippingMode = spec.rollout.ship_features if ships else "never"
        shipping = FeatureShipping(mode, max_bytes=max_feature_bytes(self._lane_bytes, enough))
        self._shipping, lane = shipping, TimedLane(self._queue, shipping)

        def take_start() -> EpisodeStart | None:
            while lane.waiting(name) >= enough:
                if stop.wait(FULL_DELAY_S):
                    return None
            episode = self._queue.take_episode(name, stop)
            return None if episode is None else episode_start(self._tenant.seed, episode)

        in_a_row = 0
        collector = self._collector(self._open(spec.environment), stop, shipping)
        for outcome in collector.collect(take_start, should_stop=stop.is_set):
            if isinstance(outcome, EpisodeCrash):
                self._crashes += 1
                self._log.warning("episode %d crashed: %s", outcome.start.episode, outcome.error)
                in_a_row += 1
                if in_a_row >= CRASHES_IN_A_ROW:
                    last = outcome.error.partition("\n")[0]
                    raise SimulatorError(
                        f"{name}: {in_a_row} simulator crashes in a row, the last: {last} See 'joynexus logs'."
                    )
                continue
            in_a_row = 0
            self._done += 1
            lane.put(self._item(workload, outcome), stop)

    def _item(self, workload: int, trajectory: Trajectory) -> LaneItem:
        return LaneItem(
            item_id=f"{trajectory.tenant}/w{workload}/{trajectory.trajectory_id}",
            tenant=trajectory.tenant,
            workload=workload,
            ordinal=trajectory.episode,
            policy_version=trajectory.policy_version,
            payload=trajectory,
        )

    # ---- evaluation

    def _evaluate(
        self, spec: EvaluationSpec, episodes: list[int], folder: Path, version: int | None, stop: threading.Event
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"episodes_{self._index}.jsonl"
        finished = {report["episode"] for report in read_reports(folder)}
        self._done = len(finished & set(episodes))
        starts = [episode_start(spec.seed, each) for each in episodes if each not in finished]
        videos = VideoSink(folder / "videos", first=spec.video) if spec.video else None
        collector = self._collector(self._open(spec.environment), stop)
        with path.open("ab+") as file:
            _end_torn_line(file)
            for report in collector.evaluate(starts, version=version, video=videos, should_stop=stop.is_set):
                file.write(json.dumps(asdict(report)).encode() + b"\n")
                file.flush()
                self._done += 1

    # ---- low-level calls

    async def rollout(self, environment: EnvironmentSpec, episodes: list[int]) -> list[Trajectory]:
        """Run whole episodes with the newest version, and return their trajectories ordered by episode."""
        return await asyncio.to_thread(self._rollout_now, environment, episodes)

    def _rollout_now(self, environment: EnvironmentSpec, episodes: list[int]) -> list[Trajectory]:
        starts = iter([episode_start(self._tenant.seed, each) for each in episodes])
        found: list[Trajectory] = []
        collector = self._collector(self._open(environment), threading.Event())
        for outcome in collector.collect(lambda: next(starts, None), should_stop=lambda: False):
            if isinstance(outcome, EpisodeCrash):
                raise SimulatorError(f"{self._tenant.tenant}: episode {outcome.start.episode}: {outcome.error}")
            found.append(outcome)
        return sorted(found, key=lambda each: each.episode)

    async def env_open(self, environment: EnvironmentSpec) -> InterfaceContract:
        """Open a session of one's own; ``env_reset`` and ``env_step`` act on it."""
        return await asyncio.to_thread(self._contract, environment)

    async def env_reset(self, starts: dict[int, EpisodeStart]) -> dict[int, Observation]:
        """Begin episodes in the named environments; the others are not touched."""
        return _answers(await asyncio.to_thread(self._require().reset, starts))

    async def env_step(self, actions: dict[int, Array]) -> dict[int, ChunkOutcome]:
        """Execute a chunk in each of the named environments."""
        return _answers(await asyncio.to_thread(self._require().step, actions, frozenset[int]()))

    async def env_close(self) -> None:
        """End the session's simulators."""
        await asyncio.to_thread(self._close)

    def _require(self) -> VectorSession:
        if self._session is None:
            raise SimulatorError(f"{self._tenant.tenant}: no open session. Call env_open first.")
        return self._session


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Read the episode reports that workers have written; a line torn by a crash is left out.

    Returns:
        One report per episode, ordered by episode; the first one written counts.
    """
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("episodes_*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                report = json.loads(line)
            except json.JSONDecodeError:
                continue
            found.setdefault(report["episode"], report)
    return [found[episode] for episode in sorted(found)]


def _end_torn_line(file: BinaryIO) -> None:
    """Close a line that a killed worker left open, so that the next report does not join it."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _answers(outcomes: dict[int, Any]) -> dict[int, Any]:
    for outcome in outcomes.values():
        if isinstance(outcome, JoyNexusError):
            raise outcome
    return outcomes
