"""How a worker reaches the training queue, across its restarts. Without Ray Serve, whose import takes half a second."""

import threading
import time

from joynexus.actors import names
from joynexus.actors.roles import RoleClient
from joynexus.errors import QueueClosedError
from joynexus.queues.training_queue import PutAnswer
from joynexus.types import LaneItem

RETRY_S = 0.02
"""Pause before a put that the lane had no room for is tried again."""
LANE_PATIENCE_S = 60.0
"""How long a lane may be away while its queue is made anew."""


class QueueClient:
    """The calls of rollout workers and producers to the training queue of a backbone."""

    def __init__(self, service: str, backbone: str) -> None:
        self._role = RoleClient(names.queue(backbone), names.namespace(service))

    def put(self, item: LaneItem, stop: threading.Event) -> PutAnswer | None:
        """Put by value, however long the lane is full, or away with a queue that is made anew.

        Repeated safely, since the queue knows an item by its id.

        Returns:
            The queue's answer, never ``full``; None if ``stop`` was set meanwhile.

        Raises:
            QueueClosedError: If the lane stayed away.
        """
        closed_since: float | None = None
        while not stop.is_set():
            answer: PutAnswer = self._role.call("put", item)
            if answer not in ("full", "closed"):
                return answer
            closed_since = self._patient(closed_since, item.tenant) if answer == "closed" else None
            stop.wait(RETRY_S)
        return None

    def take_episode(self, tenant: str, stop: threading.Event) -> int | None:
        """Take a fresh episode index; None if ``stop`` was set before there was a lane.

        Raises:
            QueueClosedError: If the lane stayed away.
        """
        closed_since: float | None = None
        while not stop.is_set():
            try:
                return self._role.call("take_episodes", tenant, 1)
            except QueueClosedError:
                closed_since = self._patient(closed_since, tenant)
            stop.wait(RETRY_S)
        return None

    def _patient(self, closed_since: float | None, tenant: str) -> float:
        """Note since when a lane is away; a new queue is given its lanes again by the Master."""
        now = time.monotonic()
        since = now if closed_since is None else closed_since
        if now - since > LANE_PATIENCE_S:
            raise QueueClosedError(f"{tenant}: no lane for {LANE_PATIENCE_S:.0f} s. See 'joynexus status'.")
        return since

    def waiting(self, tenant: str) -> int:
        """Items that wait in a tenant's lane; 0 where it has none."""
        lane = self._role.call("stats").get(tenant)
        return 0 if lane is None else lane.waiting
