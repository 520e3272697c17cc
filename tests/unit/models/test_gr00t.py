import math

import pytest
import torch

from joynexus.errors import InvalidBatchError, SpecError
from joynexus.models.action_module import ModuleDims, build_action_module
from joynexus.models.action_modules.gr00t import Gr00tModule, flow_time
from joynexus.specs.action_module import OftModuleSpec
from joynexus.specs.vla_modules import Gr00tModuleSpec
from joynexus.testing.action_module_contracts import check_action_module
from joynexus.testing.model_inputs import fake_prefix

DIMS = ModuleDims(prefix_dim=32, state_dim=3, action_dim=2, horizon=5)
SMALL = {"hidden_dim": 24, "num_heads": 2, "head_dim": 8, "num_layers": 2, "num_future_tokens": 2, "max_steps": 8}
SPEC = Gr00tModuleSpec(**SMALL)
ROWS = 4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(rows=ROWS):
    state = torch.randn(rows, DIMS.state_dim, generator=generator(1))
    actions = torch.rand(rows, DIMS.horizon, DIMS.action_dim, generator=generator(2)) * 1.6 - 0.8
    return fake_prefix(DIMS, rows), state, actions


def test_c65_a_beta_draw_near_1_gives_time_0_never_less():
    assert flow_time(torch.tensor([0.9995, 1.0, 0.999, 0.0])).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert flow_time(torch.tensor([0.4995])).item() == pytest.approx(0.5)


def test_c65_a_million_draws_stay_in_range():
    times = flow_time(torch.rand(1_000_000, generator=generator()).pow(1 / 1.5))
    assert times.min() >= 0
    assert times.max() <= 1
    assert times.mean().item() == pytest.approx(1 - 0.6 / 0.999, abs=2e-3), "Beta(1.5, 1) has mean 0.6"


def test_c65_the_loss_draws_its_times_through_the_clamp(monkeypatch):
    """A uniform draw of almost 1 is a Beta draw above 0.999: the noise is seen at bucket 0, not before it."""
    seen = []
    module = build_action_module(SPEC, DIMS, seed=0)
    prefix, state, actions = inputs()
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.full((count,), 0.99999))
    monkeypatch.setattr(module, "loss_elements", lambda *given: seen.append(given[-1]) or torch.zeros_like(actions))
    module.loss(prefix, state, actions, torch.ones(ROWS, DIMS.horizon, dtype=torch.bool), generator())
    assert seen[0].tolist() == [0.0] * ROWS


@pytest.mark.parametrize(
    "changes",
    [
        {"repeated_diffusion_steps": 3},
        {"norm_prefix": True, "num_prefix_layers": 2, "prefix_head_dim": 16},
        {"max_steps": 0, "num_layers": 3},
    ],
    ids=["repeated", "prefix-layers", "no-positions"],
)
def test_options_keep_the_promises_of_an_action_module(changes):
    check_action_module(SPEC.model_copy(update=changes))


def test_all_draws_of_a_row_count_and_a_step_that_is_not_valid_does_too():
    """The mean over draws, steps and dimensions; steps past the last valid one hold its action."""
    spec = SPEC.model_copy(update={"repeated_diffusion_steps": 2})
    module = build_action_module(spec, DIMS, seed=0)
    prefix, state, actions = inputs()
    valid = torch.ones(ROWS, DIMS.horizon, dtype=torch.bool)
    valid[0, 3:] = False
    valid[1] = False
    actions[0, 3:] = math.nan
    loss = module.loss(prefix, state, actions, valid, generator(7))
    held = torch.where(valid[..., None], actions, 0.0)
    held[0, 3:] = actions[0, 2]
    draws = generator(7)
    noise = torch.randn(2 * ROWS, DIMS.horizon, DIMS.action_dim, generator=draws)
    time = flow_time(torch.rand(2 * ROWS, generator=draws).pow(1 / 1.5))
    elements = module.loss_elements(prefix, state, held, noise, time)
    expected = (elements[:ROWS] + elements[ROWS:]).mean(dim=(1, 2)) / 2
    expected[1] = 0.0
    assert torch.allclose(loss, expected)


def test_repeating_rows_equals_giving_them_twice():
    module = build_action_module(SPEC, DIMS, seed=0)
    prefix, state, actions = inputs()
    noise = torch.randn(2 * ROWS, DIMS.horizon, DIMS.action_dim, generator=generator(3))
    time = torch.rand(2 * ROWS, generator=generator(4))
    together = module.loss_elements(prefix, state, actions, noise, time)
    twice = prefix.pick(torch.arange(ROWS).repeat(2))
    apart = module.loss_elements(twice, state.repeat(2, 1), actions.repeat(2, 1, 1), noise, time)
    assert torch.allclose(together, apart, atol=1e-6)


def test_euler_steps_go_from_noise_at_0_to_actions_at_1(monkeypatch):
    module = build_action_module(SPEC, DIMS, seed=0)
    prefix, state, actions = inputs()
    noise = torch.randn(actions.shape, generator=generator(5))
    buckets = []

    def straight(self, noisy, bucket, *_):
        buckets.append(bucket[0].item())
        return actions - noise

    monkeypatch.setattr(Gr00tModule, "_field", straight)
    assert torch.allclose(module.sample(prefix, state, noise), actions, atol=1e-6)
    assert buckets == [0, 250, 500, 750]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match="max_steps is 4, the horizon 5"):
        build_action_module(SPEC.model_copy(update={"max_steps": 4}), DIMS, seed=0)
    with pytest.raises(SpecError, match="prefix_head_dim 64 does not divide the backbone's width 32"):
        build_action_module(SPEC.model_copy(update={"num_prefix_layers": 1}), DIMS, seed=0)


QUERIES = OftModuleSpec(reads="queries", query_tail=2, hidden_dim=32, num_layers=2)


def test_queries_keep_the_promises_of_an_action_module():
    check_action_module(QUERIES)


@pytest.mark.parametrize("side", ["left", "right"])
def test_queries_are_counted_from_the_end_of_the_prompt(side):
    module = build_action_module(QUERIES, DIMS, seed=0)
    prefix, _, _ = inputs()
    prefix.pad[:] = False
    prefix.pad[0, slice(0, 3) if side == "left" else slice(-3, None)] = True
    last = prefix.length - (4 if side == "right" else 1)
    found = module.queries(prefix)
    assert torch.equal(found[0], prefix.hidden[0, last - 6 : last - 1])
    assert torch.equal(found[1], prefix.hidden[1, -7:-2])


def test_a_prefix_shorter_than_the_queries_is_refused():
    module = build_action_module(QUERIES, DIMS, seed=0)
    with pytest.raises(InvalidBatchError, match="it has 6 tokens, the action tokens and what is behind them are 7"):
        module.predict(fake_prefix(DIMS, ROWS, length=6), torch.zeros(ROWS, 3))
