import math

import pytest
import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from joynexus.errors import InvalidBatchError
from joynexus.models.action_module import ModuleDims, build_action_module, masked_row_mean
from joynexus.models.action_modules.chunk_transformer import hold_last_valid
from joynexus.models.action_modules.flow_matching import flow_time
from joynexus.models.action_modules.gaussian import PRE_TANH, squashed_log_prob
from joynexus.models.action_modules.layers import sinusoids
from joynexus.specs.action_module import FlowMatchingModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.more_modules import DiffusionModuleSpec, DiscreteTokensModuleSpec
from joynexus.testing.model_inputs import fake_prefix

DIMS = ModuleDims(prefix_dim=16, state_dim=3, action_dim=2, horizon=10)
SMALL = {"hidden_dim": 32, "num_layers": 2}
SPECS = {
    "oft": OftModuleSpec(type="oft", token_dim=8, max_prefix_tokens=12, **SMALL),
    "gaussian": GaussianModuleSpec(type="gaussian", token_dim=8, max_prefix_tokens=12, **SMALL),
    "flow_matching": FlowMatchingModuleSpec(type="flow_matching", num_heads=2, **SMALL),
    "diffusion": DiffusionModuleSpec(type="diffusion", num_heads=2, **SMALL),
    "discrete_tokens": DiscreteTokensModuleSpec(
        type="discrete_tokens", token_dim=8, max_prefix_tokens=12, slot_dim=16, num_bins=16, **SMALL
    ),
}


def module_of(name, dims=DIMS, seed=0):
    return build_action_module(SPECS[name], dims, seed=seed)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(rows=4, dims=DIMS):
    state = torch.randn(rows, dims.state_dim, generator=generator(1))
    actions = torch.rand(rows, dims.horizon, dims.action_dim, generator=generator(2)) * 1.6 - 0.8
    return fake_prefix(dims, rows), state, actions, torch.ones(rows, dims.horizon, dtype=torch.bool)


def silence(module):
    """Make a module predict 0, whatever it sees."""
    for name, each in module.named_parameters():
        if "leave" in name:
            torch.nn.init.zeros_(each)
    return module


@pytest.mark.parametrize("name", ["oft", "gaussian"])
def test_c63_padded_steps_do_not_dilute_the_loss(name):
    prefix, state, actions, valid = inputs(1)
    actions = torch.ones_like(actions)
    valid[0, 4:] = False
    assert silence(module_of(name)).loss(prefix, state, actions, valid, generator()).tolist() == [1.0]


@pytest.mark.parametrize("name", ["flow_matching", "diffusion"])
def test_c63_padded_steps_do_not_dilute_the_loss_of_a_random_target(name):
    prefix, state, actions, valid = inputs(1)
    valid[0, 4:] = False
    module = module_of(name)
    noise = torch.randn(actions.shape, generator=generator(4))

    def off_by_one(noisy, time, memory, mask):
        target = noise - hold_last_valid(actions, valid) if name == "flow_matching" else noise
        return target + 1.0

    module.denoise = off_by_one
    assert module.loss(prefix, state, actions, valid, generator(4)).tolist() == pytest.approx([1.0], abs=1e-6)


def test_c63_padded_steps_do_not_dilute_the_cross_entropy():
    prefix, state, actions, valid = inputs(1)
    valid[0, 4:] = False
    module = module_of("discrete_tokens")
    torch.nn.init.zeros_(module.token_out.weight)  # all 16 tokens are equally likely
    loss = module.loss(prefix, state, actions, valid, generator())
    assert loss.tolist() == pytest.approx([math.log(16)])


