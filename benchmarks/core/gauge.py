"""Reading how much memory a process holds, or torch on a GPU."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


class Gauge:
    """Private memory above what there was when the gauge was made."""

    def __init__(self, device: str, warm_up: Callable[[], object]) -> None:
        """Make ready to read.

        Args:
            device: ``cpu`` or ``cuda``.
            warm_up: On a CPU, loads libraries, thread pools and kernels, so that they are not counted.
        """
        self._device = device
        self._before = 0
        if device == "cuda":
            torch.zeros((), device=device)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            warm_up()
        self._before = self.resident()

    def resident(self) -> int:
        """Bytes that are held now, after everything that is not needed was given back."""
        gc.collect()
        if self._device == "cuda":
            return torch.cuda.memory_allocated() - self._before
        _give_back()
        return status_bytes("RssAnon") - self._before

    def peak(self) -> int:
        """Bytes that were held at once."""
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated() - self._before
        return max(status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem") - self._before, 0)


def _give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status_bytes(name: str) -> int:
    """Return a field of this process's status, such as ``VmHWM``, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}. This benchmark's CPU part needs Linux.")


def held(device: str) -> tuple[int, int]:
    """Return what the whole process holds now and has held at once: of memory, or on a GPU what torch has allocated."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    _give_back()
    return status_bytes("VmRSS"), status_bytes("VmHWM")
