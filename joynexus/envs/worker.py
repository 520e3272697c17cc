"""What runs inside a simulator's own process: one environment, answering one command after the other.

The process is a fresh interpreter (never a fork: a GL context does not survive one, and a fork of a threaded parent
may deadlock), so it works the same below pytest, a script or a Ray actor, and never imports the parent's main module.
It ends when its parent does, and its standard input is empty, so that a simulator that asks a question gets an
``EOFError`` in place of waiting for a person.
"""

import fcntl
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from joynexus.envs.base import Environment
from joynexus.errors import AssetsMissingError, JoyNexusError, SimulatorError
from joynexus.specs.environment import EnvironmentSpec
from joynexus.specs.registry import load_implementation
from joynexus.types import ViewSpec

Method = Literal["open", "reset", "step_chunk", "close"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One call from the parent."""

    method: Method
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one command: a value, or the error that it raised."""

    value: Any = None
    error: JoyNexusError | None = None


def main(connection_fd: int, lifeline_fd: int) -> None:
    """Serve commands until the parent closes its end.

    Args:
        connection_fd: Our end of the pipe of commands.
        lifeline_fd: Reading end of a pipe that the parent holds open, and writes nothing into, while it lives.
    """
    _die_with(lifeline_fd)
    serve(Connection(connection_fd))


def serve(connection: Connection) -> None:
    """Open what the first command describes, then answer until ``close`` or until the parent hangs up."""
    environment: Environment | None = None
    label = "simulator"
    while True:
        try:
            command: Command = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if command.method == "open":
                spec, view = command.arguments
                label = spec.label
                environment = _open(spec, view)
                answer = Answer(value=environment.contract)
            elif environment is None:
                answer = Answer(error=SimulatorError(f"{label}: {command.method} came before open."))
            else:
                answer = Answer(value=getattr(environment, command.method)(*command.arguments, **dict(command.options)))
        except Exception as error:  # noqa: BLE001  # whatever a simulator raises has to reach the parent
            answer = Answer(error=as_typed(error, label))
        connection.send(answer)
        if command.method == "close":
            return


def as_typed(error: Exception, label: str) -> JoyNexusError:
    """Turn whatever a simulator raised into an error that crosses processes, with the traceback in its text."""
    if isinstance(error, JoyNexusError):
        return error
    if isinstance(error, EOFError):
        return AssetsMissingError(
            f"{label}: the simulator asked a question on the terminal, as it does for assets that are not on this "
            "machine. Download them beforehand, as the simulator's documentation says."
        )
    trace = "".join(traceback.format_exception(error)).rstrip()
    return SimulatorError(f"{label}: the simulator raised {type(error).__name__}: {error}.\nIn its process:\n{trace}")


def _open(spec: EnvironmentSpec, view: ViewSpec) -> Environment:
    implementation: type[Environment] = load_implementation(spec)
    return implementation.open(spec, view)


def _die_with(lifeline_fd: int) -> None:
    """Have the kernel end this process when the parent's end of the lifeline closes.

    A signal, unlike a watching thread, also ends a process that is stuck in native code and holds the interpreter's
    lock; and unlike ``PR_SET_PDEATHSIG`` it does not fire when merely the thread that started us ends.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
