"""Advantages with one decision per action chunk."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EPSILON = 1e-8
"""Added to the standard deviation, so that an iteration of equal advantages gives zeros."""


def generalized_advantage(
    rewards: Float[Tensor, "chunks envs"],
    values: Float[Tensor, "chunks envs"],
    next_values: Float[Tensor, "chunks envs"],
    terminated: Bool[Tensor, "chunks envs"],
    truncated: Bool[Tensor, "chunks envs"],
    *,
    discount: float,
    gae_lambda: float,
) -> Float[Tensor, "chunks envs"]:
    """Estimate advantages with one decision per action chunk.

    Args:
        rewards: Reward summed over the environment steps of each chunk.
        values: Critic at the observation the chunk was sampled from.
        next_values: Critic at the observation the chunk ended on; where an
            episode ended, its final observation, not the next episode's first.
        terminated: The task itself ended; nothing is bootstrapped.
        truncated: A time limit ended the episode; ``next_values`` still counts.
        discount: Per chunk, not per environment step; in (0, 1].
        gae_lambda: 0 is one-step TD, 1 is Monte Carlo; in [0, 1].

    Returns:
        Unnormalized advantages. Normalize per tenant, never across tenants.
        The critic's target is the advantage plus ``values``.

    Raises:
        ValueError: If ``discount`` or ``gae_lambda`` is out of range.

    Reference:
        Schulman et al. 2016, Sec. 3, https://arxiv.org/abs/1506.02438.
    """
    if not 0.0 < discount <= 1.0:
        raise ValueError(f"generalized_advantage: discount is {discount}. Give a number in (0, 1].")
    if not 0.0 <= gae_lambda <= 1.0:
        raise ValueError(f"generalized_advantage: gae_lambda is {gae_lambda}. Give a number in [0, 1].")
    # Selected, not multiplied by 0: an infinite or NaN critic after a termination must not matter.
    bootstrap = torch.where(terminated, torch.zeros_like(next_values), next_values)
    errors = rewards + discount * bootstrap - values
    advantages = torch.empty_like(errors)
    following = torch.zeros(errors.shape[1:], dtype=errors.dtype, device=errors.device)
    for index in reversed(range(len(errors))):
        ended = terminated[index] | truncated[index]
        following = errors[index] + discount * gae_lambda * torch.where(ended, torch.zeros_like(following), following)
        advantages[index] = following
    return advantages


def normalize_advantages(advantages: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Shift to mean 0 and scale to standard deviation 1; equal advantages give zeros, a single one is kept."""
    if len(advantages) <= 1:
        return advantages
    centred = advantages - advantages.mean()
    return centred / (centred.square().mean().sqrt() + EPSILON)


def explained_variance(values: Float[Tensor, " n"], returns: Float[Tensor, " n"]) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)``: 1 is a perfect critic, 0 one that is a constant.

    Equal returns leave nothing to explain and give 0.
    """
    spread = returns.var(correction=0)
    if float(spread) == 0.0:
        return 0.0
    return float(1.0 - (returns - values).var(correction=0) / spread)
