"""A driver's sign of life: who belongs to a driver is ended when the driver is gone, however it went.

A placement group that is not detached goes with its driver within moments: at the end of the script, at Ctrl-C, when a
Ray job is stopped, after ``kill -9``, with the driver's machine. One that reserves a single byte tells everybody in
the cluster that its driver lives: no heartbeat, no time-out, and a driver that is merely paused stays alive.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from ray.util.placement_group import placement_group, remove_placement_group

from joynexus.actors import ray_calls

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at who lives."""


@contextmanager
def lifeline() -> Generator[str, None, None]:
    """Hold a lifeline of this driver.

    Yields:
        Its name, to be given to the Master with what belongs to this driver.
    """
    name = f"joynexus-driver:{uuid.uuid4().hex[:12]}"
    group = placement_group([{"memory": 1}], name=name)
    try:
        yield name
    finally:
        remove_placement_group(group)


class LifelineWatch:
    """Finds, in a thread of its own, what belongs to drivers that are gone.

    Args:
        tied: Gives who is tied, with the name of the lifeline.
        cut: Called with each of them whose lifeline is gone, at every look for as long as it is tied.
    """

    def __init__(self, tied: Callable[[], Mapping[str, str]], cut: Callable[[str], None]) -> None:
        self._tied = tied
        self._cut = cut
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except Exception:  # the watcher itself must survive whatever a look meets
                log.exception("lifelines not seen")

    def _look(self) -> None:
        tied = self._tied()
        living = ray_calls.group_states() if tied else {}
        for name, line in tied.items():
            if line not in living:
                self._cut(name)
