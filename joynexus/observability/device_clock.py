"""How long a device works, for whom and at what: spans on a timeline that leaves no second out.

    with clock.step():                        what nobody is named for: split evenly among who took part
        with clock.shared("prefix") as span:  what a group causes together: split by the weights set in span.split
        with clock.span(tenant, "backward"):  one tenant's own

        with clock.aside(tenants):        other tenants' work, for which the step is put aside

Spans may be nested; each moment belongs to the innermost one. On a GPU the marks between them are CUDA events, which
are recorded and never waited for: a span is booked when its events have come to pass. On a CPU a mark is the CPU time
of the engine's threads, so that a neighbour that takes the cores is not charged to anybody.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from joynexus.observability.cpu_time import EngineCpuTime
from joynexus.observability.engine_usage import EngineLedger, Kind


@runtime_checkable
class Marks(Protocol):
    """Makes the marks between spans."""

    def mark(self) -> Any:  # noqa: ANN401  # a number or an event
        """Mark this moment of the device."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:  # noqa: ANN401
        """Device seconds between two marks; None while the device has not come to the second one."""
        ...


class CpuMarks:
    """CPU time of the engine's threads."""

    def __init__(self) -> None:
        self.mark = EngineCpuTime(torch.get_num_threads, _use_all_threads)

    def seconds(self, begin: float, end: float) -> float | None:
        """Always known."""
        return end - begin


class CudaMarks:
    """Events on the present stream of a GPU. Recording one takes microseconds and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Known once the GPU has passed both events, which may be on two streams."""
        return begin.elapsed_time(end) / 1000 if end.query() and begin.query() else None


def device_cores(device: torch.device) -> int:
    """Return how many seconds of the device fit into one of the wall clock: 1 on a GPU, torch's threads on a CPU."""
    return 1 if device.type == "cuda" else torch.get_num_threads()


def device_marks(device: torch.device) -> Marks:
    """Return what marks time on a device."""
    return CudaMarks(device) if device.type == "cuda" else CpuMarks()


@dataclass(eq=False, slots=True)
class Span:
    """A part of a step."""

    kind: Kind
    split: Mapping[str, float | int]
    """Who bears it, by weight; without any weight, all who took part in the step do, evenly."""


class DeviceClock:
    """Books an engine's device time into its ledger. One thread uses it; any may call ``settle``."""

    def __init__(self, ledger: EngineLedger, marks: Marks) -> None:
        """Start outside of any step.

        Args:
            ledger: Where seconds go.
            marks: Of the device.
        """
        self._ledger = ledger
        self._marks = marks
        self._lock = threading.Lock()
        self._stack: list[Span] = []
        self._since: Any = None
        self._rest: list[tuple[Span, Any, Any]] = []
        """Parts of the present step of which it is not known yet who bears them."""
        self._pending: deque[tuple[Span, Any, Any]] = deque()
        """Parts that the device may not have come to, in its order."""
        self._taking_part: dict[str, None] = {}
        self._spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def step(self) -> Generator[None]:
        """Watch everything inside. A step in which nobody takes part is not booked."""
        self._taking_part, self._spent = {}, defaultdict(float)
        root = Span("other", {})
        self._enter(root)
        try:
            yield
        finally:
            self._exit()
            evenly = dict.fromkeys(self._taking_part, 1.0)
            parts = [
                (Span(span.kind, span.split if any(span.split.values()) else evenly), begin, end)
                for span, begin, end in self._rest
            ]
            self._rest = []
            with self._lock:
                self._pending.extend(part for part in parts if part[0].split)
            self.settle()

    @contextmanager
    def aside(self, tenants: Iterable[str]) -> Generator[None]:
        """Put the step aside for other tenants' work: they bear all of it, and none of the step."""
        before, self._taking_part = self._taking_part, {}
        root = Span("other", dict.fromkeys(tenants, 1.0))
        self._enter(root)
        try:
            yield
        finally:
            self._exit()
            self._taking_part = before
            self.settle()

    def takes_part(self, tenants: Iterable[str]) -> None:
        """Name tenants that bear a share of what nobody causes alone."""
        self._taking_part |= dict.fromkeys(tenants)

    @contextmanager
    def span(self, tenant: str, kind: Kind) -> Generator[Span]:
        """Charge what is inside to one tenant, which thereby takes part. Without effect outside a step."""
        yield from self._inside(Span(kind, {tenant: 1.0}))

    @contextmanager
    def shared(self, kind: Kind) -> Generator[Span]:
        """Charge what is inside to several tenants: set ``split``, and if need be ``kind``, before the end."""
        yield from self._inside(Span(kind, {}))

    def spent(self, tenant: str) -> float:
        """Device seconds of a tenant in this step, up to now; on a GPU what it has come to so far."""
        if self._stack and tenant in self._stack[-1].split:
            self._cut()
        self.settle()
        return self._spent[tenant]

    def bear(self, tenant: str, kind: Kind, seconds: float) -> None:
        """Charge a tenant for what another thread has done for this step."""
        if seconds > 0:
            with self._lock:
                self._spent[tenant] += seconds
                self._ledger.charge(tenant, kind, seconds)

    def settle(self) -> None:
        """Book the parts that the device is through with."""
        with self._lock:
            booked: dict[tuple[str, Kind], float] = {}
            while self._pending:
                span, begin, end = self._pending[0]
                seconds = self._marks.seconds(begin, end)
                if seconds is None:
                    break
                self._pending.popleft()
                total = sum(span.split.values())
                for tenant, weight in span.split.items() if seconds else ():
                    share = seconds * weight / total
                    self._spent[tenant] += share
                    booked[tenant, span.kind] = booked.get((tenant, span.kind), 0.0) + share
            self._ledger.charge_all(booked)

    def _inside(self, span: Span) -> Generator[Span]:
        if not self._stack:
            yield span
            return
        self._enter(span)
        try:
            yield span
        finally:
            self._taking_part |= dict.fromkeys(span.split)
            self._exit()

    def _enter(self, span: Span) -> None:
        self._cut()
        self._stack.append(span)

    def _exit(self) -> None:
        self._cut()
        self._stack.pop()

    def _cut(self) -> None:
        """End the part that runs, and begin the next."""
        mark = self._marks.mark()
        if self._stack:
            span = self._stack[-1]
            part = (span, self._since, mark)
            if any(span.split.values()):
                with self._lock:
                    self._pending.append(part)
            else:
                self._rest.append(part)
        self._since = mark


def _use_all_threads() -> None:
    torch.zeros(1 << 20).fill_(1.0)
