"""A tenant's publications: handed over as they come, and kept while the store is away."""

import logging
from collections.abc import Callable

from joynexus.types import PolicySnapshot

log = logging.getLogger(__name__)


class Publications:
    """What a tenant has published, and what it could not yet."""

    def __init__(self, publish: Callable[[PolicySnapshot], None]) -> None:
        """Start without a version.

        Args:
            publish: Takes a snapshot, or raises.
        """
        self._publish = publish
        self._waiting: dict[int, PolicySnapshot] = {}
        self.newest: PolicySnapshot | None = None
        """The newest version but the base, which can be built again at any time."""

    def publish(self, snapshot: PolicySnapshot) -> None:
        """Hand a version over, or keep it for :meth:`retry`: a store that is away must not stop the training."""
        if snapshot.version > 0:
            self.newest = snapshot
            self._waiting = {version: each for version, each in self._waiting.items() if version == 0}
        self._hand_over(snapshot)

    def retry(self) -> None:
        """Try again what could not be handed over."""
        for snapshot in list(self._waiting.values()):
            self._hand_over(snapshot)

    def _hand_over(self, snapshot: PolicySnapshot) -> None:
        try:
            self._publish(snapshot)
        except Exception:
            if snapshot.version not in self._waiting:
                log.exception("tenant %s: version %d can't be published yet", snapshot.tenant, snapshot.version)
            self._waiting[snapshot.version] = snapshot
        else:
            self._waiting.pop(snapshot.version, None)
