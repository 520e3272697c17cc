"""Every registered backbone and action module keeps its promises, and broken ones are found out."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from joynexus.models.action_module import masked_row_mean
from joynexus.models.action_modules.oft import OftModule
from joynexus.models.backbones.smolvlm import SmolVlmBackbone
from joynexus.models.pauses import pause
from joynexus.specs.action_module import FlowMatchingModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.more_modules import DiffusionModuleSpec, DiscreteTokensModuleSpec
from joynexus.specs.registry import component_types
from joynexus.specs.vla_modules import Gr00tModuleSpec, Pi0ModuleSpec, Pi05ModuleSpec, SmolVlaModuleSpec
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec
from joynexus.testing.action_module_contracts import check_action_module
from joynexus.testing.adapter_contracts import check_adapters
from joynexus.testing.model_contracts import check_backbone
from joynexus.testing.tiny import TINY_HF, TINY_PALIGEMMA, TINY_QWEN2_5_VL, TINY_QWEN3_VL, TINY_SMOLVLM

BACKBONES = {
    "hf": [TINY_HF],
    "lite": [
        LiteBackboneSpec(type="lite", chunk_size=4),
        LiteBackboneSpec(type="lite", chunk_size=2, feature_stride=16),
    ],
    "paligemma": [TINY_PALIGEMMA, TINY_PALIGEMMA.model_copy(update={"dtype": "bfloat16"})],
    "qwen2_5_vl": [TINY_QWEN2_5_VL],
    "qwen3_vl": [TINY_QWEN3_VL, TINY_QWEN3_VL.model_copy(update={"dtype": "bfloat16"})],
    "smolvlm": [TINY_SMOLVLM, TINY_SMOLVLM.model_copy(update={"dtype": "bfloat16"})],
}
"""One small instance, at least, of every registered backbone."""
GEMMA = {"num_layers": 2, "hidden_dim": 16, "mlp_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
GEMMA |= {"max_action_dim": 6, "num_sampling_steps": 3}
MODULES = {
    "oft": OftModuleSpec(type="oft", hidden_dim=32, token_dim=8, max_prefix_tokens=16, num_layers=3),
    "flow_matching": FlowMatchingModuleSpec(
        type="flow_matching", hidden_dim=32, num_layers=2, num_heads=2, num_sampling_steps=3
    ),
    "gaussian": GaussianModuleSpec(type="gaussian", hidden_dim=32, token_dim=8, max_prefix_tokens=16),
    "diffusion": DiffusionModuleSpec(type="diffusion", hidden_dim=32, num_layers=2, num_heads=2, num_sampling_steps=3),
    "discrete_tokens": DiscreteTokensModuleSpec(
        type="discrete_tokens", hidden_dim=32, token_dim=8, max_prefix_tokens=16, slot_dim=8, num_bins=16
    ),
    "smolvla": SmolVlaModuleSpec(type="smolvla", num_layers=2, max_state_dim=8, max_action_dim=6, num_sampling_steps=3),
    "pi0": Pi0ModuleSpec(type="pi0", max_state_dim=8, **GEMMA),
    "pi05": Pi05ModuleSpec(type="pi05", **GEMMA),
    "gr00t": Gr00tModuleSpec(
        type="gr00t", hidden_dim=24, num_heads=2, head_dim=8, num_layers=2, num_future_tokens=2, max_steps=8
    ),
}
"""One small instance of every registered action module."""


def test_every_registered_type_has_an_instance_to_check():
    assert set(BACKBONES) == set(component_types("backbones"))
    assert set(MODULES) == set(component_types("action_modules"))


@pytest.mark.parametrize(
    "spec", [spec for specs in BACKBONES.values() for spec in specs], ids=lambda spec: f"{spec.type}-{spec.dtype}"
)
def test_backbone_keeps_its_promises(spec):
    check_backbone(spec)
    check_adapters(spec)


@pytest.mark.parametrize("spec", MODULES.values(), ids=MODULES)
def test_action_module_keeps_its_promises(spec):
    check_action_module(spec)


class DropoutModule(OftModule):
    def predict(self, prefix, state):
        return nn.functional.dropout(super().predict(prefix, state), training=self.training)


class MultipliedMaskModule(OftModule):
    def loss(self, prefix, state, actions, valid, generator):
        errors = (self.predict(prefix, state) - actions).abs() * valid[..., None]
        return masked_row_mean(errors.nan_to_num(), valid) + errors.sum() * 0


class UntrainedModule(OftModule):
    def __init__(self, spec, dims):
        super().__init__(spec, dims)
        self.unused = nn.Parameter(torch.zeros(1))

    def reset_parameters(self, generator):
        super().reset_parameters(generator)
        nn.init.normal_(self.unused, generator=generator)


class HalfResetModule(OftModule):
    def reset_parameters(self, generator):
        super().reset_parameters(generator)
        self.leave = nn.Linear(self.leave.in_features, self.leave.out_features)


class ForgetfulModule(OftModule):
    def act(self, prefix, state, generators, *, deterministic):
        self._state = state if deterministic else state + 1
        pause()
        return super().act(prefix, self._state, generators, deterministic=deterministic)


class PoolingModule(OftModule):
    def predict(self, prefix, state):
        return super().predict(prefix, state) + prefix.hidden.mean()


@pytest.mark.parametrize(
    ("module", "promise"),
    [
        (DropoutModule, "global generator"),
        (MultipliedMaskModule, "NaN at a padded step"),
        (UntrainedModule, "no gradient reaches"),
        (HalfResetModule, "global generator"),
        (PoolingModule, "padded prefix positions"),
        (ForgetfulModule, "in the middle of it"),
    ],
)
def test_broken_action_modules_are_found_out(module, promise):
    class Spec(OftModuleSpec):
        implementation: ClassVar[str] = f"{__name__}:{module.__name__}"

    with pytest.raises(AssertionError, match=promise):
        check_action_module(Spec(type="oft", hidden_dim=32, token_dim=8, max_prefix_tokens=16))


class WakefulBackbone(SmolVlmBackbone):
    def train(self, mode=True):
        return nn.Module.train(self, mode)


class NeighbourlyBackbone(SmolVlmBackbone):
    def _encode_chunk(self, rows):
        hidden, *others = super()._encode_chunk(rows)
        return (hidden + 1e-4 * hidden.mean(), *others)


class PeekingBackbone(SmolVlmBackbone):
    def _encode_chunk(self, rows):
        hidden, *others = super()._encode_chunk(rows)
        return (hidden + rows[0].float().mean(dim=(1, 2, 3, 4))[:, None, None], *others)


class LearningBackbone(SmolVlmBackbone):
    def _encode_chunk(self, rows):
        self._norm.weight.mul_(1.001)
        return super()._encode_chunk(rows)


@pytest.mark.parametrize(
    ("backbone", "promise"),
    [
        (WakefulBackbone, "wakes"),
        (NeighbourlyBackbone, "depend on"),
        (PeekingBackbone, "behind its padding"),
        (LearningBackbone, "depend on|changes its weights"),
    ],
)
def test_broken_backbones_are_found_out(backbone, promise):
    class Spec(SmolVlmBackboneSpec):
        implementation: ClassVar[str] = f"{__name__}:{backbone.__name__}"

    with pytest.raises(AssertionError, match=promise):
        check_backbone(Spec(**TINY_SMOLVLM.model_dump()))
