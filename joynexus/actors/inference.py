"""The InferenceReplica: a Ray Serve deployment around the inference engine and its batcher.

Three things run in a replica: Serve's event loop, where requests wait in the batcher; one executor thread, where the
forward runs while the next batch fills; and one task that follows the PolicyStore and swaps versions in between.
Nothing ever waits for a publication.
"""

import asyncio
import dataclasses
import logging
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from joynexus.actors import names, ray_calls
from joynexus.actors.policy_store import Changes, Known
from joynexus.errors import ServiceError, TenantNotFoundError
from joynexus.observability.latency import LatencyBook
from joynexus.observability.logs import setup_logging
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.specs.service import ServiceSpec
from joynexus.types import ActionChunk, PolicySnapshot, PredictRequest

if TYPE_CHECKING:
    from joynexus.inference.engine import InferenceEngine

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Length of a long poll; usage is reported this often, and not with each publication."""
SWITCH_S = 0.0005
"""Longest turn of a thread of the interpreter. With Python's 5 ms, one that builds a tenant's new version would hold
up every step of the requests of all others by as much."""
ARRIVAL_S = 10.0
"""How long a request waits for a policy that a fresh replica has not loaded yet."""


class InferenceReplica:
    """Serves the policies of all tenants of one backbone."""

    def __init__(self, service: str, backbone: str) -> None:
        spec = ServiceSpec.model_validate_json(service)
        self._replica_id = uuid.uuid4().hex[:12]
        sys.setswitchinterval(SWITCH_S)
        self._backbone = backbone
        self._namespace = names.namespace(spec.service)
        setup_logging(spec.storage.root / names.LOGS, role=f"replica-{backbone}-{self._replica_id}")
        self._engine = self.load_engine(spec, backbone)
        self.max_batch_size = spec.inference.max_batch_size
        self._engine.idle.watch("no_data")
        self._batcher = GroupBatcher(
            self._engine.predict,
            self._engine.signature_of,
            spec.inference,
            spent=self._engine.spent,
            because=self._engine.idle.because,
        )
        self._latency = LatencyBook()
        self._known: Known = {}
        self._told_at = -POLL_S
        self._told_groups = 0
        self._arrived = asyncio.Condition()
        self._following: asyncio.Task[None] | None = None
        self._start_following()

    @staticmethod
    def load_engine(spec: ServiceSpec, backbone: str) -> "InferenceEngine":
        """Load what the replica runs: a deployment of another engine replaces this."""
        # Not for whoever deploys it: the Master does no tensor math, and would wait for torch.
        from joynexus.inference.engine import InferenceEngine  # noqa: PLC0415

        return InferenceEngine.load(spec.backbones[backbone], spec.inference, backbone_name=backbone)

    def _start_following(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # started by the first request or health check instead
        if self._following is None or self._following.done():
            self._following = loop.create_task(self._follow())

    async def _follow(self) -> None:
        """Take over new versions for ever; a store that is gone is looked up again."""
        while True:
            try:
                store = ray_calls.actor(names.POLICY_STORE, self._namespace)
                while True:
                    await self._poll(store)
            except (RayError, ValueError) as error:
                log.warning("replica %s: policy store unreachable: %s", self._replica_id, error)
                await asyncio.sleep(0.5)

    async def _poll(self, store: Any) -> None:  # noqa: ANN401
        now = time.monotonic()
        is_due = now - self._told_at >= POLL_S
        self._told_at = now if is_due else self._told_at
        usage = self._usage() if is_due else None
        changes: Changes = await store.follow.remote(self._replica_id, self._backbone, self._known, usage, POLL_S)
        if usage is not None and len(usage["groups"]):
            self._told_groups = int(usage["groups"].ordinal[-1]) + 1
        for tenant in changes.removed:
            self._engine.remove_policy(tenant)
            self._batcher.remove_tenant(tenant)
        for each in changes.snapshots:
            snapshot: PolicySnapshot = each if isinstance(each, PolicySnapshot) else await each
            await asyncio.to_thread(self._engine.set_policy, snapshot)
            self._batcher.set_share(snapshot.tenant, snapshot.weight, snapshot.priority)
        if changes.removed or changes.snapshots:
            self._known = changes.known
            async with self._arrived:
                self._arrived.notify_all()

    def _usage(self) -> dict[str, Any]:
        """Sums, and the groups since those that the store has: in columns, so that none of it delays a request."""
        groups = self._engine.groups_since(self._told_groups)
        usage = dataclasses.replace(self._engine.usage(), latency=self._latency.counts())
        return {"backbone": self._backbone, "engine": usage, "groups": groups}

    async def predict(self, request: PredictRequest) -> ActionChunk:
        """Act for some rows of one tenant, in a group with whoever else asks.

        Args:
            request: Rows of one tenant.

        Returns:
            A chunk per row, all of one version.

        Raises:
            JoyNexusError: Typed, for this request alone.
        """
        self._start_following()
        came = time.monotonic()
        if request.tenant not in self._engine.versions():
            await self._wait_for(request.tenant)
        chunk = await self._batcher.submit(request)
        self._latency.note(request.tenant, time.monotonic() - came)
        return chunk

    async def _wait_for(self, tenant: str) -> None:
        """Wait for a policy that may be on its way to a replica that has just started."""
        async with self._arrived:
            try:
                await asyncio.wait_for(
                    self._arrived.wait_for(lambda: tenant in self._engine.versions()), timeout=ARRIVAL_S
                )
            except TimeoutError:
                message = (
                    f"{tenant}: has no policy on backbone {self._backbone!r}. Known: {sorted(self._engine.versions())}."
                )
                raise TenantNotFoundError(message) from None

    async def process_id(self) -> int:
        """Return the replica's process id, for fault tests."""
        import os  # noqa: PLC0415

        return os.getpid()

    async def check_health(self) -> None:
        """Serve's own probe: a replica whose follower ended is replaced."""
        self._start_following()
        if self._following is not None and self._following.done():
            raise ServiceError(f"replica {self._replica_id}: no longer follows the policy store")


def deploy_replicas(
    spec: ServiceSpec, backbone: str, replica: type[InferenceReplica] = InferenceReplica, *, application: str = ""
) -> DeploymentHandle[Any]:
    """Start a backbone's replicas, or find them where they run.

    Args:
        spec: The service.
        backbone: Name of one of its backbones.
        replica: What to deploy.
        application: Its Serve application; empty takes the name under which the service's clients find it.

    Returns:
        A handle whose ``predict`` reaches any replica.
    """
    wanted = spec.inference
    options: dict[str, Any] = {"num_cpus": wanted.resources.num_cpus, "num_gpus": wanted.resources.num_gpus}
    deployment = serve.deployment(
        name=names.DEPLOYMENT,
        num_replicas=wanted.num_replicas,
        max_ongoing_requests=wanted.max_queued_rows,
        ray_actor_options=options,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=2,
    )(replica)
    bound = deployment.bind(spec.model_dump_json(), backbone)
    name = application or names.application(spec.service, backbone)
    return cast("DeploymentHandle[Any]", serve.run(bound, name=name, route_prefix=None))
