"""Reward-weighted regression on an inverted pendulum, written with joynexus's low-level calls alone.

    python examples/custom_algorithm/reward_weighted_regression.py          # on a local Ray of its own
    ray job submit --working-dir examples/custom_algorithm -- python reward_weighted_regression.py

Each iteration rolls out whole episodes with the newest policy version, weighs every decision by
exp(return-to-go advantage / temperature), and regresses the policy onto what it did, better decisions more:
Peters and Schaal 2007, https://doi.org/10.1145/1273496.1273590; Peng et al. 2019, https://arxiv.org/abs/1910.00177.
Nothing here is known to joynexus: the service offers rollout, training calls and publication, the algorithm is ours.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import joynexus
from joynexus.specs.environment import GymSpec
from joynexus.types import TrainingBatch, Trajectory

HERE = Path(__file__).parent


def returns_to_go(trajectory: Trajectory, discount: float) -> np.ndarray:
    """Discounted sum of rewards from each decision on, [n]."""
    found = np.zeros(len(trajectory), dtype=np.float64)
    running = 0.0
    for index in range(len(trajectory) - 1, -1, -1):
        running = float(trajectory.rewards[index]) + discount * running
        found[index] = running
    return found


def weigh(trajectories: Sequence[Trajectory], *, discount: float, temperature: float, largest: float) -> np.ndarray:
    """Weight of each decision: exp of its normalised advantage over the mean return at the same decision index.

    Episodes end at different times: the mean at an index is that of the episodes that got so far.
    """
    returns = [returns_to_go(each, discount) for each in trajectories]
    longest = max(len(each) for each in returns)
    table = np.full((len(returns), longest), np.nan)
    for row, each in zip(table, returns, strict=True):
        row[: len(each)] = each
    advantages = np.concatenate([each - np.nanmean(table, axis=0)[: len(each)] for each in returns])
    advantages /= advantages.std() + 1e-6
    return np.minimum(np.exp(advantages / temperature), largest).astype(np.float32)


def as_batch(trajectories: Sequence[Trajectory], weights: np.ndarray) -> TrainingBatch:
    """One row per decision: what was seen, what was done, and how much it counts."""
    observation = type(trajectories[0].observation).concatenate([each.observation for each in trajectories])
    actions = np.concatenate([each.actions for each in trajectories])
    return TrainingBatch(
        observation=observation,
        actions=actions,
        action_is_pad=np.zeros(actions.shape[:2], dtype=np.bool_),
        sample_ids=tuple(f"{each.trajectory_id}/{i}" for each in trajectories for i in range(len(each))),
        extras={"weights": weights},
    )


def learn(tenant: joynexus.Tenant, *, iterations: int, episodes: int) -> list[float]:
    """Run the algorithm, and return the mean return of each iteration."""
    environment = GymSpec(type="gym", id="InvertedPendulum-v5", num_envs=4, max_episode_steps=100, success_key=None)
    history: list[float] = []
    for iteration in range(iterations):
        first = iteration * episodes
        trajectories = tenant.rollout(environment, range(first, first + episodes)).result()
        history.append(float(np.mean([each.rewards.sum() for each in trajectories])))
        weights = weigh(trajectories, discount=0.95, temperature=0.5, largest=10.0)
        batch = as_batch(trajectories, weights)
        losses = []
        for _ in range(8):  # calls are queued at once and take effect in this order
            losses.append(tenant.forward_backward(batch, loss="weighted"))
            tenant.optim_step(lr=3e-3)
        loss = losses[-1].result().metrics["loss"]
        version = tenant.sync_weights().result()
        print(f"iteration {iteration}: mean return {history[-1]:8.1f}, loss {loss:.4f}, version {version}", flush=True)
    return history


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path("outputs/custom_algorithm"))
    options = parser.parse_args(arguments)
    service = joynexus.start(HERE / "service.yaml", root=options.output)
    try:
        tenant = service.open(HERE / "tenant.yaml")
        history = learn(tenant, iterations=options.iterations, episodes=options.episodes)
        print(json.dumps({"mean_returns": history}))
        service.stop(tenant.name)
    finally:
        service.shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
