"""Whose work is served next: start-time fair queueing by weight, under priority classes with ageing.

Pure: no clock, no queue, no I/O. The caller says who is ready and for how long, serves whom it is told, and charges
what that cost. The training queue, the training engine and the inference batcher all choose with it. What a unit of
cost is, is theirs to say, if only it is one for all: samples at the queue, device-seconds at the engines, which
charge an estimate when they choose and settle the rest when the cost was measured (:mod:`joynexus.scheduling.cost`).

Each tenant has a virtual time, which advances by cost / weight when it is charged; the one that is furthest behind
is next. Tenants that share a class have one virtual clock, the least virtual time among those that are ready. A
tenant that was idle starts at that clock: it is next, but it has saved up nothing.

Bounds, with ``c`` the dearest single item of a tenant and ``w`` its weight (each is a test):

- Two tenants of one class that are ready all the time, one at a time: cost / weight of the two differs by at most
  ``c1 / w1 + c2 / w2``, for ever. So over a long time shares are as the weights, whatever single items cost.
- The same where groups are chosen with :meth:`FairShare.beside`: by at most twice that and ``lead``, since a member
  may be up to one item of its own and ``lead`` ahead of the leader. What was estimated wrongly adds its error until
  it is settled.
- A tenant that becomes ready is chosen before any that was served since; one of a lower class, once it has waited
  ``ageing_s`` for each class between, and from then on once in that time.
- Whoever stays ready is chosen: the leader is always the one that is furthest behind, whatever its signature.

Reference:
    Goyal, Vin and Cheng 1996, start-time fair queueing, https://doi.org/10.1145/248156.248171.
"""

import heapq
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Literal

from joynexus.errors import TenantNotFoundError

Priority = Literal["low", "normal", "high"]
"""Classes, lowest first; a higher one is served before a lower one."""

_CLASSES: dict[Priority, int] = {"low": 0, "normal": 1, "high": 2}
_TOP = max(_CLASSES.values())
_ROUNDING = 1e-9
"""Relative: sums of equal costs taken in another order must still count as equal."""


@dataclass(slots=True)
class _Share:
    """One tenant's account."""

    weight: float
    rank: int
    """Of its priority class."""
    order: int
    """Of registration: the last tie-break, so that replays agree."""
    virtual_time: float = 0.0
    last_served: int = -1
    """Number of its newest charge; -1 before the first."""


