"""A Ray head that ``joynexus up`` starts on a machine without a cluster, and that ``joynexus down`` ends again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from joynexus.actors.cluster import CURRENT_CLUSTER, prepare_environment
from joynexus.errors import ServiceError

START_S = 60.0
STOP_S = 30.0


def start_head(root: Path, *, num_cpus: int | None = None) -> str:
    """Start a Ray head in a session of its own, so that it outlives this process.

    Args:
        root: Folder for its log and its process id.
        num_cpus: Logical CPUs; None takes the machine's.

    Returns:
        The head's address; also set as ``RAY_ADDRESS`` for this process.

    Raises:
        ServiceError: If it does not come up, with the end of its log.
    """
    prepare_environment()
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += ["--node-ip-address=127.0.0.1", "--disable-usage-stats", "--include-dashboard=true"]
    command += [f"--num-cpus={num_cpus}"] if num_cpus is not None else []
    log = root / "ray_head.log"
    environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    with log.open("w") as file:
        process = subprocess.Popen(  # our own interpreter and arguments
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text()[-600:]
            raise ServiceError(f"the Ray head did not start: {tail}")
        time.sleep(0.2)
    address = CURRENT_CLUSTER.read_text().strip()
    (root / "ray_head.json").write_text(json.dumps({"pid": process.pid, "address": address}))
    os.environ["RAY_ADDRESS"] = address
    return address


def stop_head(root: Path) -> bool:
    """End the head that :func:`start_head` started with the same root; return whether there was one."""
    path = root / "ray_head.json"
    if not path.exists():
        return False
    pid = int(json.loads(path.read_text())["pid"])
    path.unlink()
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    deadline = time.monotonic() + STOP_S
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
