"""Advantages against the sums that define them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_world import trajectory

from joynexus.training.advantages import explained_variance, generalized_advantage, normalize_advantages
from joynexus.training.learners.experience import trajectory_returns


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values)[:, None]


@pytest.mark.parametrize(("terminated", "target"), [(True, 1.0), (False, 10.9)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_c33_only_a_truncation_is_bootstrapped(terminated: bool, target: float, gae_lambda: float) -> None:
    value = 3.0
    advantage = generalized_advantage(
        column(1.0),
        column(value),
        column(10.0),
        flags(terminated),
        flags(not terminated),
        discount=0.99,
        gae_lambda=gae_lambda,
    )
    assert float(advantage) + value == pytest.approx(target)


@pytest.mark.parametrize(("terminated", "target"), [(True, 1.0), (False, 10.9)])
def test_c33_holds_for_a_whole_trajectory(terminated: bool, target: float) -> None:
    episode = trajectory(
        "a",
        0,
        length=1,
        rewards=np.ones(1, np.float32),
        values=np.full(1, 3.0, np.float32),
        terminated=terminated,
        truncated=not terminated,
        final_value=10.0,
    )
    found = trajectory_returns(episode, discount=0.99, gae_lambda=0.95)
    assert found.returns.tolist() == pytest.approx([target])


def test_a_critic_that_broke_after_the_end_does_not_matter() -> None:
    advantage = generalized_advantage(
        column(1.0), column(0.0), column(float("nan")), flags(True), flags(False), discount=0.99, gae_lambda=0.95
    )
    assert advantage.tolist() == [[1.0]]


def test_c34_flags_belong_to_the_decision_that_ended_the_episode() -> None:
    episode = trajectory("a", 1, length=4, terminated=True, truncated=False)
    found = trajectory_returns(episode, discount=0.99, gae_lambda=0.95)
    assert found.terminated.tolist() == [False, False, False, True]
    assert found.truncated.tolist() == [False] * 4
    assert len(found.advantages) == len(found.returns) == len(episode.actions) == 4
    last = float(episode.rewards[3] - episode.values[3])
    assert found.advantages[3] == pytest.approx(last, abs=1e-6)


def test_an_episode_ends_where_the_next_one_begins() -> None:
    rewards, values = [1.0, 2.0, 4.0, 8.0], [0.5, 0.25, 0.0, 1.0]
    both = generalized_advantage(
        column(*rewards),
        column(*values),
        column(0.25, 7.0, 1.0, 5.0),
        flags(False, True, False, False),
        flags(False, False, False, True),
        discount=0.9,
        gae_lambda=0.8,
    )
    first = generalized_advantage(
        column(*rewards[:2]),
        column(*values[:2]),
        column(0.25, 0.0),
        flags(False, True),
        flags(False, False),
        discount=0.9,
        gae_lambda=0.8,
    )
    second = generalized_advantage(
        column(*rewards[2:]),
        column(*values[2:]),
        column(1.0, 5.0),
        flags(False, False),
        flags(False, True),
        discount=0.9,
        gae_lambda=0.8,
    )
    assert torch.equal(both, torch.cat([first, second]))


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    discount=st.floats(0.1, 1.0),
    gae_lambda=st.floats(0.0, 1.0),
    terminated=st.booleans(),
)
def test_gae_is_the_discounted_sum_of_its_errors(
    length: int, seed: int, discount: float, gae_lambda: float, terminated: bool
) -> None:
    episode = trajectory(
        "a", seed, length=length, terminated=terminated, truncated=not terminated, final_value=0.7 * (not terminated)
    )
    found = trajectory_returns(episode, discount=discount, gae_lambda=gae_lambda)
    following = [*episode.values[1:].tolist(), 0.0 if terminated else episode.final_value]
    errors = [
        float(episode.rewards[step]) + discount * following[step] - float(episode.values[step])
        for step in range(length)
    ]
    for step in range(length):
        expected = sum((discount * gae_lambda) ** (later - step) * errors[later] for later in range(step, length))
        assert found.advantages[step] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_normalised_advantages_have_mean_0_and_deviation_1() -> None:
    found = normalize_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(found.square().mean()) == pytest.approx(1.0, abs=1e-5)


def test_c30_equal_or_single_advantages_do_not_crash() -> None:
    assert normalize_advantages(torch.full((4,), 3.0)).tolist() == [0.0] * 4
    assert normalize_advantages(torch.tensor([3.0])).tolist() == [3.0]
    assert normalize_advantages(torch.tensor([])).tolist() == []


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 2.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0


@pytest.mark.parametrize(("discount", "gae_lambda"), [(0.0, 0.9), (1.1, 0.9), (0.9, -0.1), (0.9, 1.1)])
def test_out_of_range_is_refused(discount: float, gae_lambda: float) -> None:
    with pytest.raises(ValueError, match="generalized_advantage"):
        generalized_advantage(
            column(1.0), column(1.0), column(1.0), flags(True), flags(False), discount=discount, gae_lambda=gae_lambda
        )
