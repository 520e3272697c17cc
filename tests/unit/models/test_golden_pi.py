"""π0 and π0.5 against LeRobot's own code, from its checkpoints: see ``tests/golden/README.md`` of each folder.

Both key layouts are read. Every stage is compared: pixels, prompts, tokens, prefix, suffix, velocity, loss,
gradients, and each step of the sampling.
"""

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from joynexus.models.action_modules.flow_matching import hold_last_valid
from joynexus.models.action_modules.gemma_expert import remember
from joynexus.models.action_modules.gemma_flow import GemmaFlowModule
from joynexus.models.action_modules.pi0 import Pi0Module
from joynexus.models.action_modules.pi05 import Pi05Module
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones.paligemma import PaliGemmaBackbone
from joynexus.models.formats.lerobot import open_lerobot
from joynexus.models.policy import PolicyParts, build_policy, tokenize
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.prompts import render_prompts
from joynexus.specs.tenant import PolicySpec

GOLDEN = Path(__file__).parents[2] / "golden"
TOLERANCE = 1e-5
"""Of the largest number of a tensor."""
CAMERAS = 3


@dataclass
class Golden:
    backbone: PaliGemmaBackbone
    policy: PolicySpec
    parts: PolicyParts
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    json: dict[str, Any]

    @property
    def module(self) -> GemmaFlowModule:
        return self.parts.module

    @property
    def seen(self):
        """Pixels and masks of all cameras, tokens and their mask."""
        images = [self.inputs[f"model.images.{camera}"] for camera in range(CAMERAS)]
        masks = [self.inputs[f"model.img_masks.{camera}"] for camera in range(CAMERAS)]
        language = self.inputs["model.lang_tokens"], self.inputs["model.lang_masks"]
        return torch.stack(images, dim=1), torch.stack(masks, dim=1), *language

    @cached_property
    @torch.no_grad()
    def prefix(self) -> PrefixFeatures:
        hidden, pad, *states = self.backbone.encode_pixels(*self.seen)
        keys, values = (tuple(part) for part in (states[: len(states) // 2], states[len(states) // 2 :]))
        return PrefixFeatures(hidden=hidden, pad=pad, keys=keys, values=values, signature="golden")

    def check(self, name, found, rows=None):
        """Compare with the golden tensor of that name, only where ``rows`` is True if it is given."""
        expected = self.expected[name]
        assert found.shape == expected.shape, name
        if rows is not None:
            found, expected = found[rows], expected[rows]
        worst = ((found - expected).abs().max() / expected.abs().max()).item()
        assert worst <= TOLERANCE, f"{name}: {worst:.2e}"


def lerobot_folder(name, place):
    """The checkpoint as people have it; the other layout's has the same files beside its weights."""
    family = name.split("-")[0]
    shutil.copytree(GOLDEN / family, place, ignore=shutil.ignore_patterns("checkpoint_*", "inputs.*", "expected.*"))
    other = GOLDEN / family / "checkpoint_without_prefix" / "model.safetensors"
    if name != family and other.exists():
        shutil.copy(other, place)
    elif name != family:
        save_file(without_prefix(load_file(place / "model.safetensors")), place / "model.safetensors")
    return place


def without_prefix(tensors):
    """The other layout, as π0's golden folder has it: no leading ``model.``, the embedding under the head's name."""
    bare = {name.removeprefix("model."): each for name, each in tensors.items()}
    (embedding,) = (name for name in bare if name.endswith("embed_tokens.weight"))
    return bare | {"paligemma_with_expert.paligemma.lm_head.weight": bare.pop(embedding)}


@pytest.fixture(scope="module", params=["pi0", "pi0-without-prefix", "pi05", "pi05-without-prefix"])
def golden(request, tmp_path_factory):
    place, family = tmp_path_factory.mktemp(request.param), request.param.split("-")[0]
    imported = open_lerobot(lerobot_folder(request.param, place / "checkpoint"))
    vlm = place / "vlm"
    vlm.mkdir()
    save_file(dict(imported.backbone_tensors()), vlm / "model.safetensors", metadata={"format": "pt"})
    (vlm / "config.json").write_text(json.dumps(imported.vlm_config))
    for file in imported.vlm_files:
        shutil.copy(file, vlm)
    backbone, policy = load_backbone(imported.backbone_spec(vlm)), imported.policy_spec("paligemma")
    parts = build_policy(policy, backbone, seed=0, stats=imported.stats)
    parts.module.load_state_dict(dict(imported.module_tensors()), strict=True)
    return Golden(
        backbone=backbone,
        policy=policy,
        parts=parts,
        inputs=load_file(GOLDEN / family / "inputs.safetensors"),
        expected=load_file(GOLDEN / family / "expected.safetensors"),
        json={name: json.loads((GOLDEN / family / f"{name}.json").read_text()) for name in ("inputs", "expected")},
    )


def state_of(golden):
    return golden.parts.normalizer.state(golden.inputs["raw.observation.state"])


def actions_of(golden):
    return golden.parts.normalizer.actions(golden.inputs["raw.action"])


def elements(golden):
    flow = (golden.inputs["flow.noise"], golden.inputs["flow.time"])
    return golden.module.loss_elements(golden.prefix, state_of(golden), actions_of(golden), *flow)


def test_golden_frames_become_the_reference_s_pixels(golden):
    for index, camera in enumerate(("base", "wrist")):
        frames = golden.inputs[f"raw.observation.images.{camera}"].mul(255).round().to(torch.uint8)
        pixels = golden.backbone.pixels(frames.permute(0, 2, 3, 1))
        assert (pixels - golden.inputs[f"model.images.{index}"]).abs().max() <= 1e-6


def test_golden_prompts_and_tokens_are_the_reference_s(golden):
    tasks, states = golden.json["inputs"]["task"], state_of(golden).numpy()
    prompts = render_prompts(golden.policy.observation, tasks, states)
    assert prompts == golden.json["inputs"]["task_after_preprocessing"]
    tokens, mask = tokenize(golden.backbone, golden.policy.observation, tasks, states)
    assert torch.equal(mask, golden.inputs["model.lang_masks"])
    assert torch.equal(tokens[mask], golden.inputs["model.lang_tokens"][mask])


def test_golden_prefix(golden):
    embedded, seen = golden.backbone.embed(*golden.seen)
    features, expected = golden.prefix, golden.expected
    assert torch.equal(seen, expected["prefix.pad_masks"])
    assert torch.equal(~features.pad, seen)
    golden.check("prefix.embs", embedded, seen)
    golden.check("prefix.hidden.final_normed", features.hidden, seen)
    heads = seen[:, None].expand(-1, features.keys[0].shape[1], -1)
    for name, layer in (("first", 0), ("last", -1)):
        golden.check(f"prefix.kv.{name}.key", features.keys[layer], heads)
        golden.check(f"prefix.kv.{name}.value", features.values[layer], heads)


@torch.no_grad()
def test_golden_suffix_and_velocity(golden):
    noisy, time, module = golden.expected["flow.x_t"], golden.inputs["flow.time"], golden.module
    if isinstance(module, Pi0Module):
        golden.check("suffix.embs", module.suffix(noisy, time, state_of(golden)))
    if isinstance(module, Pi05Module):
        golden.check("suffix.embs", module.action_in_proj(noisy))
        golden.check("suffix.adarms_cond", module.condition(time))
    velocity = module.velocity(noisy, time, state_of(golden), remember(golden.prefix))
    golden.check("velocity.train_path", velocity)
    golden.check("velocity.cached_path", velocity)


@torch.no_grad()
def test_golden_loss_counts_every_step_and_the_robot_s_dimensions(golden):
    loss = elements(golden)
    golden.check("loss.per_element", loss)
    rows = loss[..., : golden.policy.action.dim].mean(dim=(1, 2))
    golden.check("loss.per_sample", rows)
    golden.check("loss.mean", rows.mean())
    valid = ~golden.inputs["batch.action_is_pad"]
    assert not valid.all()
    held = hold_last_valid(actions_of(golden), valid)
    assert torch.equal(held, actions_of(golden)), "steps past the end hold the last action in both"


def test_the_product_s_loss_is_the_family_s(golden):
    """With the noise and the time that the generator gives, padded steps included, whatever they hold."""
    actions, valid = actions_of(golden), ~golden.inputs["batch.action_is_pad"]
    spoilt = torch.where(valid[..., None], actions, torch.tensor(torch.nan))
    loss = golden.module.loss(golden.prefix, state_of(golden), spoilt, valid, torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    noise = torch.randn(golden.inputs["flow.noise"].shape, generator=draws)
    time = torch.rand(len(noise), generator=draws) ** (1 / 1.5) * 0.999 + 0.001
    expected = golden.module.loss_elements(golden.prefix, state_of(golden), actions, noise, time)
    assert torch.allclose(loss, expected[..., : golden.policy.action.dim].mean(dim=(1, 2)))


def test_golden_gradients_of_every_trained_parameter(golden):
    golden.module.zero_grad()
    elements(golden)[..., : golden.policy.action.dim].mean().backward()
    norms = golden.json["expected"]["grad_l2_norms"]
    trained = {name.removeprefix("model.").removeprefix("paligemma_with_expert."): name for name in norms}
    found = {name: each.grad for name, each in golden.module.named_parameters()}
    assert set(found) == set(trained)
    for name, gradient in found.items():
        assert gradient.norm().item() == pytest.approx(norms[trained[name]], rel=TOLERANCE), name
        if f"grad.{trained[name]}" in golden.expected:
            golden.check(f"grad.{trained[name]}", gradient)
    assert not any(each.requires_grad for each in golden.backbone.parameters())


def test_golden_sample_step_by_step(golden, monkeypatch):
    module, seen = golden.module, []

    def recording(noisy, time, state, memory):
        seen.append((noisy, time[0], type(module).velocity(module, noisy, time, state, memory)))
        return seen[-1][2]

    monkeypatch.setattr(module, "velocity", recording)
    chunk = module.sample(golden.prefix, state_of(golden), golden.inputs["sample.noise"])
    golden.check("sample.x_t_per_step", torch.stack([*(each[0] for each in seen), chunk]))
    golden.check("sample.v_t_per_step", torch.stack([each[2] for each in seen]))
    assert torch.equal(torch.stack([each[1] for each in seen]), golden.expected["sample.time_per_step"])
    golden.check("sample.actions_padded", chunk)
    own = chunk[..., : golden.policy.action.dim]
    golden.check("sample.actions", own)
    golden.check("sample.actions_unnormalised", golden.parts.normalizer.raw_actions(own))