class FairShare:
    """Weighted fair choice among tenants."""

    def __init__(self, ageing_s: float = 10.0) -> None:
        """Start without tenants.

        Args:
            ageing_s: A tenant that has waited this long counts as one class higher, after twice as long as two, up
                to the highest; so no class starves.
        """
        if not ageing_s > 0.0:
            raise ValueError(f"fair share: ageing_s is {ageing_s}. Give a positive number of seconds.")
        self._ageing_s = ageing_s
        self._shares: dict[str, _Share] = {}
        self._clocks = [0.0] * len(_CLASSES)
        self._ready_before: set[str] = set()
        self._num_added = 0
        self._num_charges = 0

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._shares

    def add(self, tenant: str, weight: float = 1.0, priority: Priority = "normal") -> None:
        """Register a tenant, or change the weight and class of one that is; it keeps what it has been charged.

        Args:
            tenant: Its name.
            weight: Its share against the others of its class; positive.
            priority: Its class.

        Raises:
            ValueError: If the weight is not positive.
        """
        if not weight > 0.0:
            raise ValueError(f"tenant {tenant!r}: weight is {weight}. Give a positive number.")
        rank = _CLASSES[priority]
        known = self._shares.get(tenant)
        if known is not None and known.rank == rank:
            known.weight = weight
            return
        # Classes have clocks of their own, so a virtual time means nothing in another class: enter as a newcomer.
        self._ready_before.discard(tenant)
        self._shares[tenant] = _Share(weight=weight, rank=rank, order=self._num_added)
        self._num_added += 1

    def remove(self, tenant: str) -> None:
        """Forget a tenant; unknown ones are ignored."""
        self._shares.pop(tenant, None)
        self._ready_before.discard(tenant)

    def choose(self, ready: Mapping[str, float], among: Container[str] | None = None) -> str:
        """Say who is served next. Asking again gives the same answer until somebody is charged.

        Args:
            ready: Everybody who has work that could be served, with the seconds that they have waited since their
                work came or since they were last served, whichever is later. Who is not in it counts as idle, and
                gives up the credit of having been passed over: name also those that this choice can't take.
            among: The tenants that this choice can take, such as those of one schema signature; None takes all.

        Returns:
            The tenant.

        Raises:
            ValueError: If there is nobody to choose from.
            TenantNotFoundError: If a ready tenant was never added.
        """
        self._advance(ready)
        candidates = ready if among is None else [tenant for tenant in ready if tenant in among]
        if not candidates:
            raise ValueError(f"fair share: none of the {len(ready)} ready tenants may be chosen. Pass at least one.")
        return min(candidates, key=lambda tenant: self.rank(tenant, ready[tenant]))

    def beside(
        self,
        leader: str,
        ready: Mapping[str, float],
        costs: Mapping[str, float],
        among: Container[str],
        lead: float = 0.0,
    ) -> list[str]:
        """Say who may share a group with the tenant whose turn it is, one item each.

        A group that took everybody would give each tenant as many items as any other, whatever the weights and
        whatever the items cost. So a tenant may join while it is ahead of the leader by at most one item of its own:
        equal ones always join, and one that weighs less, or whose items cost more, joins as often as it has a right to.
        A further lead changes only when that begins.

        Args:
            leader: As :meth:`choose` has just said.
            ready: As for :meth:`choose`.
            costs: Of each one's next item.
            among: Who can join at all, such as those of the leader's signature.
            lead: Cost by weight that a member may be ahead of the leader, beside one item of its own.

        Returns:
            The others, who is owed most first. Those of a lower class than the leader's are not among them.
        """
        first = self.rank(leader, ready[leader])
        ranked = sorted((self.rank(each, ready[each]), each) for each in ready if each != leader and each in among)
        joining: list[str] = []
        for rank, tenant in ranked:
            one_item = costs[tenant] / self._shares[tenant].weight
            if rank[0] == first[0] and rank[1] - first[1] <= (lead + one_item) * (1.0 + _ROUNDING):
                joining.append(tenant)
        return joining

    def before(self, served: Collection[str], ready: Mapping[str, float]) -> list[str]:
        """Say who is owed more than each of those that are being served.

        Args:
            served: Who is being served, and is charged an estimate for it. It moves no clock until it is settled: else
                whoever comes meanwhile would enter with a debt, where the estimate was too high.
            ready: As for :meth:`choose`; also those of ``served`` that have more work.

        Returns:
            The others, who is owed most first.
        """
        self._advance(ready, served)
        first = min(self.rank(tenant, ready.get(tenant, 0.0)) for tenant in served)
        ranked = sorted((self.rank(each, wait_s), each) for each, wait_s in ready.items() if each not in served)
        return [tenant for rank, tenant in ranked if rank < first]

    def charge(self, tenant: str, cost: float | int) -> None:
        """Book what a tenant was served.

        Args:
            tenant: Who was served.
            cost: In the caller's unit, as far as it is known.

        Raises:
            TenantNotFoundError: If it was never added.
        """
        share = self._share(tenant)
        share.virtual_time += cost / share.weight
        share.last_served = self._num_charges
        self._num_charges += 1

    def settle(self, tenant: str, difference: float) -> None:
        """Correct a charge, now that the cost is known; it is no service, and a tenant that has left is ignored.

        Args:
            tenant: Who was charged.
            difference: Measured less charged; negative gives back.
        """
        share = self._shares.get(tenant)
        if share is not None:
            share.virtual_time += difference / share.weight

    def begin_round(
        self, ready: Mapping[str, float], among: Container[str] | None = None, served: Container[str] = ()
    ) -> "FairRound":
        """Begin to fill a group: like :meth:`choose` again and again, at the cost of a heap in place of a scan.

        Args:
            ready: As for :meth:`choose`.
            among: As for :meth:`choose`; may leave nobody.
            served: As for :meth:`before`.

        Returns:
            The round; its choices hold as long as nobody is charged outside it.

        Raises:
            TenantNotFoundError: If a ready tenant was never added.
        """
        self._advance(ready, served)
        return FairRound(self, {tenant: wait_s for tenant, wait_s in ready.items() if among is None or tenant in among})

    def rank(self, tenant: str, wait_s: float) -> tuple[int, float, int, int]:
        """Return a tenant's sort key: class with ageing, how far ahead of its class, who was served longest ago."""
        share = self._share(tenant)
        effective = min(_TOP, share.rank + int(wait_s / self._ageing_s))
        ahead = share.virtual_time - self._clocks[share.rank]
        return (-effective, ahead, share.last_served, share.order)

    def _share(self, tenant: str) -> _Share:
        share = self._shares.get(tenant)
        if share is None:
            raise TenantNotFoundError(f"tenant {tenant!r}: has no fair share. Add it before it is ready.")
        return share

    def _advance(self, ready: Mapping[str, float], served: Container[str] = ()) -> None:
        """Move the clocks of the classes on, and let those in who were idle."""
        least: dict[int, float] = {}
        entering: list[_Share] = []
        for tenant in ready:
            share = self._share(tenant)
            if tenant in served:
                continue
            if tenant in self._ready_before:
                least[share.rank] = min(least.get(share.rank, share.virtual_time), share.virtual_time)
            else:
                entering.append(share)
        for rank, virtual_time in least.items():
            self._clocks[rank] = max(self._clocks[rank], virtual_time)
        for share in entering:
            share.virtual_time = max(share.virtual_time, self._clocks[share.rank])
        self._ready_before = set(ready)


class FairRound:
    """The choices of one group, from tenants that were ready when it began."""

    def __init__(self, fair: FairShare, ready: Mapping[str, float]) -> None:
        self._fair = fair
        self._heap = [(fair.rank(tenant, wait_s), tenant) for tenant, wait_s in ready.items()]
        heapq.heapify(self._heap)

    def next(self) -> str | None:
        """Take out the tenant that is served next; None if nobody is left.

        It comes back into the round with :meth:`charge`. One that does not fit into the group stays out: it has lost
        nothing, and is the first again in the next round.
        """
        return heapq.heappop(self._heap)[1] if self._heap else None

    def charge(self, tenant: str, cost: float | int, *, has_more: bool) -> None:
        """Book what the tenant was served, and let it take part again if it has more."""
        self._fair.charge(tenant, cost)
        if has_more:
            heapq.heappush(self._heap, (self._fair.rank(tenant, 0.0), tenant))
