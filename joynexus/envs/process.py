"""One environment in a process of its own: simulators leak, hang and crash, and must take nobody with them.

::

    idle --begin_reset--> busy (open, then reset) --poll--> idle
      ^                     |  no answer in time, an error, or death: killed, reported once
      +---- not running <---+  the next begin_reset starts a new process

A process is replaced between two episodes, never within one, when it has grown past its memory limit or has served
its number of resets. Answers come in the order of the commands; one whose episode was given up is thrown away.
"""

import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jaxtyping import Float32

from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.child import ChildProcess
from joynexus.envs.worker import Answer, Command, Method
from joynexus.errors import JoyNexusError, SimulatorError
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.environment import EnvironmentSpec
from joynexus.types import Array, Observation, ViewSpec

START_TIMEOUT_S = 300.0
"""A simulator starts in seconds, but in minutes on a loaded node."""
CLOSE_TIMEOUT_S = 5.0
"""After this long a process that was asked to close is killed."""


@dataclass(slots=True)
class _Pending:
    """A command that has not been answered."""

    method: Method
    deadline: float
    """On the monotonic clock."""
    is_wanted: bool = True
    """False where nobody waits for the answer any more."""


class SimulatorProcess:
    """Drives one environment in its own process. Not thread-safe: one owner."""

    def __init__(self, spec: EnvironmentSpec, view: ViewSpec) -> None:
        self._spec = spec
        self._view = view
        self._child: ChildProcess | None = None
        self._pending: deque[_Pending] = deque()
        self._resets = 0
        self._contract: InterfaceContract | None = None
        self.num_starts = 0
        """Processes started so far, the present one included."""

    @property
    def pid(self) -> int | None:
        """Process id, or None where none runs."""
        return self._child.pid if self._child else None

    @property
    def contract(self) -> InterfaceContract | None:
        """The facts of the task; None until a process has opened it."""
        return self._contract

    @property
    def connection(self) -> Connection | None:
        """What becomes readable when an answer has come or the process has died; None where none runs."""
        return self._child.connection if self._child else None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being waited for."""
        return any(each.is_wanted for each in self._pending)

    @property
    def deadline(self) -> float | None:
        """When the oldest unanswered command counts as hung, on the monotonic clock."""
        return self._pending[0].deadline if self._pending else None

    def begin_open(self) -> None:
        """Start the process, if none runs, without waiting for it; ``poll`` will give the contract."""
        if self._child is None:
            self._start(is_wanted=True)
        for each in self._pending:
            each.is_wanted = each.is_wanted or each.method == "open"

    def begin_reset(self, start: EpisodeStart) -> None:
        """Begin an episode, in a new process if the old one is worn out; whatever ran before is given up."""
        self.abandon()
        if self._child is not None and not self._pending and self._is_worn_out():
            self.close()
        if self._child is None:
            self._start(is_wanted=False)
        self._resets += 1
        self._send(Command(method="reset", arguments=(start,)), self._spec.step_timeout_s)

    def begin_step(self, actions: Float32[Array, "k a"], *, record: bool) -> None:
        """Execute a chunk.

        Raises:
            SimulatorError: If no process runs: an episode can't go on after its process was lost.
        """
        if self._child is None:
            raise SimulatorError(f"{self._spec.label}: no simulator process runs. Call reset first.")
        options = (("record", record),)
        self._send(Command(method="step_chunk", arguments=(actions,), options=options), self._spec.step_timeout_s)

    def abandon(self) -> None:
        """Stop waiting for the answers that are under way; they will be thrown away when they come."""
        for each in self._pending:
            each.is_wanted = False

    def poll(self) -> InterfaceContract | Observation | ChunkOutcome | JoyNexusError | None:
        """Take the next wanted answer, without waiting.

        Returns:
            The answer; the error where the process failed, was lost or ran out of time (it is then gone); or None
            where there is nothing yet.
        """
        while self._pending and self._child is not None:
            try:
                answer = self._child.receive()
            except (EOFError, OSError):
                return self._lose(f"died ({self._child.exit_status()})")
            pending = self._pending[0]
            if answer is None:
                if time.monotonic() < pending.deadline:
                    return None
                return self._lose(f"did not answer {pending.method} in time and was killed")
            self._pending.popleft()
            taken = self._take(pending, answer)
            if taken is not None:
                return taken
        return None

    def begin_close(self) -> None:
        """Ask an idle process to close, without waiting for it; only ``close`` may follow."""
        if self._child is not None and not self._pending:
            self._child.send(Command(method="close"))

    def close(self) -> None:
        """End the process, politely where it is idle; harmless where none runs."""
        self.begin_close()
        self._discard(grace_s=0.0 if self._pending else CLOSE_TIMEOUT_S)

    def _take(self, pending: _Pending, answer: Answer) -> Any:  # noqa: ANN401  # as poll
        if answer.error is not None:
            was_wanted = self.is_busy or pending.is_wanted
            self._discard()
            return answer.error if was_wanted else None
        if pending.method == "open":
            self._contract = answer.value
            for later in self._pending:  # the clock of what waited behind the start begins now
                later.deadline = time.monotonic() + self._spec.step_timeout_s
        return answer.value if pending.is_wanted else None

    def _start(self, *, is_wanted: bool) -> None:
        self._child = ChildProcess.start()
        self._resets = 0
        self.num_starts += 1
        self._send(Command(method="open", arguments=(self._spec, self._view)), START_TIMEOUT_S, is_wanted=is_wanted)

    def _send(self, command: Command, timeout_s: float, *, is_wanted: bool = True) -> None:
        assert self._child is not None, "callers start it first"
        ahead = self._pending[-1].deadline if self._pending else time.monotonic()
        self._pending.append(_Pending(command.method, ahead + timeout_s, is_wanted))
        self._child.send(command)

    def _is_worn_out(self) -> bool:
        assert self._child is not None, "callers check it first"
        if not self._child.is_alive or self._resets >= self._spec.max_resets_per_process:
            return True
        return self._child.resident_bytes() > self._spec.worker_memory_limit_bytes

    def _lose(self, what: str) -> SimulatorError | None:
        assert self._child is not None, "callers check it first"
        pid, tail, was_wanted = self._child.pid, self._child.output_tail(), self.is_busy
        self._discard()
        said = f" Its last output:\n{tail}" if tail else ""
        message = f"{self._spec.label}: simulator process {pid} {what}. The next reset starts a new one.{said}"
        return SimulatorError(message) if was_wanted else None

    def _discard(self, grace_s: float = 0.0) -> None:
        child, self._child = self._child, None
        self._pending.clear()
        if child is not None:
            child.stop(grace_s)
