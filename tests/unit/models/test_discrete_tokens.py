"""Binned action tokens: bins, cross-entropy, and exact log-probability and entropy."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from joynexus.models.action_module import ModuleDims, build_action_module
from joynexus.models.action_modules.discrete_tokens import TOKENS, actions_of, tokens_of
from joynexus.specs.more_modules import DiscreteTokensModuleSpec
from joynexus.testing.action_module_contracts import shake
from joynexus.testing.model_inputs import fake_prefix

DIMS = ModuleDims(prefix_dim=16, state_dim=3, action_dim=2, horizon=5)
BINS, ROWS = 8, 4


@pytest.fixture
def module():
    spec = DiscreteTokensModuleSpec(num_bins=BINS, hidden_dim=16, slot_dim=8, token_dim=8, max_prefix_tokens=12)
    built = build_action_module(spec, DIMS, seed=0)
    shake(built)
    return built


def seen():
    return fake_prefix(DIMS, ROWS), torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))


def generators(first=0):
    return [torch.Generator().manual_seed(first + row) for row in range(ROWS)]


def test_bins_cover_the_normalised_range_evenly():
    numbers = torch.tensor([[-9.0, -1.0, -0.751, -0.75, 0.0, 0.999, 1.0, 9.0]])
    assert tokens_of(numbers, BINS).tolist() == [[0, 0, 0, 1, 4, 7, 7, 7]]
    assert actions_of(torch.tensor([[0, 3, 4, 7]]), BINS).tolist() == [[-0.875, -0.125, 0.125, 0.875]]


@pytest.mark.parametrize("num_bins", [2, 255, 256, 1000])
def test_a_number_comes_back_within_half_a_bin(num_bins):
    numbers = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tokens = tokens_of(numbers, num_bins)
    assert (actions_of(tokens, num_bins) - numbers).abs().max() <= 1 / num_bins + 1e-6
    everywhere = torch.arange(num_bins)[:, None]
    assert torch.equal(tokens_of(actions_of(everywhere, num_bins), num_bins), everywhere)


def test_the_loss_is_the_cross_entropy_of_the_bins(module):
    prefix, state = seen()
    actions = torch.rand(ROWS, 5, 2, generator=torch.Generator().manual_seed(2)) * 3 - 1.5
    valid = torch.ones(ROWS, 5, dtype=torch.bool)
    valid[0, 3:] = False
    loss = module.loss(prefix, state, actions, valid, torch.Generator())
    scores = Categorical(logits=module.logits(prefix, state)).log_prob(tokens_of(actions, BINS))
    expected = [-scores[row][valid[row]].mean() for row in range(ROWS)]
    assert torch.allclose(loss, torch.stack(expected), atol=1e-6)


def test_log_probability_and_entropy_are_those_of_independent_categoricals(module):
    prefix, state = seen()
    decision = module.act(prefix, state, generators(), deterministic=False)
    spread = Categorical(logits=module.logits(prefix, state))
    tokens = decision.trace[TOKENS]
    assert torch.equal(decision.actions, actions_of(tokens, BINS))
    assert torch.allclose(decision.log_prob, spread.log_prob(tokens).sum(dim=(1, 2)), atol=1e-5)
    scored = module.evaluate(prefix, state, decision.trace)
    assert torch.allclose(scored.entropy, spread.entropy().sum(dim=(1, 2)), atol=1e-5)


def test_tokens_are_sampled_as_often_as_they_are_likely(module):
    prefix, state = seen()
    spread = Categorical(logits=module.logits(prefix, state)).probs.detach()
    counts = torch.zeros_like(spread)
    draws = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    times = 1500
    for _ in range(times):
        tokens = module.act(prefix, state, draws, deterministic=False).trace[TOKENS]
        counts.scatter_add_(-1, tokens[..., None], torch.ones(ROWS, 5, 2, 1))
    bound = 5 * (spread * (1 - spread) / times).sqrt() + 1 / times
    assert ((counts / times - spread).abs() <= bound).all()
    likeliest = module.act(prefix, state, draws, deterministic=True).trace[TOKENS]
    assert torch.equal(likeliest, spread.argmax(dim=-1))


def test_a_new_policy_is_nearly_uniform():
    spec = DiscreteTokensModuleSpec(hidden_dim=16, slot_dim=8, token_dim=8, max_prefix_tokens=12)
    scored = build_action_module(spec, DIMS, seed=0).evaluate(
        *seen(), {TOKENS: torch.zeros(ROWS, 5, 2, dtype=torch.long)}
    )
    assert scored.entropy.tolist() == pytest.approx([10 * math.log(256)] * ROWS, rel=1e-3)
    assert scored.log_prob.tolist() == pytest.approx([-10 * math.log(256)] * ROWS, rel=0.02)


def test_reinforcement_makes_a_rewarded_token_likelier(module):
    """One policy-gradient step on a chunk raises that chunk's log-probability."""
    prefix, state = seen()
    decision = module.act(prefix, state, generators(), deterministic=False)
    before = module.evaluate(prefix, state, decision.trace)
    (-before.log_prob.sum()).backward()
    with torch.no_grad():
        for each in module.actor.parameters():
            each.sub_(each.grad, alpha=1e-3)
    after = module.evaluate(prefix, state, decision.trace)
    assert (after.log_prob > before.log_prob).all()
    assert np.allclose(after.value.detach(), before.value.detach())
