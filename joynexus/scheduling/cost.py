"""What a call costs the device, in seconds: estimated before it runs, known after. Pure: no clock, no torch.

    seconds = rows to encode x tokens of a prefix x seconds per token  +  rows x the tenant's seconds per row

The first part is the backbone's; the second is the tenant's own module, forward, backward and update. Both are learnt
from what was measured of the tenant, and before that from what was of the others: a token costs less in company than
alone, since a forward has a fixed part, so that what it costs is a tenant's own too. How many rows will have to be
encoded is learnt as well: a tenant whose prefixes are found in the store, or come with their features, is soon taken
to pay for its module alone. An estimate only decides the order until the cost is known: whoever charges it settles the
difference then (:meth:`joynexus.scheduling.fairness.FairShare.settle`).
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from joynexus.scheduling.fairness import FairShare

PRIOR_TOKEN_S = 1e-5
"""Seconds per token of a prefix before any was measured; any value does, since the first measurement replaces it."""
PRIOR_HEAD_S = 1e-3
"""Seconds per row of a module before any tenant's was measured."""
_NEWEST = 0.3
"""Weight of the newest measurement in a moving mean."""
_HICCUP = 3.0
"""A measurement counts for no more than this many times its estimate: what the machine did meanwhile is no tenant's."""


class Measured(NamedTuple):
    """What calls of one tenant turned out to cost."""

    rows: int = 0
    """That counted."""
    encoded: int = 0
    """Of these, rows that the backbone ran over for this tenant."""
    prefix_s: float = 0.0
    """Seconds of the backbone."""
    head_s: float = 0.0
    """Seconds of all else: it is the tenant's own."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefix_s + self.head_s


@dataclass(slots=True)
class _Rates:
    """What is known of one tenant."""

    tokens: int
    prior_head_s: float | None
    head_s: float | None = None
    token_s: float | None = None
    encoded: float = 1.0
    """Part of its rows that had to be encoded lately."""
    count: int = 0
    """Measurements so far."""


class CostModel:
    """Learns what calls cost. The tenants of one backbone share what is learnt of it."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Rates] = {}
        self._token_s: float | None = None
        self._head_s: float | None = None
        """Of all tenants, for one that was never measured."""
        self._count = 0

    def add(self, tenant: str, *, tokens: int = 1, head_s: float | None = None) -> None:
        """Take a tenant in; one that is known keeps what was learnt.

        Args:
            tenant: Its name.
            tokens: Of one row's prefix, padding included; 1 where the lengths of all prefixes are alike.
            head_s: First guess at its seconds per row; None takes the mean of the others.
        """
        known = self._tenants.get(tenant)
        if known is None:
            self._tenants[tenant] = _Rates(tokens=tokens, prior_head_s=head_s)
        else:
            known.tokens = tokens

    def remove(self, tenant: str) -> None:
        """Forget a tenant; unknown ones are ignored."""
        self._tenants.pop(tenant, None)

    def estimate(self, tenant: str, rows: int, *, encoded: int | None = None) -> float:
        """Return what a call will cost, in seconds.

        Args:
            tenant: Whose; one that was never added is taken for an average one.
            rows: Of the call.
            encoded: Rows that have to be encoded, if that is known; None expects as many as lately.

        Returns:
            A positive number for at least one row.
        """
        rates = self._rates(tenant)
        return self.prefix_seconds(tenant, rows, encoded=encoded) + rows * self._head(rates)

    def prefix_seconds(self, tenant: str, rows: int, *, encoded: int | None = None) -> float:
        """Return the backbone's part of :meth:`estimate`."""
        rates = self._rates(tenant)
        known = (rates.token_s, self._token_s, PRIOR_TOKEN_S)
        token_s = next(each for each in known if each is not None)
        return (rows * rates.encoded if encoded is None else encoded) * rates.tokens * token_s

    def encoded_part(self, tenant: str) -> float:
        """Return which part of a tenant's rows has to be encoded, judging by its latest calls; 1 before the first."""
        return self._rates(tenant).encoded

    def measured(self, tenant: str, cost: Measured) -> None:
        """Learn from a call; one without rows teaches nothing."""
        if cost.rows <= 0:
            return
        rates = self._rates(tenant)
        rates.encoded = _mean(rates.encoded, cost.encoded / cost.rows)
        if cost.encoded > 0:
            token_s = cost.prefix_s / (cost.encoded * rates.tokens)
            rates.token_s = _mean(rates.token_s if rates.count > 1 else None, token_s)
            self._token_s = _mean(self._token_s if self._count > 1 else None, token_s)
        head_s = cost.head_s / cost.rows
        rates.head_s = _mean(rates.head_s if rates.count > 1 else None, head_s)
        self._head_s = _mean(self._head_s if self._count > 1 else None, head_s)
        rates.count += 1
        self._count += 1

    def is_warm(self, tenant: str) -> bool:
        """Whether the tenant's first call is over, in which kernels are loaded and buffers made: it is no measure."""
        return self._rates(tenant).count > 0

    def _rates(self, tenant: str) -> _Rates:
        rates = self._tenants.get(tenant)
        return _Rates(tokens=1, prior_head_s=None) if rates is None else rates

    def _head(self, rates: _Rates) -> float:
        known = (rates.head_s, rates.prior_head_s, self._head_s, PRIOR_HEAD_S)
        return next(each for each in known if each is not None)


