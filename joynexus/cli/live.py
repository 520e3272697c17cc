"""Live progress of tenants: a table that refreshes on a terminal; elsewhere, a line when something changes."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from joynexus.api.follow import progress_line

LINE_EVERY_S = 5.0
"""Where nobody sees a table refresh: seconds between two lines about one tenant, unless its status changes."""


class LiveProgress:
    """Shows statuses as they come; use it as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._shown: dict[str, tuple[str, str]] = {}
        self._shown_at: dict[str, float] = {}
        self._told: set[tuple[str, int]] = set()
        self._started = time.monotonic()

    def __enter__(self) -> "LiveProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, statuses: Mapping[str, Mapping[str, Any]]) -> None:
        """Show the newest statuses, and once what each says of the fit of new data."""
        for name, status in statuses.items():
            self._tell_fit(name, status)
        if self._live is not None:
            self._live.update(self._table(statuses))
        else:
            for name, status in statuses.items():
                self._line(name, status)

    def _tell_fit(self, name: str, status: Mapping[str, Any]) -> None:
        for index, workload in enumerate(status["workloads"]):
            fit = workload["results"].get("fit")
            if fit and (name, index) not in self._told:
                self._told.add((name, index))
                for line in fit["lines"]:
                    self._console.print(f"{name}: {line}", highlight=False, soft_wrap=True)

    def _table(self, statuses: Mapping[str, Mapping[str, Any]]) -> Table:
        table = Table("tenant", "status", "progress", "version", "device s")
        for name, status in statuses.items():
            seconds, version = f"{status['device_seconds']:.1f}", str(status["policy_version"])
            table.add_row(name, status["status"], progress_line(status), version, seconds)
        return table

    def _line(self, name: str, status: Mapping[str, Any]) -> None:
        now, found = time.monotonic(), (str(status["status"]), progress_line(status))
        before = self._shown.get(name)
        is_news = before is None or before[0] != found[0]
        is_due = found != before and now - self._shown_at.get(name, 0.0) > LINE_EVERY_S
        if is_news or is_due:
            self._shown[name], self._shown_at[name] = found, now
            elapsed = now - self._started
            text = f"{elapsed:7.1f} s  {name:<20} {found[0]:<10} v{status['policy_version']:<5} {found[1]}"
            self._console.print(text, highlight=False, soft_wrap=True)
