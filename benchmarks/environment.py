"""Where a benchmark ran: hardware, versions, commit, load. No names of machines or people."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "numpy", "ray", "pydantic")
"""Whose versions are noted where they are installed."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Enough to tell whether two results may be compared."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    gpu: str | None
    """None where the benchmark ran on the CPU."""
    versions: dict[str, str]
    """Of Python and of the packages that are installed, by name."""
    commit: str
    """Of the checkout, with ``+changes`` where files differ from it; ``unknown`` outside git."""
    seed: int
    quick: bool
    device: str
    threads: int
    """Of torch."""
    load: float
    """Processes that wanted a core at the start, mean over a minute; above ``cores`` wall times mean little."""


def capture(*, seed: int, quick: bool, device: str, threads: int) -> Environment:
    """Describe this machine and checkout."""
    return Environment(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpu=_gpu() if device == "cuda" else None,
        versions={"python": platform.python_version()} | _versions(),
        commit=_commit(),
        seed=seed,
        quick=quick,
        device=device,
        threads=threads,
        load=round(os.getloadavg()[0], 1),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str:
    import torch  # noqa: PLC0415  # a simulation needs no torch

    return torch.cuda.get_device_name()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
