"""StarVLA's QwenOFT and QwenGR00T against its own code, from its checkpoints: see the README of each golden folder.

Every stage is compared: pixels, prompts, token ids, the vision tower, the language model, the head, loss, gradients and
each step of the sampling. The two cameras have frames of two sizes, so the rows are encoded camera by camera.
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

from joynexus.models.action_module import ActionModule
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones.qwen_vision import to_patches
from joynexus.models.backbones.qwen_vl import CameraTokens, QwenVlBackbone
from joynexus.models.formats.starvla import StarVlaOptions, open_starvla
from joynexus.models.policy import build_policy, tokenize
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.prompts import render_prompts
from joynexus.specs.tenant import PolicySpec

GOLDEN = Path(__file__).parents[2] / "golden"
TOLERANCES = {"oft": 1e-5, "gr00t": 2e-5}
"""Of the largest number of a tensor."""
ROWS = 3
HORIZON = 6
IMAGE_ID = 7


@dataclass
class Golden:
    family: str
    backbone: QwenVlBackbone
    policy: PolicySpec
    module: ActionModule
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    json: dict[str, Any]

    @property
    def state(self) -> torch.Tensor:
        return self.inputs["raw.state"][:, 0]

    @property
    def actions(self) -> torch.Tensor:
        return self.inputs["raw.action"][:, -HORIZON:]

    @cached_property
    @torch.no_grad()
    def cameras(self) -> list[CameraTokens]:
        order = self.json["inputs"]["camera_order"]
        return [self.backbone.look(self.backbone.pixels(self.inputs[f"raw.image.{name}"])) for name in order]

    @cached_property
    def language(self) -> tuple[torch.Tensor, torch.Tensor]:
        spec, states = self.policy.observation, self.state.numpy()
        return tokenize(self.backbone, spec, self.json["inputs"]["lang"], states)

    @cached_property
    @torch.no_grad()
    def prefix(self) -> PrefixFeatures:
        seen = torch.ones(ROWS, len(self.cameras), dtype=torch.bool)
        hidden, pad, *states = self.backbone.encode(self.cameras, seen, *self.language)
        keys, values = (tuple(part) for part in (states[: len(states) // 2], states[len(states) // 2 :]))
        return PrefixFeatures(hidden=hidden, pad=pad, keys=keys, values=values, signature="golden")

    def check(self, name, found):
        self.compare(name, found, self.expected[name])

    def check_real(self, name, found):
        """Compare the real positions of each row: padding stands in other places."""
        real = self.inputs["model.attention_mask"].bool()
        for row in range(ROWS):
            self.compare(name, found[row, ~self.prefix.pad[row]], self.expected[name][row, real[row]])

    def compare(self, name, found, expected):
        assert found.shape == expected.shape, name
        worst = ((found - expected).abs().max() / expected.abs().max()).item()
        assert worst <= TOLERANCES[self.family], f"{name}: {worst:.2e}"

    def check_gradients(self):
        parameters = dict(self.module.named_parameters())
        named = {
            name: name.removeprefix("grad.action_model.") for name in self.expected if "grad.action_model." in name
        }
        assert named
        for name, parameter in named.items():
            self.check(name, parameters[parameter].grad)
        norms = self.json["expected"]["grad_l2_norms"]
        for name, parameter in parameters.items():
            assert parameter.grad.norm().item() == pytest.approx(norms[f"action_model.{name}"], rel=2e-5, abs=2e-6), (
                name
            )


def imported(family, place):
    """Take the checkpoint apart with our importer, and build what it describes."""
    found = open_starvla(GOLDEN / f"starvla_{family}", options=StarVlaOptions(cameras=("top", "wrist")))
    save_file(dict(found.backbone_tensors()), place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(found.vlm_config))
    for file in found.vlm_files:
        shutil.copy(file, place)
    backbone, policy = load_backbone(found.backbone_spec(place)), found.policy_spec("qwen")
    module = build_policy(policy, backbone, seed=0, stats=found.stats).module
    module.load_state_dict(dict(found.module_tensors()), strict=True)
    return Golden(
        family=family,
        backbone=backbone,
        policy=policy,
        module=module,
        inputs=load_file(GOLDEN / f"starvla_{family}" / "inputs.safetensors"),
        expected=load_file(GOLDEN / f"starvla_{family}" / "expected.safetensors"),
        json={
            name: json.loads((GOLDEN / f"starvla_{family}" / f"{name}.json").read_text())
            for name in ("inputs", "expected")
        },
    )


@pytest.fixture(scope="module")
def oft(tmp_path_factory):
    return imported("oft", tmp_path_factory.mktemp("oft"))


@pytest.fixture(scope="module")
def gr00t(tmp_path_factory):
    return imported("gr00t", tmp_path_factory.mktemp("gr00t"))


@pytest.fixture(params=TOLERANCES)
def golden(request):
    return request.getfixturevalue(request.param)


def test_golden_frames_become_the_reference_s_patches(golden):
    patches = []
    for name in golden.json["inputs"]["camera_order"]:
        pixels = golden.backbone.pixels(golden.inputs[f"raw.image.{name}"])
        patches.append(to_patches(pixels, side=16, merge=2, frames=2))
    by_row = torch.cat([each[row] for row in range(ROWS) for each in patches])
    assert (by_row - golden.inputs["model.pixel_values"]).abs().max() <= 1e-6


def test_golden_prompts_and_ids_are_the_reference_s(golden):
    tokens, mask = golden.language
    ids, real = golden.inputs["model.input_ids"], golden.inputs["model.attention_mask"].bool()
    prompts = render_prompts(golden.policy.observation, golden.json["inputs"]["lang"], golden.state.numpy())
    given = golden.json["inputs"]["instruction_given_to_the_processor_before_CoT_prompt"]
    assert prompts == [f"Your task is {each}." for each in given]
    start, end = golden.backbone._around
    lead = [*golden.backbone._header, start, *[IMAGE_ID] * 4, end, start, IMAGE_ID, end]
    for row in range(ROWS):
        assert [*lead, *tokens[row, mask[row]].tolist()] == ids[row, real[row]].tolist()


def test_golden_vision_tower(golden):
    def by_row(part):
        return torch.cat([part(each)[row] for row in range(ROWS) for each in golden.cameras])

    golden.check("vlm.image_features", by_row(lambda each: each.tokens))
    for layer in range(2):
        golden.check(f"vlm.deepstack_features.{layer}", by_row(lambda each, layer=layer: each.taps[layer]))


@torch.no_grad()
def test_golden_language_model(golden):
    backbone, (tokens, mask) = golden.backbone, golden.language
    seen = torch.ones(ROWS, len(golden.cameras), dtype=torch.bool)
    places = backbone.positions([each.grid for each in golden.cameras], seen, mask)
    real = golden.inputs["model.attention_mask"].bool()
    for row in range(ROWS):
        expected = golden.expected["vlm.position_ids"][:, row, real[row]]
        assert torch.equal(places[:, row, ~golden.prefix.pad[row]], expected)
    golden.check_real("vlm.input_embeds", backbone.embed(golden.cameras, tokens))
    golden.check_real("vlm.hidden_states_last", golden.prefix.hidden)
    golden.check_real("vlm.post_final_norm", backbone._norm(golden.prefix.hidden))


def test_golden_oft_head_loss_and_gradients(oft):
    oft.check("head.action_queries", oft.module.queries(oft.prefix))
    oft.check("head.pred_actions", oft.module.predict(oft.prefix, oft.state))
    elements = oft.module.loss_elements(oft.prefix, oft.state, oft.actions)
    oft.check("loss.per_element", elements.detach())
    oft.check("loss.mean", elements.mean().detach())
    valid = torch.ones(ROWS, HORIZON, dtype=torch.bool)
    loss = oft.module.loss(oft.prefix, oft.state, oft.actions, valid, torch.Generator()).mean()
    oft.check("loss.mean", loss.detach())
    oft.module.zero_grad()
    loss.backward()
    oft.check_gradients()


def test_golden_oft_sample(oft):
    generators = [torch.Generator()] * ROWS
    oft.check("sample.actions", oft.module.act(oft.prefix, oft.state, generators, deterministic=True).actions)


def test_golden_gr00t_velocity(gr00t):
    module, noisy, time = gr00t.module, gr00t.expected["flow.x_t"], gr00t.inputs["flow.time"]
    repeats = len(time) // ROWS
    assert repeats == gr00t.policy.action_module.repeated_diffusion_steps == 2
    bucket, state = gr00t.expected["flow.t_discretized"], gr00t.state.repeat(repeats, 1)
    with torch.no_grad():
        memory, mask = module.remember(gr00t.prefix, repeats)
        tokens = module.tokens(noisy, bucket, state)
        gr00t.check("head.sa_embs", tokens)
        gr00t.check("head.dit_output", module.model(tokens, bucket, memory, mask))
        gr00t.check("velocity.pred", module.velocity(noisy, time, state, memory, mask))


def test_golden_gr00t_loss_and_gradients(gr00t):
    flow = gr00t.inputs["flow.noise"], gr00t.inputs["flow.time"]
    elements = gr00t.module.loss_elements(gr00t.prefix, gr00t.state, gr00t.actions, *flow)
    gr00t.check("loss.per_element", elements.detach())
    gr00t.check("loss.mean", elements.mean().detach())
    gr00t.module.zero_grad()
    elements.mean().backward()
    gr00t.check_gradients()


@torch.no_grad()
def test_golden_gr00t_sample_step_by_step(gr00t):
    module, chunk = gr00t.module, gr00t.inputs["sample.noise"]
    memory, mask = module.remember(gr00t.prefix)
    steps = len(gr00t.expected["sample.v_t_per_step"])
    for index in range(steps):
        gr00t.compare("sample.x_t", chunk, gr00t.expected["sample.x_t_per_step"][index])
        velocity = module.velocity(chunk, torch.full((ROWS,), index / steps), gr00t.state, memory, mask)
        gr00t.compare("sample.v_t", velocity, gr00t.expected["sample.v_t_per_step"][index])
        chunk = chunk + velocity / steps
    gr00t.check("sample.actions", module.sample(gr00t.prefix, gr00t.state, gr00t.inputs["sample.noise"]))
