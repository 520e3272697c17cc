"""The HealthManager: pings every role, and makes a dead or hung one anew.

It runs as one thread of the Master. Which role to replace and when to give up is decided by the pure
:class:`joynexus.scheduling.health.HealthMonitor`; this file pings, kills, starts and restores, one role at a time, and
touches nothing else. The newest answer of each ping is kept: it is how the Master learns of progress.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from joynexus.actors import ray_calls
from joynexus.actors.roles import Role, end_role, first_line, start_role
from joynexus.errors import JoyNexusError
from joynexus.scheduling.health import HealthMonitor, Restart
from joynexus.specs.service import HealthSpec

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Watched:
    role: Role
    restore: Callable[[], None]
    on_answer: Callable[[Any], None] | None
    handle: Any
    ping: Any = None
    pinged_at: float = 0.0
    answer: Any = None


class HealthManager:
    """Watches the roles of one service."""

    def __init__(self, spec: HealthSpec, namespace: str, *, on_failed: Callable[[Role, str], None]) -> None:
        self._spec = spec
        self._namespace = namespace
        self._on_failed = on_failed
        self._monitor = HealthMonitor(spec)
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.restarts: dict[str, int] = {}

    def start(self) -> None:
        """Begin to watch, in a thread of its own."""
        threading.Thread(target=self._run, name="health", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its current round."""
        self._stop.set()

    def watch(self, role: Role, restore: Callable[[], None], on_answer: Callable[[Any], None] | None = None) -> Any:  # noqa: ANN401
        """Start a role (or find it) and keep it alive.

        Args:
            role: What to start.
            restore: Called after the role was made anew: repeats what it had been told to do.
            on_answer: Called with each answer to a ping.

        Returns:
            The actor's handle.
        """
        handle = start_role(role, self._namespace)
        with self._lock:
            self._watched[role.name] = _Watched(role=role, restore=restore, on_answer=on_answer, handle=handle)
            self._monitor.add(role.name, tenant=role.tenant, now=time.monotonic())
        return handle

    def unwatch(self, name: str, *, end: bool = True) -> None:
        """Stop to watch a role, and end it."""
        with self._lock:
            self._watched.pop(name, None)
            self._monitor.remove(name)
        if end:
            end_role(name, self._namespace)

    def answer(self, name: str) -> Any:  # noqa: ANN401
        """The role's newest ping answer; None before the first."""
        watched = self._watched.get(name)
        return None if watched is None else watched.answer

    def _run(self) -> None:
        while not self._stop.wait(self._spec.period_s):
            try:
                self._round()
            except Exception:  # the watcher itself must survive whatever a round meets
                log.exception("health round failed")

    def _round(self) -> None:
        with self._lock:
            watched = list(self._watched.values())
        for each in watched:
            self._look_at(each)
        for action in self._monitor.decide(time.monotonic()):
            entry = self._watched.get(action.role)
            if entry is None:
                continue
            if isinstance(action, Restart):
                self._restart(entry, action.reason)
            else:
                log.error("role %s is given up: %s", action.role, action.reason, extra=_about(entry.role))
                self._on_failed(entry.role, action.reason)

    def _look_at(self, entry: _Watched) -> None:
        """Collect the answer of the ping in flight, or send a new one; never wait."""
        now, name = time.monotonic(), entry.role.name
        if entry.ping is None:
            entry.ping, entry.pinged_at = entry.handle.ping.remote(), now
        if not ray_calls.is_ready(entry.ping):
            if now - entry.pinged_at > self._spec.timeout_s:
                self._monitor.missed(name, now=now)
                entry.ping = None
            return
        try:
            entry.answer = ray.get(entry.ping)
            if entry.on_answer is not None:
                entry.on_answer(entry.answer)
            self._monitor.answered(name, now=now)
        except (RayError, JoyNexusError) as error:
            self._monitor.died(name, reason=f"{type(error).__name__}: {first_line(error)}", now=now)
        entry.ping = None

    def _restart(self, entry: _Watched, reason: str) -> None:
        name = entry.role.name
        log.warning("restarting %s: %s", name, reason, extra=_about(entry.role))
        end_role(name, self._namespace)
        entry.ping = None
        try:
            entry.handle = start_role(entry.role, self._namespace)
            entry.restore()
        except (RayError, JoyNexusError) as error:
            self._monitor.died(name, reason=f"restore failed: {error}", now=time.monotonic())
            return
        self.restarts[name] = self.restarts.get(name, 0) + 1
        self._monitor.restarted(name, now=time.monotonic())


def _about(role: Role) -> dict[str, str]:
    """Say whose log a role's record belongs into."""
    return {} if role.tenant is None else {"tenant": role.tenant}
