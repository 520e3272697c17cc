"""A worker's way into its tenant's lane, timed: what a byte takes decides whether prefix features travel."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from joynexus.queues.training_queue import PutAnswer
from joynexus.scheduling.shipping import FeatureShipping
from joynexus.types import LaneItem

log = logging.getLogger(__name__)


@runtime_checkable
class LaneClient(Protocol):
    """The calls to the training queue that are timed; see :class:`joynexus.actors.queue_client.QueueClient`."""

    def put(self, item: LaneItem, stop: threading.Event) -> PutAnswer | None:
        """Put by value, however long the lane is full."""
        ...

    def waiting(self, tenant: str) -> int:
        """Count the items that wait in a tenant's lane."""
        ...


class TimedLane:
    """Times calls to the queue for a :class:`FeatureShipping`."""

    def __init__(
        self, queue: LaneClient, shipping: FeatureShipping, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wrap a client.

        Args:
            queue: Makes the calls.
            shipping: Is told how long they take.
            clock: In seconds.
        """
        self._queue = queue
        self._shipping = shipping
        self._clock = clock

    def waiting(self, tenant: str) -> int:
        """Count the items that wait. The call carries next to nothing, which tells what any call takes."""
        began = self._clock()
        waiting = self._queue.waiting(tenant)
        self._shipping.note_empty_call(self._clock() - began)
        return waiting

    def put(self, item: LaneItem, stop: threading.Event) -> None:
        """Put an item, and log what its timing turns. Waiting for room counts: a lane that is full takes no more."""
        before, began = self._shipping.reason, self._clock()
        self._queue.put(item, stop)
        self._shipping.note_put(item.nbytes, self._clock() - began)
        if self._shipping.reason != before:
            log.info("tenant %s: features of trajectories: %s", item.tenant, self._shipping.report())
