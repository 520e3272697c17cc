"""Which calls the training engine runs together, and when. Pure: no clock, no torch, no lock; time is an argument.

    choose(heads) -> settle what the last groups cost -> the tenant that is furthest behind leads
                  -> others of its signature join while they are not too far ahead of it, up to max_rows
                  -> if prefixes have to be encoded and more of the signature are about to come: wait for them

Shares are of device-seconds, so a tenant whose module is twenty times as dear has a twentieth of the calls, and one
whose prefixes are all found in the store pays for its module alone. Calls of one tenant build on each other, so a
group holds one of each; weights show in how often a tenant is in the groups. :mod:`joynexus.scheduling.fairness`
states the bounds.

Only encoding gains from company: a tenant's own part costs the same alone. So calls that bring their features, or
whose tenant lately found them in the store, run at once, and a wait is only for the fixed part of a forward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from joynexus.scheduling.batching import Arrivals, ForwardCost, wait_until
from joynexus.scheduling.cost import CostModel, Measured, Settlement
from joynexus.scheduling.fairness import FairShare, Priority

LEAD_S = 0.25
"""Device-seconds (by weight) that a tenant may be ahead of another before it is left out of a group: one time for all,
so that tenants whose calls are few, or differ now and then, are not kept apart for it."""
_FOUND = 0.05
"""A tenant with a smaller part of its rows to encode counts as one that finds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The next call of a tenant."""

    rows: int
    since: float
    """When it was submitted."""
    has_features: bool = False
    """Whether the features of all rows came with it, so that nothing is encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to do now."""

    tenants: tuple[str, ...] = ()
    """Whose next calls run together, the leader first; none where nobody is ready or more are awaited."""
    hold_until: float | None = None
    """Until when further members are awaited; None if they are not."""


class GroupChooser:
    """Chooses the groups of one engine."""

    def __init__(
        self, *, max_rows: int, max_wait_s: float, spent: Callable[[str], Measured], lead_s: float = LEAD_S
    ) -> None:
        """Start without tenants.

        Args:
            max_rows: Of a group; a larger call goes alone.
            max_wait_s: The longest wait for further members.
            spent: What the engine has measured of a tenant so far.
            lead_s: Device-seconds (by weight) that a member of a group may be ahead of the leader.
        """
        self._max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._lead_s = lead_s
        self._fair = FairShare()
        self._costs = CostModel()
        self._settlement = Settlement(self._fair, self._costs, spent)
        self._forward = ForwardCost()
        self._signatures: dict[str, str] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._here: set[str] = set()
        """Tenants whose next call was seen."""
        self._answered: dict[str, float] = {}
        """When each tenant's last call was: the next one has waited since then at most."""
        self._held_since: dict[str, float] = {}
        """By signature: since when its next group is awaited."""

    def add(
        self,
        tenant: str,
        *,
        signature: str,
        weight: float = 1.0,
        priority: Priority = "normal",
        tokens: int = 1,
        head_s: float | None = None,
    ) -> None:
        """Take a tenant in.

        Args:
            tenant: Its name.
            signature: Schema signature of its policy.
            weight: Its share against the others of its class; positive.
            priority: Its class.
            tokens: Of the prefix of one row.
            head_s: First guess at the seconds of its own part, by row.
        """
        self._fair.add(tenant, weight, priority)
        self._costs.add(tenant, tokens=tokens, head_s=head_s)
        self._signatures[tenant] = signature

    def remove(self, tenant: str) -> None:
        """Forget a tenant; unknown ones are ignored."""
        self._fair.remove(tenant)
        self._costs.remove(tenant)
        self._settlement.forget(tenant)
        self._here.discard(tenant)
        self._answered.pop(tenant, None)
        signature = self._signatures.pop(tenant, None)
        if signature is not None and signature in self._arrivals:
            self._arrivals[signature].forget(tenant)

    def choose(self, heads: Mapping[str, Head], now: float, *, may_wait: bool = False) -> Choice:
        """Choose the next group.

        Args:
            heads: The next call of every tenant that has one.
            now: Seconds.
            may_wait: Whether the caller comes back by ``hold_until`` by itself.

        Returns:
            The group, which is charged for and has to be run; see :meth:`finished`.
        """
        self._learn(heads)
        if not heads:
            return Choice()
        costs = {tenant: self._estimate(tenant, head) for tenant, head in heads.items()}
        group, room = self._group(heads, costs, now)
        signature = self._signatures[group[0]]
        until = self._wait_until(group, heads, room, now) if may_wait else now
        if until > now:
            self._held_since.setdefault(signature, now)
            group = [tenant for tenant in group if not self._is_encoding(tenant, heads[tenant])]
            if not group:
                return Choice(hold_until=until)
        else:
            self._held_since.pop(signature, None)
        for tenant in group:
            self._fair.charge(tenant, costs[tenant])
            self._settlement.charged(tenant, costs[tenant])
        return Choice(tenants=tuple(group))

    def finished(self, tenant: str, now: float) -> None:
        """Note that a tenant has its answer, so that its next call may come."""
        self._here.discard(tenant)
        signature = self._signatures.get(tenant)
        if signature is not None:
            self._answered[tenant] = now
            self._arrivals[signature].leave(tenant, now)

    def _learn(self, heads: Mapping[str, Head]) -> None:
        """Settle what was measured, and note who has come."""
        total = self._settlement.settle()
        if total.encoded > 0:
            self._forward.measured(total.encoded, total.prefix_s)
        for tenant, head in heads.items():
            if tenant not in self._here:
                self._here.add(tenant)
                self._arrivals.setdefault(self._signatures[tenant], Arrivals()).enter(
                    tenant, self._since(tenant, head), head.rows
                )

    def _group(self, heads: Mapping[str, Head], costs: Mapping[str, float], now: float) -> tuple[list[str], int]:
        """Return the leader and who may run beside it, and the rows that could still join."""
        ready = {tenant: max(0.0, now - self._since(tenant, head)) for tenant, head in heads.items()}
        leader = self._fair.choose(ready)
        same = {tenant for tenant in heads if self._signatures[tenant] == self._signatures[leader]}
        group, room = [leader], self._max_rows - heads[leader].rows
        for tenant in self._fair.beside(leader, ready, costs, same, self._lead_s):
            if heads[tenant].rows <= room:
                group.append(tenant)
                room -= heads[tenant].rows
        return group, room

    def _wait_until(self, group: list[str], heads: Mapping[str, Head], room: int, now: float) -> float:
        encoding = [tenant for tenant in group if self._is_encoding(tenant, heads[tenant])]
        if not encoding or room <= 0:
            return now
        signature = self._signatures[group[0]]
        bound = self._held_since.get(signature, now) + self._max_wait_s
        if bound <= now:
            return now
        expected = self._arrivals[signature].expected(now, bound)
        return wait_until(
            now,
            bound=bound,
            waiting=len(heads),
            sharing=len(encoding),
            room=room,
            expected=[each for each in expected if self._costs.encoded_part(each.tenant) > _FOUND],
            cost=self._forward,
        )

    def _since(self, tenant: str, head: Head) -> float:
        """Since when a call is the next of its tenant."""
        return max(head.since, self._answered.get(tenant, head.since))

    def _is_encoding(self, tenant: str, head: Head) -> bool:
        """Whether a call probably has rows that the backbone must run over."""
        return not head.has_features and self._costs.encoded_part(tenant) > _FOUND

    def _estimate(self, tenant: str, head: Head) -> float:
        return self._costs.estimate(tenant, head.rows, encoded=0 if head.has_features else None)
