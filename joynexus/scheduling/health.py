"""Which role is replaced, and which tenant is given up. Pure: the caller pings, and brings the clock.

    add      -> starting
    starting -> up          the first answer
    starting -> restarting  it died, or gave no answer within startup_s
    up       -> restarting  it died, or missed missed_pings in a row
    restarting -> starting  the caller has made it anew; more than max_restarts in a window -> FailTenant

A pinging role may still achieve nothing: workloads are tracked apart, and one that makes no progress for ``stall_s``
fails its tenant. So whatever happens, a tenant ends or moves within a time that follows from the spec.
"""

from dataclasses import dataclass, field

from joynexus.specs.service import HealthSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Kill the role, make it anew under its name, and restore it; nothing else is touched."""

    role: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailTenant:
    """Give the role up, and its tenant with it."""

    role: str
    """The role, or the workload that stalled."""
    tenant: str | None
    """None for a role of the service: every tenant that needs it fails."""
    reason: str


@dataclass(kw_only=True, slots=True)
class _Role:
    tenant: str | None
    since: float
    """When it was started, or ordered to be restarted."""
    is_up: bool = False
    """Has answered since ``since``."""
    missed: int = 0
    """Pings in a row."""
    fault: str | None = None
    """Why it has to be replaced; None while it is well."""
    restarts: list[float] = field(default_factory=list[float])
    """Times of the restarts ordered within the window."""


@dataclass(kw_only=True, slots=True)
class _Work:
    tenant: str
    marker: object
    since: float
    """When the marker last changed."""


class HealthMonitor:
    """Decides for all roles and workloads of one service."""

    def __init__(self, spec: HealthSpec) -> None:
        self._spec = spec
        self._roles: dict[str, _Role] = {}
        self._work: dict[str, _Work] = {}

    def add(self, role: str, *, tenant: str | None, now: float) -> None:
        """Watch a role from its start on; a role that is watched already keeps its history of restarts.

        Args:
            role: Its name.
            tenant: Who fails with it; None for a role of the service.
            now: The caller's monotonic clock, in seconds, as everywhere here.
        """
        known = self._roles.get(role)
        history = known.restarts if known else []
        self._roles[role] = _Role(tenant=tenant, since=now, restarts=history)

    def remove(self, role: str) -> None:
        """Stop to watch a role; harmless if it is not watched."""
        self._roles.pop(role, None)

    def answered(self, role: str, *, now: float) -> None:
        """Note that a ping was answered."""
        del now
        if (watched := self._roles.get(role)) is not None:
            watched.is_up, watched.missed = True, 0

    def missed(self, role: str, *, now: float) -> None:
        """Note that a ping was not answered in time; before the first answer, ``startup_s`` alone counts."""
        del now
        if (watched := self._roles.get(role)) is not None and watched.is_up:
            watched.missed += 1

    def died(self, role: str, *, reason: str, now: float) -> None:
        """Note that a role is known to be dead, or could not be started or restored."""
        del now
        if (watched := self._roles.get(role)) is not None:
            watched.fault = reason

    def restarted(self, role: str, *, now: float) -> None:
        """Note that an ordered restart is done; the role has its start-up time again."""
        if (watched := self._roles.get(role)) is not None:
            watched.since, watched.is_up, watched.missed, watched.fault = now, False, 0, None

    def track(self, work: str, *, tenant: str, now: float) -> None:
        """Expect progress of a workload from now on."""
        self._work[work] = _Work(tenant=tenant, marker=None, since=now)

    def progressed(self, work: str, marker: object, *, now: float) -> None:
        """Note how far a workload is; any change of ``marker`` is progress."""
        if (tracked := self._work.get(work)) is not None and tracked.marker != marker:
            tracked.marker, tracked.since = marker, now

    def untrack(self, work: str) -> None:
        """Expect nothing of a workload any more; harmless if it is not tracked."""
        self._work.pop(work, None)

    def num_restarts(self, role: str, *, now: float) -> int:
        """Count the restarts of a role within the window."""
        watched = self._roles.get(role)
        return 0 if watched is None else len(self._recent(watched, now))

    def decide(self, now: float) -> list[Restart | FailTenant]:
        """Return what has to be done now, each thing once.

        A role that is given up, or a workload that stalled, is forgotten: the caller ends it.
        """
        actions: list[Restart | FailTenant] = []
        for name, role in list(self._roles.items()):
            fault = role.fault or self._fault(role, now)
            if fault is not None:
                actions.append(self._replace(name, role, fault, now))
        for name, work in list(self._work.items()):
            if now - work.since > self._spec.stall_s:
                del self._work[name]
                reason = (
                    f"no progress for {now - work.since:.0f} s (stall_s {self._spec.stall_s:g}), last {work.marker!r}"
                )
                actions.append(FailTenant(role=name, tenant=work.tenant, reason=reason))
        return actions

    def _fault(self, role: _Role, now: float) -> str | None:
        if role.missed >= self._spec.missed_pings:
            return f"hung: {role.missed} pings of {self._spec.timeout_s:g} s missed in a row"
        if not role.is_up and now - role.since > self._spec.startup_s:
            return f"hung: no first answer within {self._spec.startup_s:g} s"
        return None

    def _recent(self, role: _Role, now: float) -> list[float]:
        return [each for each in role.restarts if now - each <= self._spec.restart_window_s]

    def _replace(self, name: str, role: _Role, fault: str, now: float) -> Restart | FailTenant:
        recent = self._recent(role, now)
        if len(recent) >= self._spec.max_restarts:
            del self._roles[name]
            reason = f"{fault}; restarted {len(recent)} times in {self._spec.restart_window_s:g} s already"
            return FailTenant(role=name, tenant=role.tenant, reason=reason)
        # Ordering it starts the clock anew, so that a restart that never gets anywhere is noticed as well.
        self._roles[name] = _Role(tenant=role.tenant, since=now, restarts=[*recent, now])
        return Restart(role=name, reason=fault)
