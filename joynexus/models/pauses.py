"""Pauses: moments of a long computation at which something else may be done first.

Between two layers, two chunks of rows or two steps of a sampler a network is half through, but all that it has so far
is in local variables: another forward may run there, and the first one goes on as if nothing had happened. Loops over
such parts call :func:`pause`. It does nothing, unless whoever drives the computation has asked to be called.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from torch import nn

Visit = Callable[[], None]


class _Local(threading.local):
    visit: Visit | None = None


_LOCAL = _Local()


def pause() -> None:
    """Call whoever wants to be called at the pauses of this thread."""
    if _LOCAL.visit is not None:
        _LOCAL.visit()


@contextmanager
def visited(visit: Visit | None) -> Generator[None]:
    """Have something called at each pause of what is inside, in this thread.

    Args:
        visit: Must leave the state of networks and of torch as it found it; its error is that of the computation.
            None goes through without a stop.
    """
    before, _LOCAL.visit = _LOCAL.visit, visit
    try:
        yield
    finally:
        _LOCAL.visit = before


def pause_before(layers: Iterable[nn.Module]) -> None:
    """Make a pause before each of some layers, whose loop is another library's."""
    for layer in layers:
        layer.register_forward_pre_hook(_pause_hook)


def _pause_hook(*_: object) -> None:
    pause()
