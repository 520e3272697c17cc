"""Which worker runs which episodes. Pure: the same episodes are run, whatever the number of workers."""

from joynexus.envs.base import EpisodeStart


def assign_episodes(num_episodes: int, num_workers: int) -> list[list[int]]:
    """Deal episodes out to workers, one after the other.

    Args:
        num_episodes: Episodes 0 to ``num_episodes - 1``.
        num_workers: At least 1.

    Returns:
        One list of episode indices per worker; together they are every episode once.

    Raises:
        ValueError: If there is no worker.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, expected at least 1.")
    return [list(range(worker, num_episodes, num_workers)) for worker in range(num_workers)]


def episode_start(seed: int, episode: int) -> EpisodeStart:
    """Say how an episode begins: its seed and initial state follow from its index and are distinct over episodes.

    Args:
        seed: Of episode 0.
        episode: Index in the workload.
    """
    return EpisodeStart(episode=episode, seed=seed + episode, initial_state=episode)
