"""Which episodes a learner has had, in bounded memory that goes into every checkpoint."""

from collections.abc import Mapping

from pydantic import JsonValue

from joynexus.training.learners.base import integer


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

    def state(self) -> dict[str, JsonValue]:
        """Return what :meth:`restore` needs."""
        episodes: list[JsonValue] = [*sorted(self._episodes)]
        return {"episodes": episodes, "floor": self._floor, "next": self.next_unseen}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Go on from a state."""
        episodes = state.get("episodes")
        self._episodes = {each for each in episodes if isinstance(each, int)} if isinstance(episodes, list) else set()
        self._floor, self.next_unseen = integer(state, "floor"), integer(state, "next")
