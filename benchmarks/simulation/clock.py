"""A virtual clock: asyncio whose time passes only when everybody waits, so that hours take seconds.

The product's queues run on it unchanged: they ask the event loop for the time and for alarms. Asyncio keeps its
alarms in a heap and calls them in the order of their times, so a run repeats exactly.
"""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

MAX_EPOCH_S = 1e7
"""Virtual seconds after which a run counts as stuck: nothing here takes months."""


class _NoFiles(selectors.BaseSelector):
    """Watches nothing; where asyncio would sleep until the next alarm, the time jumps there."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:  # noqa: ANN401
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:  # noqa: ANN401
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or self.now > MAX_EPOCH_S:
            raise RuntimeError(f"simulation: stuck at {self.now:.3f} s: everybody waits and no alarm is set.")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at 0 s and never sleeps."""

    def __init__(self) -> None:
        self._files = _NoFiles()
        super().__init__(self._files)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._files.now

    def _write_to_self(self) -> None:
        """Nobody sleeps, so nobody has to be woken."""
