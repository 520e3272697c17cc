"""Diffusion Policy: the schedule, the loss, and DDIM against the exact answer for a Gaussian."""

import math

import numpy as np
import pytest
import torch

from joynexus.models.action_module import ModuleDims, build_action_module
from joynexus.models.action_modules.diffusion import sampled_levels, squared_cosine
from joynexus.specs.more_modules import DiffusionModuleSpec
from joynexus.testing.model_inputs import fake_prefix

DIMS = ModuleDims(prefix_dim=16, state_dim=3, action_dim=2, horizon=6)
ROWS = 3


def module_of(**changes):
    sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "clip_range": 100.0}
    return build_action_module(DiffusionModuleSpec(**{**sizes, **changes}), DIMS, seed=0)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs():
    actions = torch.rand(ROWS, DIMS.horizon, DIMS.action_dim, generator=generator(2)) * 1.6 - 0.8
    return fake_prefix(DIMS, ROWS), torch.zeros(ROWS, 3), actions, torch.ones(ROWS, DIMS.horizon, dtype=torch.bool)


def test_the_schedule_is_the_squared_cosine():
    kept = squared_cosine(100)
    share = np.arange(1, 101) / 100
    curve = np.cos((share + 0.008) / 1.008 * np.pi / 2) ** 2 / np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    assert np.allclose(kept[:-1], curve[:-1], rtol=1e-9)  # the product of ratios telescopes, until the last is capped
    assert kept[-1] == pytest.approx(kept[-2] * 0.001)
    assert sampled_levels(100, 10) == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0]
    assert sampled_levels(100, 3) == [66, 33, 0]


@pytest.mark.parametrize("num_levels", [2, 100, 1000, 10_000])
def test_c65_no_level_leaves_the_range_of_the_schedule(num_levels):
    kept = np.array(squared_cosine(num_levels))
    assert ((kept > 0) & (kept < 1)).all()
    assert (np.diff(kept) < 0).all()
    times = []
    module = module_of(num_noise_levels=num_levels, num_sampling_steps=2)
    module.denoise = lambda noisy, time, memory, mask: times.append(time) or torch.zeros_like(noisy)
    prefix, state, actions, valid = inputs()
    draws = generator()
    for _ in range(200):
        assert module.loss(prefix, state, actions, valid, draws).isfinite().all()
    module.act(prefix, state, [draws] * ROWS, deterministic=True)
    drawn = torch.cat(times)
    assert drawn.min() >= 0
    assert drawn.max() <= 1 - 1 / num_levels


def test_the_loss_is_the_distance_to_the_noise():
    prefix, state, actions, valid = inputs()
    loss = module_of().loss(prefix, state, actions, valid, generator(4))  # a new network answers 0
    noise = torch.randn(actions.shape, generator=generator(4))
    assert torch.allclose(loss, noise.square().mean(dim=(1, 2)), atol=1e-6)


def test_the_network_sees_actions_and_noise_in_the_shares_of_their_level():
    prefix, state, actions, valid = inputs()
    module, seen = module_of(), {}
    module.denoise = lambda noisy, time, memory, mask: seen.update(x=noisy, time=time) or noisy
    module.loss(prefix, state, actions, valid, generator(4))
    draws = generator(4)
    noise, level = torch.randn(actions.shape, generator=draws), torch.randint(100, (ROWS,), generator=draws)
    kept = np.array(squared_cosine(100))[level.numpy()][:, None, None]
    assert np.allclose(seen["x"], np.sqrt(kept) * actions.numpy() + np.sqrt(1 - kept) * noise.numpy(), atol=1e-6)
    assert torch.allclose(seen["time"], level / 100)


