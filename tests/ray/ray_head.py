"""A Ray head of a test's own: a process group that is ended as one, with its own ports and temporary folder."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_S = 120.0
STOP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RayHead:
    """Where a head listens."""

    address: str
    """Of the GCS, for ``RAY_ADDRESS``."""
    dashboard: str
    """For jobs."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that uses this head, and no other."""
        found = {**os.environ, **_settings(), "RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.dashboard}
        return {**found, "COLUMNS": "200"}


@contextmanager
def running_head(folder: Path, *, num_cpus: int) -> Iterator[RayHead]:
    """Run a head.

    Args:
        folder: With a short path: sockets live below it.
        num_cpus: Logical CPUs.
    """
    ports = _free_ports(8)
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port")
    names += ("runtime-env-agent-port", "node-manager-port", "object-manager-port")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    command += ["--min-worker-port=0", "--max-worker-port=0"]  # any that is free: other clusters run on this machine
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=true", f"--temp-dir={folder / 'ray'}"]
    command += [f"--num-cpus={num_cpus}", f"--object-store-memory={200 << 20}"]
    log = folder / "head.log"
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | _settings()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        _wait_for(process, log)
        yield RayHead(address=f"127.0.0.1:{ports[0]}", dashboard=f"http://127.0.0.1:{ports[1]}")
    finally:
        _end(process)


def _settings() -> dict[str, str]:
    binaries = str(Path(sys.executable).parent)  # jobs find the `joynexus` of this interpreter
    return {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the head and all that it started: they are one process group, and nobody else is in it."""
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
