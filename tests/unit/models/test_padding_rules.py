"""C63 for every family: what padded steps do to the loss is the family's own rule, and is named."""

from dataclasses import replace

import pytest
import torch

from joynexus.models.action_module import build_action_module
from joynexus.specs.action_module import FlowMatchingModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.more_modules import DiffusionModuleSpec, DiscreteTokensModuleSpec
from joynexus.specs.registry import component_types
from joynexus.specs.vla_modules import Gr00tModuleSpec, Pi0ModuleSpec, Pi05ModuleSpec, SmolVlaModuleSpec
from joynexus.testing.action_module_contracts import DIMS
from joynexus.testing.model_inputs import fake_prefix

STEPS = replace(DIMS, horizon=10)
MLP = {"hidden_dim": 16, "token_dim": 4, "max_prefix_tokens": 16}
DIT = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2}
GEMMA = {"num_layers": 2, "hidden_dim": 16, "mlp_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
RULES = {
    "oft": (OftModuleSpec(**MLP), "masked"),
    "gaussian": (GaussianModuleSpec(**MLP), "masked"),
    "discrete_tokens": (DiscreteTokensModuleSpec(num_bins=8, slot_dim=4, **MLP), "masked"),
    "flow_matching": (FlowMatchingModuleSpec(**DIT), "masked"),
    "diffusion": (DiffusionModuleSpec(**DIT), "masked"),
    "smolvla": (SmolVlaModuleSpec(num_layers=2, max_state_dim=8, max_action_dim=6), "masked"),
    "pi0": (Pi0ModuleSpec(max_state_dim=8, max_action_dim=6, **GEMMA), "counted"),
    "pi05": (Pi05ModuleSpec(max_action_dim=6, **GEMMA), "counted"),
    "gr00t": (Gr00tModuleSpec(hidden_dim=16, num_heads=2, head_dim=8, num_layers=2, num_future_tokens=2), "counted"),
}
"""Whether padded steps are masked, or count with the last action held, as in the family's reference code."""
HAVE_ELEMENTS = ("smolvla", "pi0", "pi05", "gr00t")
"""Families whose loss before any reduction is a method; the others have their own tests with a known error."""


def padded():
    """One chunk of 10 steps, the last 6 of them padded."""
    valid = torch.zeros(1, 10, dtype=torch.bool)
    valid[0, :4] = True
    return fake_prefix(STEPS, 1), torch.zeros(1, STEPS.state_dim), torch.zeros(1, 10, STEPS.action_dim), valid


def test_every_family_names_its_rule():
    assert set(RULES) == set(component_types("action_modules"))


@pytest.mark.parametrize("name", HAVE_ELEMENTS)
def test_c63_padded_steps_dilute_the_loss_only_where_the_family_counts_them(name):
    spec, rule = RULES[name]
    module = build_action_module(spec, STEPS, seed=0)
    prefix, state, actions, valid = padded()

    def error_of_1(prefix, state, actions, *drawn):
        wide = drawn[0].shape if drawn else actions.shape
        elements = torch.full(wide, 100.0)  # padded dimensions hold what must never count
        elements[..., : STEPS.action_dim] = valid[..., None].to(torch.float32)
        return elements

    module.loss_elements = error_of_1
    loss = module.loss(prefix, state, actions, valid, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(1.0 if rule == "masked" else 0.4)


def test_c63_no_gradient_comes_from_masked_steps_or_padded_dimensions():
    module = build_action_module(RULES["smolvla"][0], STEPS, seed=0)
    prefix, state, actions, valid = padded()
    elements = torch.ones(1, 10, 6, requires_grad=True)
    module.loss_elements = lambda *given: elements
    module.loss(prefix, state, actions, valid, torch.Generator().manual_seed(0)).sum().backward()
    expected = torch.zeros(1, 10, 6)
    expected[0, :4, : STEPS.action_dim] = 1 / (4 * STEPS.action_dim)
    assert torch.allclose(elements.grad, expected)
