"""One tenant's calls: their order, and the memory that makes a repeated call harmless.

A number is taken when a call is accepted, and stays taken: the same number with the same payload gets the first
answer again, be it a result or an error, and with another payload it is refused. Not thread-safe: the slot's lock
guards it.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from joynexus.errors import BackPressureError, SequenceConflictError
from joynexus.models.prefix import PrefixFeatures
from joynexus.training.ahead import Ahead
from joynexus.training.sample_keys import SampleKeys
from joynexus.types import TrainingCall, TrainingResult

KEPT_ANSWERS = 64
"""Answered calls that a tenant can still repeat."""
MAX_QUEUED_CALLS = 1024
"""Calls of one tenant that wait at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedCall:
    """A call that waits for its group step, or is in it."""

    call: TrainingCall
    future: Future[TrainingResult]
    features: Sequence[PrefixFeatures] | None = None
    """Of each row of the batch by itself, held from the prefix store: nothing of the call is encoded then."""
    sample_keys: SampleKeys | None = None
    """Where to note which prefix each sample of the batch stands for; None notes nothing."""
    ahead: Ahead | None = None
    """All rows of the batch, being prepared by another thread; None leaves it to the one that steps."""
    queued_at: float = field(default_factory=time.monotonic)
    """When it was accepted."""

    @property
    def has_features(self) -> bool:
        """Whether the features of all rows came with it, so that the backbone has nothing to do."""
        batch = self.call.batch
        return self.features is not None or (batch is not None and batch.num_featured == len(batch) > 0)

    @property
    def num_rows(self) -> int:
        """Rows of its batch, 0 without one."""
        return 0 if self.call.batch is None else len(self.call.batch)


Outcome = TrainingResult | Exception
"""What a call came to."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """What is remembered of a call."""

    digest: bytes
    future: Future[TrainingResult]
    outcome: Outcome | None = None
    """None while the call waits. It is set together with the call's effect; the future a moment later, without lock."""


class CallQueue:
    """Calls of one tenant in the order of their sequence numbers."""

    def __init__(self) -> None:
        self.next_sequence = 0
        """The only number that a new call can have."""
        self._waiting: deque[QueuedCall] = deque()
        self._answers: OrderedDict[int, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> QueuedCall | None:
        """The call that is next."""
        return self._waiting[0] if self._waiting else None

    def submit(
        self,
        call: TrainingCall,
        digest: bytes,
        *,
        features: Sequence[PrefixFeatures] | None = None,
        sample_keys: SampleKeys | None = None,
        ahead: Ahead | None = None,
    ) -> Future[TrainingResult]:
        """Accept a call, or find the answer that it has already.

        Args:
            call: Checked.
            digest: Of its payload.
            features: See :class:`QueuedCall`.
            sample_keys: See :class:`QueuedCall`.
            ahead: See :class:`QueuedCall`.

        Returns:
            A future that can't be cancelled: later calls build on this one. A repeated call gets the first one's.

        Raises:
            SequenceConflictError: If the number was used with another payload, or is not the next one.
            BackPressureError: If too many calls wait; no number is taken.
        """
        if call.sequence < self.next_sequence:
            return self._repeat(call, digest)
        if call.sequence > self.next_sequence:
            raise SequenceConflictError(
                f"tenant {call.tenant!r}: call {call.sequence} came before call {self.next_sequence}. "
                "Submit calls in order, one number after the other."
            )
        if len(self._waiting) >= MAX_QUEUED_CALLS:
            raise BackPressureError(f"tenant {call.tenant!r}: {len(self._waiting)} calls wait. Await some, then retry.")
        future: Future[TrainingResult] = Future()
        future.set_running_or_notify_cancel()
        queued = QueuedCall(call=call, future=future, features=features, sample_keys=sample_keys, ahead=ahead)
        self._waiting.append(queued)
        self._answers[call.sequence] = Answer(digest=digest, future=future)
        self.next_sequence += 1
        return future

    def answer(self, queued: QueuedCall, outcome: Outcome) -> bool:
        """Take the head off with its outcome; False, and nothing done, if it no longer is the head."""
        if self.head is not queued:
            return False
        self._waiting.popleft()
        self._answers[queued.call.sequence].outcome = outcome
        while len(self._answers) - len(self._waiting) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return True

    def drain(self) -> list[QueuedCall]:
        """Take off every waiting call, because the slot closes."""
        drained = list(self._waiting)
        self._waiting.clear()
        return drained

    def answered(self) -> dict[int, Answer]:
        """Return what is remembered of answered calls, oldest first."""
        return {sequence: answer for sequence, answer in self._answers.items() if answer.outcome is not None}

    @property
    def first_waiting(self) -> int:
        """Number of the oldest call that is not answered; ``next_sequence`` where none waits."""
        return self.next_sequence - len(self._waiting)

    def restore(self, next_sequence: int, answers: Mapping[int, tuple[bytes, Outcome]]) -> None:
        """Take over the numbers and answers of an earlier process; only before the first call."""
        assert self.next_sequence == 0, "a queue that took calls keeps its own numbers"
        self.next_sequence = next_sequence
        for sequence, (digest, outcome) in sorted(answers.items()):
            future: Future[TrainingResult] = Future()
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
            self._answers[sequence] = Answer(digest=digest, future=future, outcome=outcome)

    def _repeat(self, call: TrainingCall, digest: bytes) -> Future[TrainingResult]:
        known = self._answers.get(call.sequence)
        if known is None:
            raise SequenceConflictError(
                f"tenant {call.tenant!r}: call {call.sequence} was answered long ago; the last {KEPT_ANSWERS} answers "
                f"are kept. The next number is {self.next_sequence}."
            )
        if known.digest != digest or not digest:
            raise SequenceConflictError(
                f"tenant {call.tenant!r}: call {call.sequence} was used with another payload. "
                f"Take the next number, {self.next_sequence}."
            )
        return known.future