def test_c63_the_mean_is_over_the_valid_steps_of_each_row():
    errors = torch.ones(2, 10, 2)
    errors[1, 2] = 5.0
    valid = torch.zeros(2, 10, dtype=torch.bool)
    valid[0, :4] = True
    valid[1, :4] = True
    assert masked_row_mean(errors, valid).tolist() == [1.0, 2.0]
    assert masked_row_mean(errors, torch.zeros_like(valid)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", SPECS)
def test_c10_nan_at_padded_steps_reaches_neither_loss_nor_gradient(name):
    prefix, state, actions, valid = inputs()
    valid[:, 4:] = False
    results = []
    for padding in (0.3, math.nan):
        module = module_of(name, seed=5)
        filled = torch.where(valid[..., None], actions, torch.tensor(padding))
        loss = module.loss(prefix, state, filled, valid, generator())
        loss.sum().backward()
        results.append([loss.detach(), *(each.grad for each in module.parameters() if each.grad is not None)])
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))
    assert all(each.isfinite().all() for each in results[1])


@pytest.mark.parametrize("name", SPECS)
def test_a_nan_that_counts_does_reach_the_loss_of_its_row_alone(name):
    prefix, state, actions, valid = inputs()
    actions[1, 0, 0] = torch.nan
    loss = module_of(name).loss(prefix, state, actions, valid, generator())
    assert loss.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("name", "steps", "fraction"),
    [
        ("oft", 80, 0.2),
        ("gaussian", 80, 0.2),
        ("flow_matching", 100, 0.7),
        ("diffusion", 100, 0.7),
        ("discrete_tokens", 100, 0.4),
    ],
)
def test_a_module_learns(name, steps, fraction):
    prefix, state, actions, valid = inputs(8)
    module, draws = module_of(name), generator(3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = module.loss(prefix, state, actions, valid, draws).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < fraction * losses[0]


@pytest.mark.parametrize("name", ["oft", "gaussian", "discrete_tokens"])
def test_a_prefix_longer_than_the_module_reads_is_refused(name):
    _, state, _, _ = inputs()
    with pytest.raises(InvalidBatchError, match=r"has 13 tokens, the action module reads 12\. Raise max_prefix_tokens"):
        module_of(name).act(fake_prefix(DIMS, 4, length=13), state, [generator()] * 4, deterministic=True)


@pytest.mark.parametrize("name", SPECS)
def test_where_a_token_stands_matters(name):
    prefix, state, _, _ = inputs()
    module = module_of(name)
    with torch.no_grad():
        for each in module.parameters():
            each.add_(torch.randn(each.shape, generator=generator(9)), alpha=0.2)
    prefix.pad.zero_()
    before = module.act(prefix, state, [generator(row) for row in range(4)], deterministic=True).actions
    prefix.hidden[:, :2] = prefix.hidden[:, :2].flip(1)
    after = module.act(prefix, state, [generator(row) for row in range(4)], deterministic=True).actions
    assert not torch.allclose(before, after, atol=1e-4)


def test_gaussian_log_probability_is_that_of_the_squashed_normal():
    mean = torch.randn(3, 10, 2, generator=generator(), dtype=torch.float64)
    log_std = torch.randn(10, 2, generator=generator(1), dtype=torch.float64) * 0.3
    pre_tanh = mean + log_std.exp() * torch.randn(3, 10, 2, generator=generator(2), dtype=torch.float64)
    squashed = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    expected = squashed.log_prob(torch.tanh(pre_tanh)).sum(dim=(1, 2))
    assert torch.allclose(squashed_log_prob(pre_tanh, mean, log_std), expected, rtol=1e-6)


def test_gaussian_log_probability_is_finite_where_tanh_has_rounded_to_1():
    pre_tanh = torch.full((1, 1, 1), 40.0, requires_grad=True)
    log_prob = squashed_log_prob(pre_tanh, torch.full((1, 1, 1), 40.0), torch.zeros(1, 1))
    log_prob.sum().backward()
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 40.0), rel=1e-6)
    assert pre_tanh.grad.isfinite().all()


