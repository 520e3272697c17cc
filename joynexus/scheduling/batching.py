"""How long a group waits for further members. Pure: no clock, no queue; time is an argument.

A forward over ``r`` rows takes about ``fixed + per_row x r`` seconds. Somebody who joins a group saves the fixed part,
once; somebody who comes a moment too late needs a forward of its own. Against that stands what waiting costs. With
``n`` who wait and ``k`` more that come within ``d`` seconds, going at once lets the ``n`` finish after one forward
and the ``k`` after two; waiting lets all finish after one, which begins ``d`` later and is ``k`` rows longer. The sum
over all of them of the time until they have their answers is less by waiting where, with ``worth`` = 1,

    worth x k x fixed  -  n x k x per_row  >  (n + k) x d     (of the k, each from its own arrival on)

But the fixed part is saved for everybody who shares the device, not for those k alone: so it is worth more than a
second of one caller's time (:data:`WORTH`). A group waits exactly as long as that is so: a lonely caller never waits,
since nobody else is expected (k = 0); where forwards grow with their rows (per_row x n > worth x fixed) nobody does;
and where the fixed part is large and callers come back soon, as robots do, a group waits until as many are there as
lately took turns. A hard bound holds always.

Who is expected is learnt: after an answer a caller is *away*, and comes back after about as long as lately. One that
is overdue by more than its times vary is waited for no longer.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WORTH = 4.0
"""Seconds of one caller's time that a second of the device is worth. Measured on a virtual clock with 8 tenants: at 1
groups are half as full as they can be, from 3 on nearly as full as if all waited for ``max_wait_ms``, in little more
than half of the time."""
FORGET_S = 5.0
"""Who is away for longer counts as a new caller; nobody waits for so long by far."""
MAX_AWAY = 64
"""Callers of one tenant that are away and remembered."""
_NEWEST = 0.3
"""Weight of the newest measurement in a moving mean."""
_LATE = 3.0
"""Mean deviations after which somebody who is expected is given up."""
_LEAST_LATE = 0.1
"""Part of its usual time that a caller may be late, however regular it was."""
_LEAST_LATE_S = 0.001
"""The same in seconds, for one that asks again at once: that takes a moment too."""
_DECAY = 0.95
"""What a run counts for at the next one: about the last 20 runs decide."""
_TRIED = 8.0
"""Runs after which a much slower one counts as a hiccup, and no more than :data:`_HICCUP` times the usual."""
_HICCUP = 3.0
_PRIOR = 0.05
"""Weight of the slope that is known, against the (relative) variance of the rows that were run."""
_FIRST_SLOPE = 0.1
"""The first guess: this part of a forward grows with its rows."""


class ForwardCost:
    """Seconds of a forward over some rows: ``fixed_s + per_row_s * rows``, fitted to the latest runs."""

    def __init__(self, fixed_s: float = 0.0, per_row_s: float = 0.0) -> None:
        """Start from a guess, which the first run replaces."""
        self.fixed_s = fixed_s
        self.per_row_s = per_row_s
        self._evidence = 0.0
        """Runs of sizes different enough to tell the two parts apart."""
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0

    def __call__(self, rows: float | int) -> float:
        """Return the seconds of a forward over so many rows."""
        return self.fixed_s + self.per_row_s * rows

    def rows_within(self, seconds: float) -> int:
        """Return over how many rows a forward takes so long at most; 0 where it takes longer for any."""
        if seconds < self.fixed_s:
            return 0
        return int((seconds - self.fixed_s) / self.per_row_s + 1e-9) if self.per_row_s else sys.maxsize

    @property
    def is_known(self) -> bool:
        """Whether the two parts were told apart: until then the slope is a guess."""
        return self._evidence >= 1.0

    def may_gain(self, sharing: int, worth: float = WORTH) -> bool:
        """Whether a group of so many requests could gain anything by company, if it came at once."""
        return worth * self.fixed_s > sharing * self.per_row_s

    def measured(self, rows: int, seconds: float) -> None:
        """Learn from a run of at least one row."""
        if self._count > _TRIED:
            seconds = min(seconds, _HICCUP * self(rows))
        keep = _DECAY
        self._count = keep * self._count + 1.0
        self._rows = keep * self._rows + rows
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + rows * rows
        self._products = keep * self._products + rows * seconds
        mean_rows, mean_seconds = self._rows / self._count, self._seconds / self._count
        variance = max(self._squares / self._count - mean_rows * mean_rows, 0.0)
        covariance = self._products / self._count - mean_rows * mean_seconds
        # Runs of one size don't tell the two parts apart, so the slope moves only as fast as sizes differ. At first it
        # is taken to be small: then groups form, sizes differ, and it is learnt; else nobody would wait and find out.
        most = mean_seconds / mean_rows
        known = self.per_row_s if self._count > 1.0 else most * _FIRST_SLOPE
        trust = _PRIOR * mean_rows * mean_rows
        self._evidence += variance / (variance + trust)
        self.per_row_s = min(max((covariance + trust * known) / (variance + trust), 0.0), most)
        self.fixed_s = mean_seconds - self.per_row_s * mean_rows


@dataclass(frozen=True, slots=True)
class Expected:
    """Somebody who is likely to come."""

    tenant: str
    due: float
    """When, in seconds of the clock that is used."""
    rows: int
    """With how many rows."""
    patience_s: float
    """How much later it may still come."""


@dataclass(slots=True)
class _Away:
    """Callers of one tenant that have their answers and have not asked again."""

    since: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_AWAY))
    away_s: float | None = None
    """How long they stay away, lately."""
    spread_s: float = 0.0
    """Mean deviation of it."""
    rows: int = 1

    def came(self, after_s: float) -> None:
        if self.away_s is None:
            self.away_s, self.spread_s = after_s, after_s / 2
            return
        self.spread_s += _NEWEST * (abs(after_s - self.away_s) - self.spread_s)
        self.away_s += _NEWEST * (after_s - self.away_s)


class Arrivals:
    """Who of one schema signature comes back, and when. An arrival and an answer cost a few operations."""

    def __init__(self) -> None:
        self._away: dict[str, _Away] = {}
        self._any = _Away()
        """Of all tenants, for one that has not come back yet."""

    def enter(self, tenant: str, now: float, rows: int = 1) -> None:
        """Note that one of a tenant's callers is here: the one that has been away longest, or a new one."""
        away = self._away.get(tenant)
        if away is None:
            away = self._away[tenant] = _Away()
        away.rows = rows
        while away.since:
            after_s = now - away.since.popleft()
            if after_s <= FORGET_S:
                away.came(after_s)
                self._any.came(after_s)
                return

    def leave(self, tenant: str, now: float) -> None:
        """Note that one of a tenant's callers has its answer, so that it may come back."""
        away = self._away.get(tenant)
        if away is not None:
            away.since.append(now)

    def forget(self, tenant: str) -> None:
        """Expect a tenant no more; unknown ones are ignored."""
        self._away.pop(tenant, None)

    def lately(self, now: float) -> dict[str, int]:
        """Return the tenants that have callers away who may come back, each with the rows of its latest request."""
        return {
            tenant: away.rows for tenant, away in self._away.items() if away.since and now - away.since[-1] <= FORGET_S
        }

    def expected(self, now: float, until: float) -> list[Expected]:
        """Return who is likely to come before a time, the earliest first."""
        found: list[Expected] = []
        gone: list[str] = []
        for tenant, away in self._away.items():
            if not away.since:
                continue
            if now - away.since[-1] > FORGET_S:
                gone.append(tenant)
                continue
            known = self._any if away.away_s is None else away
            if known.away_s is None:
                continue
            patience_s = max(_LATE * known.spread_s, _LEAST_LATE * known.away_s, _LEAST_LATE_S)
            for since in away.since:
                latest = since + known.away_s + patience_s
                due = max(since + known.away_s, now)
                if due <= until and now < latest:
                    found.append(Expected(tenant, due, away.rows, max(latest - due, 0.0)))
        for tenant in gone:
            del self._away[tenant]
        found.sort(key=lambda each: each.due)
        return found


def wait_until(
    now: float,
    *,
    bound: float,
    waiting: int,
    sharing: int,
    room: float | int,
    expected: Sequence[Expected],
    cost: ForwardCost,
    worth: float = WORTH,
) -> float:
    """Say until when to wait for further members of a group; asked again after each arrival.

    Args:
        now: Seconds.
        bound: Never wait for longer than until then.
        waiting: Requests that any wait delays, whether they can join this group or not.
        sharing: Requests that are in the group: those that its further rows delay.
        room: Rows that can still join.
        expected: Who is likely to come, the earliest first.
        cost: Of a forward.
        worth: Seconds of one caller's time that a second of the device is worth.

    Returns:
        ``now`` to go at once, else a time not after ``bound``.
    """
    best, until = 0.0, now
    rows, dues = 0, 0.0
    for count, each in enumerate(expected, start=1):
        rows += each.rows
        dues += each.due
        if each.due > bound or rows > room:
            break
        saved = worth * count * cost.fixed_s - sharing * rows * cost.per_row_s
        lost = waiting * (each.due - now) + count * each.due - dues
        if saved - lost > best:
            best, until = saved - lost, min(bound, each.due + each.patience_s)
    return until
