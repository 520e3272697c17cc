"""Modules of several tenants as one stack: the same numbers as each by itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from joynexus.models.action_module import ModuleDims, build_action_module
from joynexus.models.action_modules.oft import OftModule
from joynexus.models.stacked import STACK_BOUND, StackedModule, can_stack
from joynexus.specs.action_module import FlowMatchingModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.more_modules import DiffusionModuleSpec, DiscreteTokensModuleSpec
from joynexus.testing.action_module_contracts import shake
from joynexus.testing.model_inputs import fake_prefix

DIMS = ModuleDims(prefix_dim=32, state_dim=5, action_dim=3, horizon=4)
SPECS = {
    "oft": OftModuleSpec(hidden_dim=32, token_dim=8, max_prefix_tokens=20),
    "gaussian": GaussianModuleSpec(hidden_dim=32, token_dim=8, max_prefix_tokens=20),
    "flow_matching": FlowMatchingModuleSpec(hidden_dim=32, num_layers=2, num_heads=2, num_sampling_steps=3),
    "diffusion": DiffusionModuleSpec(hidden_dim=32, num_layers=2, num_heads=2, num_sampling_steps=3),
    "discrete_tokens": DiscreteTokensModuleSpec(
        hidden_dim=32, token_dim=8, max_prefix_tokens=20, slot_dim=8, num_bins=16
    ),
}
ROWS = 4


def modules_of(name, count, dims=DIMS):
    modules = [build_action_module(SPECS[name], dims, seed=seed) for seed in range(count)]
    for module in modules:
        shake(module)
        module.requires_grad_(requires_grad=False)
    return modules


def generators(count):
    return [torch.Generator().manual_seed(row) for row in range(count)]


def differences(modules, stack, dims=DIMS):
    """Largest difference of each module alone and in the stack, relative to 1 + its size."""
    total = len(modules) * ROWS
    prefix, state = fake_prefix(dims, total), torch.randn(total, dims.state_dim, generator=generators(1)[0])
    together = stack.act(prefix, state, generators(total), deterministic=False)
    found = []
    for slot, module in enumerate(modules):
        at = slice(slot * ROWS, (slot + 1) * ROWS)
        alone = module.act(prefix.slice(at.start, at.stop), state[at], generators(total)[at], deterministic=False)
        pairs = [(alone.actions, together[slot].actions)]
        pairs += [(alone.trace[name], together[slot].trace[name]) for name in alone.trace]
        if alone.log_prob is not None:
            pairs += [(alone.log_prob, together[slot].log_prob), (alone.value, together[slot].value)]
        found.append(max(float(((one - other).abs() / (1 + one.abs())).max()) for one, other in pairs))
    return found


@pytest.mark.parametrize("dims", [DIMS, replace(DIMS, state_dim=0)])
@pytest.mark.parametrize("name", SPECS)
def test_stack_gives_what_each_module_gives(name, dims):
    modules = modules_of(name, 3, dims)
    stack = StackedModule(modules[0], slots=3, rows=ROWS)
    is_exact = stack.is_exact(modules[0], fake_prefix(dims, ROWS))
    for slot, module in enumerate(modules):
        stack.load(slot, module)
    found = differences(modules, stack, dims)
    assert max(found) <= (0.0 if is_exact else STACK_BOUND)


def test_a_nan_stays_in_its_slot():
    modules = modules_of("oft", 3)
    stack = StackedModule(modules[0], slots=3, rows=ROWS)
    for slot, module in enumerate(modules):
        stack.load(slot, module)
    clean = differences(modules, stack)
    modules[1].leave.weight[0, 0] = torch.nan
    stack.load(1, modules[1])
    dirty = differences(modules, stack)
    assert (dirty[0], dirty[2]) == (clean[0], clean[2])
    assert dirty[1] != dirty[1]


def test_a_slot_that_is_cleared_holds_nothing():
    modules = modules_of("flow_matching", 2)
    stack = StackedModule(modules[0], slots=2, rows=ROWS)
    for slot, module in enumerate(modules):
        stack.load(slot, module)
    stack.clear(1)
    assert all(not each[1].any() for each in stack.views.values())
    assert any(bool(each[0].any()) for each in stack.views.values())
    parameters = sum(each.numel() for each in modules[0].parameters())
    per_row = modules[0].step_code.numel() * (ROWS - 1)
    assert stack.nbytes == 2 * 4 * (parameters + per_row)


def test_module_is_left_as_it_was():
    module = modules_of("gaussian", 1)[0].requires_grad_()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    StackedModule(module, slots=2, rows=ROWS).is_exact(module, fake_prefix(DIMS, ROWS))
    assert module.state_dict().keys() == before.keys()
    assert all(each.requires_grad for each in module.parameters())
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


def test_only_what_promises_it_is_stacked():
    class Convolving(OftModule):
        def __init__(self, spec, dims):
            super().__init__(spec, dims)
            self.extra = nn.Conv1d(2, 2, 1)

    class Silent(OftModule):
        stacks = False

    (module,) = modules_of("oft", 1)
    assert can_stack(module)
    assert not can_stack(Silent(SPECS["oft"], DIMS))
    assert not can_stack(Convolving(SPECS["oft"], DIMS))
    module.act = module.act  # an instance that acts otherwise than its class
    assert not can_stack(module)
