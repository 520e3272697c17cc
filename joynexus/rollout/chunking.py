"""Action chunks: which part is executed, and what the steps of it add up to. Pure."""

import hashlib

import numpy as np
from jaxtyping import Bool, Float32

from joynexus.types import Array


def executed_part(chunk: Float32[Array, "t a"], num_action_steps: int) -> Float32[Array, "k a"]:
    """Return the actions that are executed before the policy looks again: the *first* ones of the chunk."""
    return np.ascontiguousarray(chunk[:num_action_steps])


def chunk_reward(rewards: Float32[Array, " k"]) -> float:
    """Sum the rewards of a chunk's executed steps, in double precision; one chunk is one decision."""
    return float(rewards.astype(np.float64).sum())


def chunk_success(success: Bool[Array, " k"], *, once: bool) -> tuple[bool, bool]:
    """Fold a chunk's steps into an episode's success.

    Args:
        success: Whether the condition held after each executed step; every step counts, not only the last one.
        once: Whether it held at any step before.

    Returns:
        Whether it has held at any step so far, and whether it holds now.
    """
    return once or bool(success.any()), bool(success[-1])


def row_seed(seed: int, *, episode_seed: int, episode: int, decision: int) -> int:
    """Derive the seed of one decision's noise.

    It depends on these four alone, so that a decision is the same beside any neighbours and in any process.

    Returns:
        A number of 63 bits.
    """
    text = f"{seed}/{episode_seed}/{episode}/{decision}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
