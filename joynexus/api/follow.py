"""Following a run from outside: what to show while it goes on, and the record of it when it has ended."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from joynexus.actors.records import ENDED
from joynexus.api.service import Service

Statuses = Mapping[str, Mapping[str, Any]]
POLL_S = 0.5


def follow(
    service: Service, tenants: Sequence[str], *, show: Callable[[Statuses], None], poll_s: float = POLL_S
) -> Statuses:
    """Wait until every tenant has ended.

    Args:
        service: Where they run.
        tenants: Their names.
        show: Called with all their statuses at each look.
        poll_s: Seconds between two looks.

    Returns:
        Their final statuses.
    """
    while True:
        everything = service.status()
        statuses = {name: everything[name] for name in tenants}
        show(statuses)
        if all(each["status"] in ENDED for each in statuses.values()):
            return statuses
        time.sleep(poll_s)


def progress_line(status: Mapping[str, Any]) -> str:
    """Describe in one line how far a tenant is."""
    workloads = status["workloads"]
    if status["status"] == "PENDING":
        return "opening"
    if status["status"] == "FAILED":
        return str(status["reason"]).splitlines()[0]
    running = [each for each in workloads if each["status"] == "RUNNING"]
    if not running:
        done = [each for each in workloads if each["status"] == "COMPLETED"]
        return f"{len(done)} of {len(workloads)} workloads"
    return _workload_line(running[0])


def _workload_line(workload: Mapping[str, Any]) -> str:
    results = workload["results"]
    parts = [workload["type"]]
    for unit in ("steps", "iterations", "episodes"):
        if unit in results:
            parts.append(f"{results[unit]}/{results.get('target', '?')} {unit}")
            break
    for name, label in (("loss_last", "loss"), ("return_mean", "return"), ("success_once", "success")):
        if results.get(name) is not None:
            parts.append(f"{label} {results[name]:.3f}")
    return "  ".join(parts)
