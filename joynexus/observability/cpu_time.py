"""How long the cores have worked for one engine: its thread and the threads that torch works with for it.

A reading of the whole process would hold the event loop's work and Ray's, and one of the engine's thread alone would
miss what torch's worker threads do for it. Linux has a CPU clock for each thread; which workers are the engine's is
told by their name, because a new thread inherits the name of the thread that made it.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_TASKS = Path("/proc/self/task")


class EngineCpuTime:
    """CPU seconds of the thread that reads it and, where torch has several threads, of its workers.

    Read by the one thread that drives the engine. Workers that wait for their next part spin for some milliseconds;
    this time counts too, since nobody else has their core meanwhile. Where the workers can't be told apart (another
    system than Linux, or a thread that had them before) it is the CPU time of the whole process.
    """

    def __init__(self, num_threads: Callable[[], int], start_workers: Callable[[], None]) -> None:
        """Bind to a thread at its first reading.

        Args:
            num_threads: How many threads an operation of the reading thread is spread over.
            start_workers: Runs an operation on all of them, so that they exist.
        """
        self._num_threads = num_threads
        self._start_workers = start_workers
        self._thread: int | None = None
        self._width = 0
        self._read: Callable[[], float] = time.thread_time

    def __call__(self) -> float:
        """Return the seconds so far; only differences between readings of one thread mean something."""
        if self._thread != threading.get_ident() or self._width != self._num_threads():
            self._thread, self._width = threading.get_ident(), self._num_threads()
            self._read = self._bound()
        try:
            return self._read()
        except OSError:  # a worker ended: torch made others
            self._read = self._bound()
            return self._read()

    def _bound(self) -> Callable[[], float]:
        if self._width == 1:
            return time.thread_time
        workers = _named_children(self._start_workers)
        if len(workers) < self._width - 1:
            return time.process_time
        return lambda: time.thread_time() + sum(time.clock_gettime(each) for each in workers)


def _named_children(start: Callable[[], None]) -> list[int]:
    """Run something under a thread name of its own, and return the clocks of the threads that have it then."""
    own = threading.get_native_id()
    try:
        before = _name(own)
        unique = f"engine-{own}"[:15]
        (_TASKS / str(own) / "comm").write_text(unique)
        try:
            start()
            found = [int(each) for each in os.listdir(_TASKS) if int(each) != own and _name(int(each)) == unique]
        finally:
            (_TASKS / str(own) / "comm").write_text(before)
        return [_clock_of(each) for each in found]
    except OSError:
        return []


def _name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text().strip()
    except FileNotFoundError:  # it ended meanwhile
        return ""


def _clock_of(thread: int) -> int:
    """The kernel's number of a thread's CPU clock: its id, inverted, with the type in the lowest three bits."""
    return (~thread << 3) | 6
