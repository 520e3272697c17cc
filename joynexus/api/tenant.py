"""A tenant of a running service: its run, and the low-level calls of which whole algorithms can be written.

The low-level calls are shaped like Tinker's: each returns a :class:`Future` at once, and a tenant's calls on its slot
(training, publishing, saving, loading, exporting) take effect in the order in which they were made, awaited or not.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from joynexus.actors import names
from joynexus.actors.records import ENDED
from joynexus.actors.roles import find_role
from joynexus.api.calls import SlotCalls
from joynexus.api.future import Future
from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.errors import ServiceError, TenantFailedError
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import EnvironmentSpec
from joynexus.specs.tenant import TenantSpec, Workload
from joynexus.types import (
    NEVER_STALE,
    ActionChunk,
    Array,
    LaneItem,
    Loss,
    Observation,
    PredictRequest,
    TrainingBatch,
    TrainingResult,
    Trajectory,
)

if TYPE_CHECKING:
    from joynexus.api.service import Service

POLL_S = 0.3
FROM_NO_POLICY = NEVER_STALE - 1
"""``policy_version`` of a batch put through this API: never stale, and, unlike a dataset's, known by its id alone."""


class Run:
    """A submitted tenant, followed from outside; it goes on whether anybody waits or not."""

    def __init__(self, service: "Service", name: str) -> None:
        self._service = service
        self.name = name

    @property
    def tenant(self) -> "Tenant":
        """The tenant's calls."""
        return self._service.tenant(self.name)

    def status(self) -> dict[str, Any]:
        """The tenant's state, progress and charge."""
        return self._service.status()[self.name]

    def metrics(self) -> list[dict[str, Any]]:
        """Every row of the tenant's metrics so far."""
        from joynexus.observability.sinks import read_metrics  # noqa: PLC0415

        return list(read_metrics(Path(self.status()["folder"]) / "metrics.jsonl"))

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the tenant's end.

        Returns:
            Its final status; ``status`` is COMPLETED or STOPPED.

        Raises:
            TenantFailedError: With the reason, if it failed.
            TimeoutError: After ``timeout_s``; the tenant goes on.
        """
        return self.wait_for(lambda status: status["status"] in ENDED, timeout_s)

    def wait_until_running(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the tenant's slot is open and its version 0 is served."""
        return self.wait_for(lambda status: status["status"] == "RUNNING", timeout_s)

    def wait_for(self, reached: Callable[[dict[str, Any]], bool], timeout_s: float | None) -> dict[str, Any]:
        """Wait until the tenant's status is as wanted; returns and raises as :meth:`wait`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status["status"] == "FAILED":
                raise TenantFailedError(f"{self.name}: {status['reason']}")
            if reached(status):
                return status
            if status["status"] in ENDED:
                raise TenantFailedError(f"{self.name}: has ended ({status['status']}) before that.")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: still {status['status']} after {timeout_s} s")
            time.sleep(POLL_S)

    def stop(self) -> str:
        """Stop the tenant, wait until nothing of it is left, and return its final status."""
        return self._service.stop(self.name)


class Tenant:
    """The calls of one tenant. Make one per driver: it keeps the calls on the slot in order."""

    def __init__(self, service: "Service", spec: TenantSpec) -> None:
        self.spec = spec
        self.name = spec.tenant
        self._service = service
        backbone = spec.policy.backbone
        self._slot = SlotCalls(self.name, backbone, service.namespace)
        self._replicas = serve.get_deployment_handle(names.DEPLOYMENT, names.application(service.name, backbone))
        self._has_worker = False

    # ---- high level

    def run(self, workload: Workload, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Run one more workload (SFT, RL or evaluation) on this tenant's policy, and wait for its results."""
        index: int = self._service.master.call("append", self.name, workload.model_dump_json())
        run = Run(self._service, self.name)
        status = run.wait_for(lambda each: each["workloads"][index]["status"] in ENDED, timeout_s)
        self._slot.forget()  # the workload made training calls of its own
        found = status["workloads"][index]
        if found["status"] != "COMPLETED":
            raise TenantFailedError(f"{self.name}: workload {index}: {found['reason'] or found['status']}")
        return dict(found["results"])

    def train(self, workload: Workload, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Run an SFT or RL workload; see :meth:`run`."""
        return self.run(workload, timeout_s=timeout_s)

    def evaluate(self, workload: Workload, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Run an evaluation workload; see :meth:`run`."""
        return self.run(workload, timeout_s=timeout_s)

    # ---- training

    def forward_backward(
        self, batch: TrainingBatch, loss: str = "supervised", parameters: Mapping[str, float] | None = None
    ) -> Future[TrainingResult]:
        """Accumulate the gradient of a batch.

        Args:
            batch: Rows of this tenant, in raw units.
            loss: ``supervised``, ``weighted`` (needs ``extras["weights"]``) or ``ppo``.
            parameters: Of the loss.
        """
        return self._slot.train(batch=batch, loss=Loss(name=loss, parameters=dict(parameters or {})))

    def optim_step(self, optimizer: OptimizerSpec | None = None, **fields: Any) -> Future[TrainingResult]:  # noqa: ANN401
        """Apply the accumulated gradient; ``fields`` are those of :class:`OptimizerSpec`, such as ``lr=1e-4``."""
        return self._slot.train(optimizer=optimizer or OptimizerSpec(**fields))

    def train_batch(
        self,
        batch: TrainingBatch,
        loss: str = "supervised",
        parameters: Mapping[str, float] | None = None,
        optimizer: OptimizerSpec | None = None,
    ) -> Future[TrainingResult]:
        """``forward_backward`` and ``optim_step`` in one call."""
        wanted = Loss(name=loss, parameters=dict(parameters or {}))
        return self._slot.train(batch=batch, loss=wanted, optimizer=optimizer or OptimizerSpec())

    def sync_weights(self, *, timeout_s: float = 60.0) -> Future[int]:
        """Publish the current parameters as a new version; answered with its number when every replica serves it.

        Args:
            timeout_s: How long the replicas may take.
        """
        version = self._slot.call("sync_weights")
        served = self._role(names.POLICY_STORE).served.remote(self.name, version, timeout_s)  # starts with the version

        def check(found: list[Any]) -> int:  # version, whether it is served
            if not found[1]:
                raise ServiceError(
                    f"{self.name}: version {found[0]} is not served everywhere after {timeout_s:.0f} s. "
                    "See 'joynexus status'."
                )
            return found[0]

        return Future([version, served], finish=check, failed=self._slot.forget)

    def save_state(self, name: str) -> Future[str]:
        """Write a named checkpoint, and return its folder."""
        return Future(self._slot.call("save_state", name), failed=self._slot.forget)

    def load_state(self, name: str) -> Future[None]:
        """Go back to a named checkpoint."""
        return Future(self._slot.call("load_state", name), failed=self._slot.forget)

    def export(self, folder: str | Path) -> Future[str]:
        """Write module, spec and statistics for use elsewhere."""
        return Future(self._slot.call("export", str(Path(folder).resolve())), failed=self._slot.forget)

    def _role(self, name: str) -> Any:  # noqa: ANN401  # Ray's handle of an unknown class
        return find_role(name, self._service.namespace)

    # ---- acting

    def predict(
        self,
        observation: Observation,
        *,
        seeds: Sequence[int] | None = None,
        deterministic: bool = False,
        version: int | None = None,
    ) -> Future[ActionChunk]:
        """Ask the replicas for one action chunk per row."""
        request = PredictRequest(
            tenant=self.name,
            observation=observation,
            seeds=tuple(seeds if seeds is not None else range(len(observation))),
            deterministic=deterministic,
            version=version,
        )
        return Future(self._replicas.predict.remote(request))

    def rollout(self, environment: EnvironmentSpec, episodes: Sequence[int]) -> Future[list[Trajectory]]:
        """Run whole episodes with the newest version and return their trajectories."""
        return Future(self._environment().rollout.remote(environment, list(episodes)))

    # ---- environments

    def _environment(self) -> Any:  # noqa: ANN401
        if not self._has_worker:
            self._service.master.call("open_worker", self.name, timeout_s=300.0)
            self._has_worker = True
        return self._role(names.environment(self.name, 0))  # by name: it may have been made anew

    def env_open(self, environment: EnvironmentSpec) -> Future[InterfaceContract]:
        """Open a session of ``environment.num_envs`` environments, and return what it declares."""
        return Future(self._environment().env_open.remote(environment))

    def env_reset(self, starts: Mapping[int, EpisodeStart]) -> Future[dict[int, Observation]]:
        """Begin episodes in the named environments; the others are not touched."""
        return Future(self._environment().env_reset.remote(dict(starts)))

    def env_step(self, actions: Mapping[int, Array]) -> Future[dict[int, ChunkOutcome]]:
        """Execute a chunk of actions in each of the named environments."""
        return Future(self._environment().env_step.remote(dict(actions)))

    def env_close(self) -> Future[None]:
        """End the session's simulators."""
        return Future(self._environment().env_close.remote())

    # ---- the lane

    def queue_put(self, payload: TrainingBatch | Trajectory, item_id: str, *, ordinal: int = 0) -> Future[str]:
        """Put data into this tenant's own lane, apart from the one that its workloads learn from.

        Args:
            payload: By value.
            item_id: Unique in the lane; a repeated one is a ``duplicate``.
            ordinal: Any number of the caller's; comes back with the item.

        Returns:
            ``ok``, ``full`` (take some out, then try again), ``duplicate``, or ``closed`` (the tenant has ended, or
            was not opened without workloads).
        """
        version = payload.policy_version if isinstance(payload, Trajectory) else FROM_NO_POLICY
        lane = names.api_lane(self.name)
        item = LaneItem(
            item_id=f"{lane}/{item_id}",
            tenant=lane,
            workload=0,
            ordinal=ordinal,
            policy_version=version,
            payload=payload,
        )
        return Future(self._queue().put.remote(item))

    def queue_get(self, max_items: int = 1, *, timeout_s: float = 1.0) -> Future[list[LaneItem]]:
        """Take items out of this tenant's own lane, in the order in which they were put.

        Args:
            max_items: At most this many.
            timeout_s: How long to wait for the first; the list is empty after it.

        Returns:
            A future. Taking its result acknowledges the items; where nobody ever does, they go back to the lane.
        """
        queue, lane = self._queue(), names.api_lane(self.name)
        lease = queue.gather.remote(lane, {lane: max_items}, max_samples=1 << 30, max_wait_s=0.0, timeout_s=timeout_s)

        def take(found: Any) -> list[LaneItem]:  # noqa: ANN401  # a Lease
            Future[int](queue.acknowledge.remote(lane, [each.item_id for each in found.items])).result(30.0)
            return [
                dataclasses.replace(each, tenant=self.name, item_id=each.item_id.removeprefix(f"{lane}/"))
                for each in found.items
            ]

        return Future(lease, finish=take)

    def _queue(self) -> Any:  # noqa: ANN401
        return self._role(names.queue(self.spec.policy.backbone))
