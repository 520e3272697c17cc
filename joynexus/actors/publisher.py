"""The way of new policy versions from the compute thread to the PolicyStore: in order, and for as long as it takes."""

import asyncio
import dataclasses
import logging

from ray.exceptions import RayError

from joynexus.actors import names, ray_calls
from joynexus.scheduling.fairness import Priority
from joynexus.types import PolicySnapshot

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Publisher:
    """Snapshots that wait for the PolicyStore, and what each tenant's share of the replicas is."""

    def __init__(self, backbone: str, namespace: str) -> None:
        """Start with nothing to publish.

        Args:
            backbone: Its name in the service.
            namespace: Ray's, of the service.
        """
        self._backbone = backbone
        self._namespace = namespace
        self._waiting: asyncio.Queue[PolicySnapshot] = asyncio.Queue()
        self._shares: dict[str, tuple[float, Priority]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def share(self, tenant: str, weight: float, priority: Priority) -> None:
        """Note a tenant's share: it goes along with its versions."""
        self._shares[tenant] = (weight, priority)

    def forget(self, tenant: str) -> None:
        """Forget a tenant's share."""
        self._shares.pop(tenant, None)

    def hand_over(self, snapshot: PolicySnapshot) -> None:
        """Take a version in, on any thread; it is gone to the store when :meth:`run` has come to it."""
        if self._loop is not None:
            weight, priority = self._shares.get(snapshot.tenant, (1.0, "normal"))
            marked = dataclasses.replace(snapshot, weight=weight, priority=priority)
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, marked)

    def start(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Task[None]":
        """Begin on the actor's event loop."""
        self._loop = loop
        return loop.create_task(self._run())

    async def _run(self) -> None:
        while True:
            snapshot = await self._waiting.get()
            while True:
                try:
                    store = ray_calls.actor(names.POLICY_STORE, self._namespace)
                    await store.publish.remote(self._backbone, snapshot)
                    break
                except (RayError, ValueError) as error:
                    log.warning("policy store unreachable: %s", error)
                    await asyncio.sleep(RETRY_S)