def test_ddim_follows_its_formula():
    prefix, state, _, _ = inputs()
    module = module_of(num_sampling_steps=5, clip_range=0.7)
    module.denoise = lambda noisy, time, memory, mask: 0.5 * noisy + time[:, None, None]
    start = torch.randn(ROWS, DIMS.horizon, DIMS.action_dim, generator=generator(7))
    found = module.sample(prefix, state, start)
    kept, chunk = squared_cosine(100), start.double().numpy()
    for level, after in ((80, 60), (60, 40), (40, 20), (20, 0), (0, None)):
        noise = 0.5 * chunk + level / 100
        clean = np.clip((chunk - (1 - kept[level]) ** 0.5 * noise) / kept[level] ** 0.5, -0.7, 0.7)
        target = 1.0 if after is None else kept[after]
        chunk = target**0.5 * clean + (1 - target) ** 0.5 * noise
    assert np.allclose(found, chunk, atol=1e-5)
    assert np.abs(found.numpy()).max() <= 0.7


def test_ddim_carries_noise_to_a_gaussian_as_its_exact_flow_does():
    """For a ~ N(m, s²) the best ε is known, and DDIM's ODE maps x_T to m + s·z, z the standardised start."""
    mean, std, steps = 0.3, 0.5, 1000
    prefix, state, _, _ = inputs()
    module = module_of(num_noise_levels=1000, num_sampling_steps=steps)
    kept = torch.tensor(squared_cosine(1000), dtype=torch.float64)

    def best(noisy, time, memory, mask):
        share = kept[(time * 1000).round().long()][:, None, None]
        spread = share * std**2 + (1 - share)
        return ((1 - share).sqrt() * (noisy - share.sqrt() * mean) / spread).to(noisy.dtype)

    module.denoise = best
    start = torch.randn(ROWS, DIMS.horizon, DIMS.action_dim, generator=generator(3))
    first = kept[module._sampled[0]]
    z = (start - first.sqrt() * mean) / (first * std**2 + 1 - first).sqrt()
    found = module.sample(prefix, state, start)
    assert (found - (mean + std * z)).abs().max() < 0.01


def test_acting_draws_the_start_from_each_rows_own_generator_and_nothing_else():
    prefix, state, _, _ = inputs()
    module = module_of(num_sampling_steps=4)
    draws = [generator(row) for row in range(ROWS)]
    first = module.act(prefix, state, draws, deterministic=False).actions
    start = torch.stack([torch.randn(6, 2, generator=generator(row)) for row in range(ROWS)])
    assert torch.equal(first, module.sample(prefix, state, start))
    left = generator(0)
    torch.randn(6, 2, generator=left)
    assert torch.equal(draws[0].get_state(), left.get_state())


def test_it_learns_two_modes():
    """Actions are all 0.6 or all -0.6: the mean of both, which a regression would give, is nearly never sampled."""
    dims = ModuleDims(prefix_dim=4, state_dim=0, action_dim=1, horizon=2)
    spec = DiffusionModuleSpec(hidden_dim=32, num_layers=1, num_heads=2, num_sampling_steps=20)
    module = build_action_module(spec, dims, seed=0)
    prefix = fake_prefix(dims, 64, length=3)
    sign = torch.tensor([1.0, -1.0]).repeat(32)[:, None, None]
    actions, valid = 0.6 * sign.expand(64, 2, 1), torch.ones(64, 2, dtype=torch.bool)
    prefix.hidden.zero_()
    optimizer, draws = torch.optim.AdamW(module.parameters(), lr=3e-3), generator(1)
    for _ in range(300):
        loss = module.loss(prefix, torch.zeros(64, 0), actions, valid, draws).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sampled = module.act(prefix, torch.zeros(64, 0), [generator(row) for row in range(64)], deterministic=False)
    chunk = sampled.actions[..., 0]
    assert (chunk.abs() - 0.6).abs().mean() < 0.15
    assert 0.2 < (chunk[:, 0] > 0).float().mean() < 0.8
    assert math.isclose(float((chunk[:, 0].sign() == chunk[:, 1].sign()).float().mean()), 1.0, abs_tol=0.1)


def test_a_spec_that_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match="num_sampling_steps 11 is more than num_noise_levels 10"):
        DiffusionModuleSpec(num_noise_levels=10, num_sampling_steps=11)
    with pytest.raises(ValueError, match="num_heads 3 does not divide hidden_dim 32"):
        DiffusionModuleSpec(hidden_dim=32, num_heads=3)
