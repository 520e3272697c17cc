"""Which episodes a learner has had, in bounded memory that goes into every checkpoint."""

from collections.abc import Mapping
from typing import Any

from joynexus.training.json_values import JsonObject, integer_in


class SeenEpisodes:
    """Which episodes were learnt from or dropped: bounded, and never wrong about one that was.

    Below the oldest that is remembered, every episode counts as seen: it is then far too old to be of use.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._episodes: set[int] = set()
        self._floor = 0
        self.next_unseen = 0
        """One more than the highest that was seen."""

    def __contains__(self, episode: object) -> bool:
        return isinstance(episode, int) and (episode < self._floor or episode in self._episodes)

    def add(self, episode: int) -> None:
        """Remember an episode; the lowest leaves to make room."""
        self._episodes.add(episode)
        self.next_unseen = max(self.next_unseen, episode + 1)
        while len(self._episodes) > self._capacity:
            lowest = min(self._episodes)
            self._episodes.discard(lowest)
            self._floor = lowest + 1

    def state(self) -> JsonObject:
        """Return what :meth:`restore` needs."""
        return {"episodes": sorted(self._episodes), "floor": self._floor, "next": self.next_unseen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._episodes = set(state["episodes"])
        self._floor, self.next_unseen = integer_in(state, "floor"), integer_in(state, "next")
