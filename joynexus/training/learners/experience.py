"""From whole trajectories to the decisions that a policy-gradient update learns from."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.training.advantages import explained_variance, generalized_advantage, normalize_advantages
from joynexus.training.losses import TRACE
from joynexus.types import Array, Observation, PrefixArrays, TrainingBatch, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Returns:
    """Advantages and critic targets of one trajectory; index i belongs to decision i."""

    advantages: Array
    returns: Array
    terminated: Array
    """True at the last decision, and there only, if the task ended."""
    truncated: Array
    """True at the last decision, and there only, if a time limit ended the episode."""


def trajectory_returns(trajectory: Trajectory, *, discount: float, gae_lambda: float) -> Returns:
    """Compute advantages with one decision per action chunk.

    Args:
        trajectory: A whole episode.
        discount: Per chunk.
        gae_lambda: 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Four arrays as long as the trajectory. A trajectory that was cut without either flag is bootstrapped from its
        final value, as a truncated one is.
    """
    count = len(trajectory)
    last = np.arange(count) == count - 1
    terminated, truncated = last & trajectory.terminated, last & trajectory.truncated
    next_values = np.append(trajectory.values[1:], np.float32(trajectory.final_value)).astype(np.float32)
    columns = [np.ascontiguousarray(each[:, None]) for each in (trajectory.rewards, trajectory.values, next_values)]
    flags = [np.ascontiguousarray(each[:, None]) for each in (terminated, truncated)]
    advantages = generalized_advantage(
        *(torch.from_numpy(each.copy()) for each in columns),
        *(torch.from_numpy(each) for each in flags),
        discount=discount,
        gae_lambda=gae_lambda,
    )
    own = np.asarray(advantages[:, 0], dtype=np.float32)
    return Returns(advantages=own, returns=own + trajectory.values, terminated=terminated, truncated=truncated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """All decisions of an update, as one batch for the loss ``ppo``, and what they tell before it."""

    batch: TrainingBatch
    explained_variance: float
    """Of the returns, by the critic that acted."""


def collect_decisions(
    trajectories: Sequence[Trajectory], *, discount: float, gae_lambda: float, is_normalized: bool
) -> Decisions:
    """Stack trajectories into one batch.

    Where all trajectories bring their prefix features, the batch has them and no frames. Where only some do, each row
    has either, and ``featured`` tells which.

    Args:
        trajectories: In the order that the rows will have.
        discount: Per chunk.
        gae_lambda: 0 is one-step TD, 1 is Monte Carlo.
        is_normalized: Whether advantages get mean 0 and standard deviation 1 over the whole batch.

    Returns:
        One row per decision.

    Raises:
        InvalidBatchError: If the features of two trajectories are of different kinds.
    """
    found = [trajectory_returns(each, discount=discount, gae_lambda=gae_lambda) for each in trajectories]
    advantages = torch.from_numpy(np.concatenate([each.advantages for each in found]))
    returns = np.concatenate([each.returns for each in found])
    values = np.concatenate([each.values for each in trajectories])
    if is_normalized:
        advantages = normalize_advantages(advantages)
    actions = np.concatenate([each.actions for each in trajectories])
    trace = {
        f"{TRACE}{name}": np.concatenate([each.trace[name] for each in trajectories]) for name in trajectories[0].trace
    }
    extras: dict[str, Array] = {
        "advantages": advantages.numpy(),
        "returns": returns,
        "old_log_prob": np.concatenate([each.log_prob for each in trajectories]),
        "old_value": values,
        **trace,
    }
    observation, features, featured = _stack_prefixes(trajectories)
    batch = TrainingBatch(
        observation=observation,
        actions=actions,
        action_is_pad=np.zeros(actions.shape[:2], dtype=np.bool_),
        sample_ids=tuple(f"{each.trajectory_id}/{row}" for each in trajectories for row in range(len(each))),
        extras=extras,
        features=features,
        featured=featured,
    )
    explained = explained_variance(torch.from_numpy(values), torch.from_numpy(returns))
    return Decisions(batch=batch, explained_variance=explained)


def _stack_prefixes(trajectories: Sequence[Trajectory]) -> tuple[Observation, PrefixArrays | None, Array | None]:
    """Stack observations and prefix features; see :func:`collect_decisions`."""
    seen = [each.observation for each in trajectories]
    carried = [each.features for each in trajectories]
    found = [each for each in carried if each is not None]
    if not found:
        return Observation.concatenate(seen), None, None
    if len(found) == len(carried):
        return Observation.concatenate([each.without_frames() for each in seen]), PrefixArrays.concatenate(found), None
    framed = next(each.observation for each in trajectories if each.features is None)
    observation = Observation.concatenate([_with_blank_frames(each, framed) for each in seen])
    features = PrefixArrays.concatenate(
        [found[0].zeros(len(each)) if own is None else own for each, own in zip(trajectories, carried, strict=True)]
    )
    featured = np.repeat([each is not None for each in carried], [len(each) for each in trajectories])
    return observation, features, featured


def _with_blank_frames(observation: Observation, like: Observation) -> Observation:
    """Give rows without frames black ones, which nothing reads, of the size that others have."""
    if observation.has_frames:
        return observation
    frames = np.zeros((len(observation), *like.images.shape[1:]), dtype=np.uint8)
    return dataclasses.replace(observation, images=frames)


def check_trajectory(trajectory: Trajectory) -> None:
    """Refuse a trajectory that an update could not learn from.

    Raises:
        InvalidBatchError: If it is empty, its arrays differ in length, or it has neither frames nor features.
        NonFiniteError: If a reward, value, log-probability or feature is NaN or infinite.
    """
    count, features = len(trajectory), trajectory.features
    arrays = {
        "actions": trajectory.actions,
        "rewards": trajectory.rewards,
        "log_prob": trajectory.log_prob,
        "values": trajectory.values,
        **{f"{TRACE}{name}": value for name, value in trajectory.trace.items()},
    }
    carried = {} if features is None else {f"features/{name}": each for name, each in features.arrays.items()}
    lengths = {name: len(value) for name, value in {**arrays, **carried}.items()}
    lengths["observation"] = len(trajectory.observation)
    wrong = {name: length for name, length in lengths.items() if length != count}
    if count == 0 or wrong:
        raise InvalidBatchError(
            f"trajectory {trajectory.trajectory_id!r}: {count} decisions, but lengths {wrong}. One entry per decision."
        )
    if features is None and not trajectory.observation.has_frames:
        raise InvalidBatchError(
            f"trajectory {trajectory.trajectory_id!r}: has neither frames nor features. Leave out frames only where "
            "features come in their place."
        )
    bad = [name for name, value in arrays.items() if not np.isfinite(value).all()]
    bad += [] if features is None or features.is_finite else ["features"]
    bad += [] if np.isfinite(trajectory.final_value) else ["final_value"]
    if bad:
        raise NonFiniteError(f"trajectory {trajectory.trajectory_id!r}: {bad} hold NaN or infinity. It is dropped.")


def epoch_order(count: int, *, seed: int, workload: int, iteration: int, epoch: int) -> Array:
    """Return the order of an epoch's decisions: of its place alone, so that a restart repeats it."""
    name = f"ppo/{seed}/{workload}/{iteration}/{epoch}"
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return np.random.default_rng(stream).permutation(count)
