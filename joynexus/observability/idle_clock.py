"""Why an engine was idle: the wall time of the loop that drives it, by reason. Without torch."""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

IdleReason = Literal["no_data", "waiting_for_group", "copying", "control"]
IDLE_REASONS: tuple[IdleReason, ...] = ("no_data", "waiting_for_group", "copying", "control")
"""Nothing to compute; something is there and the group is awaited; weights are copied or written; all else that the
loop does itself: commands, learners' bookkeeping, handing over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTimes:
    """What an idle clock has seen."""

    idle: Mapping[IdleReason, float]
    """Wall seconds by reason."""
    wall_seconds: float
    """Idle and working together: for so long the loop has been watched."""


@dataclass(eq=False, slots=True)
class _Phase:
    reason: IdleReason | None
    """None: working."""


@dataclass(slots=True)
class _Sums:
    idle: dict[IdleReason, float] = field(default_factory=dict[IdleReason, float])
    working: float = 0.0

    def add(self, phase: _Phase, seconds: float) -> None:
        if phase.reason is None:
            self.working += seconds
        elif seconds:
            self.idle[phase.reason] = self.idle.get(phase.reason, 0.0) + seconds


class IdleClock:
    """Tells a loop's wall time apart: each moment belongs to the innermost block that is open.

    One loop enters the blocks, though parts of it may run in other threads while it waits for them. Reading is
    thread-safe, and holds the phase that lasts.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start unwatched: time outside all blocks is not counted.

        Args:
            now: Wall clock, in seconds.
        """
        self._now = now
        self._lock = threading.Lock()
        self._phases: list[_Phase] = []
        self._since = 0.0
        self._sums = _Sums()

    def watch(self, reason: IdleReason) -> None:
        """Begin to watch: what is in no block is from now on idle for this reason."""
        with self._lock:
            self._book()
            self._phases.insert(0, _Phase(reason))

    @contextmanager
    def because(self, reason: IdleReason) -> Generator[None]:
        """Count what is inside as idle, for a reason; what is nested in it goes to its own."""
        yield from self._inside(_Phase(reason))

    @contextmanager
    def working(self) -> Generator[None]:
        """Count what is inside as work of the engine."""
        yield from self._inside(_Phase(None))

    def move(self, seconds: float, source: IdleReason, target: IdleReason) -> None:
        """Correct a reason that was learnt of only afterwards.

        Args:
            seconds: How much; at most what stands under ``source``.
            source: What it was taken for.
            target: What it was.
        """
        with self._lock:
            self._book()
            moved = max(0.0, min(seconds, self._sums.idle.get(source, 0.0)))
            self._sums.add(_Phase(source), -moved)
            self._sums.add(_Phase(target), moved)

    def times(self) -> IdleTimes:
        """Return the sums up to now."""
        with self._lock:
            self._book()
            idle = dict(self._sums.idle)
            return IdleTimes(idle=idle, wall_seconds=self._sums.working + sum(idle.values()))

    def _inside(self, phase: _Phase) -> Generator[None]:
        with self._lock:
            self._book()
            self._phases.append(phase)
        try:
            yield
        finally:
            with self._lock:
                self._book()
                self._phases.remove(phase)  # by identity; a block that was cancelled may end before one inside it

    def _book(self) -> None:
        now = self._now()
        if self._phases:
            self._sums.add(self._phases[-1], now - self._since)
        self._since = now
