"""A batch in the engine, and the requests for which the engine is asked to put it aside."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from joynexus.queues.waiting_room import Pending
from joynexus.types import ActionChunk, PredictRequest

Answer = ActionChunk | Exception
"""What the engine gives per request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Requests that the engine has run together."""

    batch: Sequence[Pending]
    answers: Sequence[Answer]
    started: float
    ended: float
    interrupted_s: float = 0.0
    """Of this time, seconds in which it was put aside for others."""
    floods: frozenset[str] = frozenset()
    """Tenants of it that had further requests waiting when it began."""
    longest_s: float | None = None
    """Longest time in which it could not be interrupted; None where it could not be at all."""

    @property
    def seconds(self) -> float:
        """Of the engine, for these requests."""
        return self.ended - self.started - self.interrupted_s

    @property
    def rows(self) -> int:
        """Of all requests."""
        return sum(each.rows for each in self.batch)


class RunningBatch:
    """Hands requests to an engine in the middle of a batch.

    The event loop offers them and closes; the engine's thread takes and gives
    (:class:`joynexus.inference.interruption.Urgent`).
    """

    def __init__(
        self,
        batch: Sequence[Pending],
        *,
        floods: frozenset[str],
        clock: Callable[[], float],
        deliver: Callable[[Run], object],
    ) -> None:
        """Begin.

        Args:
            batch: What the engine runs.
            floods: Tenants of it that have further requests waiting.
            clock: Seconds; called from both threads.
            deliver: Told of each run in the middle, from the engine's thread.
        """
        self.batch = batch
        self.floods = floods
        self.tenants = frozenset(each.tenant for each in batch)
        self.rows = sum(each.rows for each in batch)
        self.started = clock()
        self._clock = clock
        self._deliver = deliver
        self._lock = threading.Lock()
        self._offered: list[Pending] = []
        self._taken: list[Pending] = []
        self._taken_at = 0.0
        self._interrupted_s = 0.0
        self._paused_at = self.started
        self._longest_s = 0.0

    @property
    def gives_way(self) -> bool:
        """Whether it may be put aside: where it is one of floods alone."""
        return self.floods == self.tenants

    def seconds(self, now: float) -> float:
        """Return for how long the batch itself has run."""
        with self._lock:
            return now - self.started - self._interrupted_s

    @property
    def offered(self) -> Sequence[Pending]:
        """What the engine has not taken yet."""
        with self._lock:
            return tuple(self._offered)

    @property
    def is_aside(self) -> bool:
        """Whether the engine runs others' requests now."""
        with self._lock:
            return bool(self._taken)

    def offer(self, requests: Sequence[Pending]) -> None:
        """Have requests run at the next pause; until then their callers may give up."""
        with self._lock:
            for each in requests:
                each.is_taken = False
            self._offered.extend(requests)

    def close(self) -> list[Pending]:
        """Return what was offered too late; nothing may be offered afterwards."""
        with self._lock:
            return self._take_offered()

    def end(self, answers: Sequence[Answer]) -> Run:
        """Describe the whole run, now that it is over."""
        now = self._clock()
        self._note_pause(now)
        return Run(
            batch=self.batch,
            answers=answers,
            started=self.started,
            ended=now,
            interrupted_s=self._interrupted_s,
            floods=self.floods,
            longest_s=self._longest_s if self.gives_way else None,
        )

    def abandoned(self) -> list[Pending]:
        """Return all that will have no answer where the batch is given up."""
        with self._lock:
            return [*self.batch, *self._offered, *self._taken]

    def take(self) -> Sequence[PredictRequest]:
        """Take what was offered, without those whose callers have given up meanwhile."""
        with self._lock:
            self._taken_at = self._clock()
            self._note_pause(self._taken_at)
            self._taken = self._take_offered()
            return [each.request for each in self._taken]

    def give(self, answers: Sequence[Answer]) -> None:
        """Answer what was taken."""
        now = self._clock()
        with self._lock:
            run = Run(batch=self._taken, answers=answers, started=self._taken_at, ended=now)
            self._interrupted_s += now - self._taken_at
            self._paused_at = now
            self._taken = []
        self._deliver(run)

    def _note_pause(self, now: float) -> None:
        self._longest_s = max(self._longest_s, now - self._paused_at)
        self._paused_at = now

    def _take_offered(self) -> list[Pending]:
        taken, self._offered = [each for each in self._offered if not each.answer.done()], []
        for each in taken:
            each.is_taken = True
        return taken
