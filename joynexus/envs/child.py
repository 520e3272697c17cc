"""An operating-system process that serves one environment: its pipe, its lifeline and its output."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from joynexus.envs.worker import Answer, Command

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from joynexus.envs.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
"""One thread per simulator: there are as many processes as the node has cores (``LP`` is Mesa's software renderer)."""


class ChildProcess:
    """An operating-system process, its pipe, its lifeline and its output."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", connection: Connection, lifeline: Connection, log: IO[bytes]
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self._log = log
        self.connection = connection
        """Readable when an answer has come or the process has died."""

    @classmethod
    def start(cls) -> "ChildProcess":
        """Start an interpreter that serves one environment."""
        ours, theirs = Pipe()
        reading, lifeline = Pipe(duplex=False)
        log = tempfile.TemporaryFile(prefix="joynexus-simulator-")  # noqa: SIM115  # lives as long as the process
        descriptors = (theirs.fileno(), reading.fileno())
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-X", "faulthandler", "-c", _BOOTSTRAP),
                *(json.dumps([str(each) for each in sys.path]), *(str(each) for each in descriptors)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=descriptors,
            env=child_environment(os.environ),
            process_group=0,  # an interrupt from the keyboard is the parent's to handle
        )
        theirs.close()
        reading.close()
        return cls(process, ours, lifeline, log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send(self, command: Command) -> None:
        """Send a command; to a process that died it is lost, as the next ``receive`` will tell."""
        try:
            self.connection.send(command)
        except OSError:
            return

    def receive(self) -> Answer | None:
        """Take an answer if there is one.

        Raises:
            EOFError: If the process closed its end: it is dead or dying.
        """
        return self.connection.recv() if self.connection.poll() else None

    def resident_bytes(self) -> int:
        """Resident memory; 0 where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def exit_status(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def output_tail(self, limit: int = 2000) -> str:
        """Return the end of what the process printed."""
        end = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), limit, max(0, end - limit)).decode(errors="replace").strip()

    def stop(self, grace_s: float) -> None:
        """End the process, by force if it is there after ``grace_s`` seconds, and free all that belongs to it."""
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for each in (self.connection, self._lifeline, self._log):
            each.close()


def child_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a simulator's process, set before it imports anything."""
    return {"MUJOCO_GL": "egl", **parent, **dict.fromkeys(_THREADS, "1")}
