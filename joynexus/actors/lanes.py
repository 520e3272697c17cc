"""The training queue as an actor of the service."""

from joynexus.queues.training_queue import TrainingQueue


class TrainingQueueActor(TrainingQueue):
    """A :class:`TrainingQueue` that answers the health manager."""

    async def ping(self) -> dict[str, int]:
        """Tell that the actor lives, and what waits in each lane."""
        return {tenant: lane.waiting for tenant, lane in (await self.stats()).items()}
