"""How floods are kept from holding up the others: how long their batches may be, and who interrupts those.

A flood is a tenant that keeps more requests waiting than its part of a batch. Why it is treated so is told in
:mod:`joynexus.scheduling.preemption` and ``docs/decisions/0028``. Time is an argument.
"""

from collections.abc import Mapping

from joynexus.queues.running_batch import Run, RunningBatch
from joynexus.queues.waiting_room import Pending, Surplus, WaitingRoom
from joynexus.scheduling.batching import Arrivals, ForwardCost
from joynexus.scheduling.preemption import CROWD, Need, Pauses, is_worth_it

STRETCH = 1.4
"""How many times as long a batch may take for requests of a tenant that has many more than the others: those wait for
the batch that runs when they come, and then for their own, so a flood must not make batches long. It costs the flood
some throughput, and only while others are there or have been lately."""
FLOOD = 0.25
"""Part of a batch that no median tenant fills, unless most are floods."""


class Learnt:
    """What is learnt of the requests of one schema signature."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.forward = ForwardCost()
        self.pauses = Pauses()


class FloodControl:
    """Bounds batches, and chooses who is run in their middle."""

    def __init__(self, room: WaitingRoom, max_batch_size: int) -> None:
        """Start without experience.

        Args:
            room: Who waits.
            max_batch_size: Rows of a batch.
        """
        self._room = room
        self._most = max_batch_size
        self._need = Need()
        self._signatures: dict[str, Learnt] = {}

    def learnt(self, signature: str) -> Learnt:
        """Return what is known of a signature."""
        known = self._signatures.get(signature)
        if known is None:
            known = self._signatures[signature] = Learnt()
        return known

    def finished(self, run: Run) -> None:
        """Learn from a run."""
        learnt = self.learnt(run.batch[0].signature)
        learnt.forward.measured(run.rows, run.seconds)
        if run.longest_s is not None:
            learnt.pauses.measured(run.longest_s, run.seconds)
        others = [each for each in run.batch if each.tenant not in run.floods]
        rows = sum(each.rows for each in others)
        for each in others:
            self._need.note(each.tenant, learnt.forward(rows) * each.rows / rows, run.ended)

    def forget(self, tenant: str) -> None:
        """Drop a tenant; unknown ones are ignored."""
        self._need.forget(tenant)
        for each in self._signatures.values():
            each.arrivals.forget(tenant)

    def surplus(self, signature: str, now: float) -> Surplus | None:
        """Bound the part of floods in the next batch, which others are in, or may come in the middle of.

        A flood may lengthen the batch of the others (:data:`STRETCH`). Where none of those waits now, it may make one
        as long as its pauses allow. Where all have many requests, or only one has any, batches are as full as can be.
        """
        learnt = self.learnt(signature)
        forward = learnt.forward
        if not forward.is_known or forward(min(self._room.rows_of(signature), self._most)) <= STRETCH * forward(1):
            return None
        active = self._active(now)
        quota = self._quota(active)
        if not any(rows <= quota for rows in active.values()):
            return None
        waiting = self._room.rows_by_tenant.items()
        others = sum(rows for tenant, rows in waiting if rows <= quota and self._room.signature_of(tenant) == signature)
        longest = STRETCH * forward(max(others, 1))
        if not others and self._need.of_all(now) <= CROWD:
            longest = max(longest, learnt.pauses.longest_flood(forward(1)))
        return Surplus(quota, forward.rows_within(longest))

    def take_urgent(self, running: RunningBatch, now: float) -> list[Pending]:
        """Take out who is to be run in the middle of a batch; none where it does not give way, or for nobody."""
        if not running.gives_way or running.is_aside:
            return []
        # A run that is overdue is taken to need as long again as it is late.
        remaining = abs(self.learnt(running.batch[0].signature).forward(running.rows) - running.seconds(now))
        rows, quota = self._room.rows_by_tenant, self._quota(self._active(now))
        owed = [tenant for tenant in self._room.owed_more(now, running.tenants) if rows[tenant] <= quota]
        offered = running.offered
        room = self._most - sum(each.rows for each in offered)
        for tenant in owed if room > 0 else ():
            if self._need.of_others(tenant, now) > CROWD:
                continue
            signature = self._room.signature_of(tenant)
            fits = not offered or signature == offered[0].signature
            if fits and is_worth_it(remaining, self.learnt(signature).forward(rows[tenant])):
                return self._room.take(signature, room, now, among=owed, served=running.tenants, joins=bool(offered))
        return []

    def _active(self, now: float) -> dict[str, int]:
        """Return the rows of those who wait, and of those who have been here lately and may come back."""
        active = dict(self._room.rows_by_tenant)
        for each in self._signatures.values():
            for tenant, rows in each.arrivals.lately(now).items():
                active.setdefault(tenant, rows)
        return active

    def _quota(self, active: Mapping[str, int]) -> int:
        """Return the rows beyond which a tenant is a flood, where others have less.

        They are as many as the median tenant has, where that is no flood itself, and at least an equal part of a batch.
        """
        median = sorted(active.values())[(len(active) - 1) // 2]
        return max(self._most // len(active), min(median, int(self._most * FLOOD)), 1)
