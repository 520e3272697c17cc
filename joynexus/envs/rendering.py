"""Which device MuJoCo renders on.

EGL numbers its devices in an order of its own, software renderers among them; CUDA numbers only the GPUs it may see.
Taking the one number for the other crashes, or puts every worker of a node on GPU 0.
"""

import ctypes
import ctypes.util
import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_EGL_CUDA_DEVICE = 0x323A  # EGL_NV_device_cuda
_MAX_DEVICES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Renderer:
    """What MuJoCo is told to use."""

    backend: Literal["egl", "osmesa"]
    device: int | None = None
    """Index in EGL's list."""
    warning: str | None = None
    """What the operator should know."""


def choose_renderer(devices: Sequence[int | None], *, cuda_visible: str | None, explicit: str | None) -> Renderer:
    """Choose the device that belongs to this process.

    Args:
        devices: EGL's devices in its order: the CUDA number of a GPU, None for a software renderer.
        cuda_visible: ``CUDA_VISIBLE_DEVICES``; empty where the process was given no GPU, None where it is not set.
        explicit: ``MUJOCO_EGL_DEVICE_ID``, kept as it is.
    """
    if explicit:
        return Renderer(backend="egl", device=int(explicit))
    if not devices:
        return Renderer(backend="osmesa", warning="there is no EGL device: MuJoCo renders slowly, with OSMesa")
    if cuda_visible is None:
        return Renderer(backend="egl", device=0)
    first = cuda_visible.split(",")[0].strip()
    if first in {"", "-1", "NoDevFiles"}:  # no GPU was given: leave those that there are to others
        return Renderer(backend="egl", device=devices.index(None) if None in devices else 0)
    if first.isdigit() and int(first) in devices:
        return Renderer(backend="egl", device=devices.index(int(first)))
    gpus = [index for index, cuda in enumerate(devices) if cuda is not None]
    warning = f"CUDA device {first!r} is none of EGL's: MuJoCo renders on EGL device {gpus[0] if gpus else 0}"
    return Renderer(backend="egl", device=gpus[0] if gpus else 0, warning=warning)


def prepare_mujoco(environment: MutableMapping[str, str]) -> Renderer | None:
    """Set the variables that MuJoCo and robosuite read; to be called before either is imported.

    Args:
        environment: ``os.environ`` of a simulator's own process. ``CUDA_VISIBLE_DEVICES`` is taken out of it: robosuite
            reads it as a number of EGL's, and can't read it where it is empty.

    Returns:
        What was chosen; None where another renderer than EGL was asked for, which is left alone.
    """
    if environment.setdefault("MUJOCO_GL", "egl") != "egl":
        return None
    visible = environment.pop("CUDA_VISIBLE_DEVICES", None)
    explicit = environment.get("MUJOCO_EGL_DEVICE_ID")
    chosen = choose_renderer(() if explicit else egl_devices(), cuda_visible=visible, explicit=explicit)
    environment["MUJOCO_GL"] = environment["PYOPENGL_PLATFORM"] = chosen.backend
    if chosen.device is not None:
        environment["MUJOCO_EGL_DEVICE_ID"] = str(chosen.device)
    return chosen


def egl_devices() -> list[int | None]:
    """Ask EGL for its devices: the CUDA number of each, or None; empty where there is no EGL."""
    library = ctypes.util.find_library("EGL")
    if os.name != "posix" or library is None:
        return []
    try:
        egl = ctypes.CDLL(library)
    except OSError:
        return []
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    list_devices = _function(egl, b"eglQueryDevicesEXT", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    ask = _function(egl, b"eglQueryDeviceAttribEXT", ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    if list_devices is None or ask is None:
        return []
    handles, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int32(0)
    if not list_devices(_MAX_DEVICES, ctypes.byref(handles), ctypes.byref(count)):
        return []
    return [_cuda_number(ask, handles[index]) for index in range(count.value)]


def _function(egl: Any, name: bytes, *arguments: Any) -> Any:  # noqa: ANN401  # ctypes has no better
    address = egl.eglGetProcAddress(name)
    return ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(address) if address else None


def _cuda_number(ask: Any, device: Any) -> int | None:  # noqa: ANN401  # ctypes has no better
    number = ctypes.c_ssize_t(-1)
    return int(number.value) if ask(device, _EGL_CUDA_DEVICE, ctypes.byref(number)) else None
