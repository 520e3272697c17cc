"""A GPU as time: the processes on it share it evenly, as time slices do."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

TICK_S = 1e-9
"""Work that is left below this is rounding."""


@dataclass(eq=False, slots=True)
class _Job:
    left_s: float
    done: Callable[[], None]


class Gpu:
    """One accelerator. ``n`` jobs at once each run at ``1/n`` of its speed (processor sharing).

    A trainer and a replica live on each GPU, each with one job at a time, so that ``n`` is 2 at most. Switching
    between them costs nothing, which flatters all sides alike.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: list[_Job] = []
        self._since = loop.time()
        self._alarm: asyncio.TimerHandle | None = None
        self.busy_s = 0.0
        """Seconds during which it had a job."""

    def start(self, seconds: float, done: Callable[[], None]) -> None:
        """Begin a job that would take ``seconds`` alone; ``done`` is called at its end."""
        self._pass_time()
        self._jobs.append(_Job(max(seconds, 0.0), done))
        self._set_alarm()

    async def run(self, seconds: float) -> None:
        """Do a job that would take ``seconds`` alone."""
        ended: asyncio.Future[None] = self._loop.create_future()
        self.start(seconds, lambda: None if ended.done() else ended.set_result(None))
        await ended

    def _pass_time(self) -> None:
        now = self._loop.time()
        passed, self._since = now - self._since, now
        if self._jobs:
            self.busy_s += passed
            for job in self._jobs:
                job.left_s -= passed / len(self._jobs)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._jobs:
            shortest = max(0.0, min(job.left_s for job in self._jobs))
            self._alarm = self._loop.call_at(self._since + shortest * len(self._jobs), self._end_jobs)

    def _end_jobs(self) -> None:
        self._alarm = None
        self._pass_time()
        ended = [job for job in self._jobs if job.left_s <= TICK_S]
        self._jobs = [job for job in self._jobs if job.left_s > TICK_S]
        self._set_alarm()
        for job in ended:
            job.done()
