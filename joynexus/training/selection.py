"""Which waiting calls make the next group: the slots seen through the pure choice of the scheduling package."""

import time
from collections.abc import Iterable, Sequence

from joynexus.models.backbone import Backbone
from joynexus.observability.engine_usage import EngineLedger
from joynexus.scheduling.cost import Measured
from joynexus.scheduling.fairness import Priority
from joynexus.scheduling.grouping import GroupChooser, Head
from joynexus.specs.service import TrainingSpec
from joynexus.training.group import Member
from joynexus.training.slot import TrainingSlot


class CallSelection:
    """Takes calls off the heads of the slots' queues. Not thread-safe: the engine's lock guards it."""

    def __init__(self, backbone: Backbone, spec: TrainingSpec, ledger: EngineLedger) -> None:
        """Start without slots.

        Args:
            backbone: Tells how long a prefix is.
            spec: Size of a group, and the longest wait for one.
            ledger: What the engine measures.
        """
        self._backbone = backbone
        self._ledger = ledger
        self._chooser = GroupChooser(
            max_rows=spec.max_group_samples, max_wait_s=spec.max_wait_ms / 1000, spent=self.spent
        )
        self._hold_until: float | None = None

    def add(self, slot: TrainingSlot, weight: float, priority: Priority) -> None:
        """Let a slot take part, with its fair share."""
        seen = slot.policy.observation
        self._chooser.add(
            slot.tenant,
            signature=slot.signature,
            weight=weight,
            priority=priority,
            tokens=self._backbone.prefix_length(len(seen.cameras), seen.image_size, seen.max_prompt_tokens),
            head_s=slot.expected_seconds(1),
        )

    def remove(self, tenant: str) -> None:
        """Forget a slot; unknown ones are ignored."""
        self._chooser.remove(tenant)

    def choose(self, slots: Iterable[TrainingSlot], *, may_wait: bool) -> list[Member]:
        """Take the fairest batch call, and those that may share its group; none where more are awaited."""
        found = {slot.tenant: (slot, head) for slot in slots if (head := slot.head()) is not None}
        heads = {
            tenant: Head(rows=queued.num_rows, since=queued.queued_at, has_features=queued.has_features)
            for tenant, (_, queued) in found.items()
            if queued.call.batch is not None
        }
        choice = self._chooser.choose(heads, time.monotonic(), may_wait=may_wait)
        self._hold_until = choice.hold_until
        chosen = [found[tenant] for tenant in choice.tenants]
        return [Member(slot=slot, queued=queued, state=slot.state) for slot, queued in chosen]

    def finished(self, members: Sequence[Member]) -> None:
        """Note that calls have run, so that the next ones of their tenants may come."""
        now = time.monotonic()
        for member in members:
            self._chooser.finished(member.slot.tenant, now)

    @property
    def hold_s(self) -> float | None:
        """For how long calls that wait are put off; None if they are not."""
        return None if self._hold_until is None else max(0.0, self._hold_until - time.monotonic())

    def spent(self, tenant: str) -> Measured:
        """Return what a tenant's calls have cost so far; on a GPU, as far as it was measured."""
        rows, prefix_s, seconds = self._ledger.work(tenant)
        return Measured(rows=rows.samples, encoded=rows.encoded, prefix_s=prefix_s, head_s=seconds - prefix_s)