class Settlement:
    """Charges tenants what they are estimated to cost, and settles it with what an engine has measured."""

    def __init__(self, fair: FairShare, costs: CostModel, spent: Callable[[str], Measured]) -> None:
        """Start with nothing open.

        Args:
            fair: Whose virtual times are corrected.
            costs: Learns from what was measured.
            spent: A tenant's sums since the engine was built. On a GPU they may lag behind; what comes late is
                settled the next time.
        """
        self._fair = fair
        self._costs = costs
        self._spent = spent
        self._open: dict[str, float] = {}
        """Charged, and not yet measured."""
        self._seen: dict[str, Measured] = {}

    def charged(self, tenant: str, cost: float) -> None:
        """Note that a tenant was charged an estimate."""
        if tenant not in self._seen:
            self._seen[tenant] = self._spent(tenant)
        self._open[tenant] = self._open.get(tenant, 0.0) + cost

    def forget(self, tenant: str) -> None:
        """Drop a tenant; unknown ones are ignored."""
        self._open.pop(tenant, None)
        self._seen.pop(tenant, None)

    def settle(self, tenants: Container[str] | None = None) -> Measured:
        """Correct what was charged since the last time, as far as it was measured.

        Args:
            tenants: Whose charges; None takes all. Those of a call that still runs are left open.

        A hiccup of the machine, and the time in which a tenant's first call warms it up, are nobody's debt.

        Returns:
            What was measured, of all tenants together.
        """
        rows = encoded = 0
        prefix_s = head_s = 0.0
        for tenant, charged in list(self._open.items()):
            if tenants is not None and tenant not in tenants:
                continue
            now, before = self._spent(tenant), self._seen[tenant]
            latest = Measured(now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3])
            seconds = latest.prefix_s + latest.head_s
            if seconds <= 0.0:
                continue  # the device has not come to it
            self._seen[tenant] = now
            del self._open[tenant]
            counted = min(seconds, charged * (_HICCUP if self._costs.is_warm(tenant) else 1.0))
            self._fair.settle(tenant, counted - charged)
            self._costs.measured(tenant, latest)
            rows, encoded = rows + latest.rows, encoded + latest.encoded
            prefix_s, head_s = prefix_s + latest.prefix_s, head_s + latest.head_s
        return Measured(rows, encoded, prefix_s, head_s)


def _mean(known: float | None, latest: float) -> float:
    return latest if known is None else (1.0 - _NEWEST) * known + _NEWEST * latest