def test_gaussian_entropy_is_that_of_the_normal_and_log_std_is_kept_in_range():
    prefix, state, _, _ = inputs()
    module = module_of("gaussian")
    trace = module.act(prefix, state, [generator(row) for row in range(4)], deterministic=False).trace
    per_number = SPECS["gaussian"].initial_log_std + 0.5 * (1 + math.log(2 * math.pi))
    scored = module.evaluate(prefix, state, trace)
    assert scored.entropy.tolist() == pytest.approx([20 * per_number] * 4, rel=1e-5)
    torch.nn.init.constant_(module.log_std, 9.0)
    capped = module.evaluate(prefix, state, trace)
    assert capped.entropy.tolist() == pytest.approx([20 * (2.0 + 0.5 * (1 + math.log(2 * math.pi)))] * 4, rel=1e-5)


def test_gaussian_acts_at_its_mean_or_samples_around_it():
    prefix, state, _, _ = inputs(1)
    module = module_of("gaussian")
    fixed = module.act(prefix, state, [generator()], deterministic=True)
    wide = fake_prefix(DIMS, 1)
    many = torch.cat(
        [module.act(wide, state, [generator(seed)], deterministic=False).trace[PRE_TANH] for seed in range(400)]
    )
    assert torch.equal(fixed.actions, torch.tanh(fixed.trace[PRE_TANH]))
    assert many.mean(dim=0).sub(fixed.trace[PRE_TANH][0]).abs().max() < 0.15
    assert many.std().item() == pytest.approx(math.exp(-0.5), rel=0.05)


def test_c65_flow_times_never_leave_0_to_1():
    times = flow_time(torch.rand(1_000_000, generator=generator()))
    assert times.min() >= 0
    assert times.max() <= 1
    assert times.mean().item() == pytest.approx(0.999 * 0.6 + 0.001, abs=2e-3)  # Beta(1.5, 1) has mean 0.6
    assert times.var().item() == pytest.approx(0.998 * 1.5 / (2.5**2 * 3.5), abs=2e-3)
    forced = flow_time(torch.tensor([0.0, 0.9995, 1.0, 1.0000001]))
    assert forced.min() >= 0
    assert forced.max() <= 1


def test_flow_sampling_follows_the_field_from_noise_to_actions():
    prefix, state, _, _ = inputs(2)
    module = module_of("flow_matching")
    seen = []

    def field(noisy, time, memory, mask):
        seen.append(time[0].item())
        return noisy - 0.25  # the field that carries x to 0.25, within Euler's error

    module.velocity = field
    decision = module.act(prefix, state, [generator(0), generator(1)], deterministic=False)
    start = torch.stack([torch.randn(10, 2, generator=generator(row)) for row in (0, 1)])
    assert torch.allclose(decision.actions, 0.25 + (start - 0.25) * 0.9**10, atol=1e-6)
    assert seen == pytest.approx([1.0 - step / 10 for step in range(10)])
    assert decision.log_prob is None


def test_flow_loss_is_the_distance_to_noise_minus_actions():
    prefix, state, actions, valid = inputs(3)
    module = module_of("flow_matching")  # its field starts at 0
    loss = module.loss(prefix, state, actions, valid, generator(4))
    noise = torch.randn(actions.shape, generator=generator(4))
    assert torch.allclose(loss, (noise - actions).square().mean(dim=(1, 2)), atol=1e-6)


def test_padded_steps_hold_the_last_valid_action():
    actions = torch.arange(5.0)[None, :, None].expand(3, 5, 1).clone()
    valid = torch.tensor([[True, True, False, False, False], [False, True, False, True, False], [False] * 5])
    actions[~valid] = torch.nan
    held = hold_last_valid(actions, valid)[..., 0]
    assert held.tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 3, 3], [0, 0, 0, 0, 0]]


def test_sinusoids_tell_positions_apart():
    codes = sinusoids(torch.arange(64.0), 32, longest=10_000.0)
    assert torch.cdist(codes, codes).fill_diagonal_(9).min() > 0.1
    assert sinusoids(torch.arange(3.0), 33, longest=100.0).shape == (3, 33)
