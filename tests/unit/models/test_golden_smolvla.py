"""SmolVLA against LeRobot's own numbers, from its checkpoint through our importer."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from joynexus.models.action_modules.flow import euler_times
from joynexus.models.backbone import load_backbone
from joynexus.models.formats.lerobot import open_lerobot
from joynexus.models.formats.streaming import write_tensors
from joynexus.models.images import resize_with_pad
from joynexus.models.policy import build_policy
from joynexus.models.prefix import PrefixFeatures

GOLDEN = Path(__file__).parents[2] / "golden"
RELATIVE = 1e-5
"""Of a tensor's largest number; the producing code itself moves by up to 3e-6 between machines."""
GRADIENTS = {
    "action_in_proj.weight",
    "action_out_proj.weight",
    "action_time_mlp_in.weight",
    "state_proj.weight",
    "state_proj.bias",
    "lm_expert.layers.0.self_attn.q_proj.weight",
    "lm_expert.layers.1.self_attn.k_proj.weight",
    "lm_expert.layers.3.mlp.down_proj.weight",
}


@pytest.fixture(scope="module", params=["smolvla", "smolvla_b"])
def golden(request, tmp_path_factory):
    """The checkpoint as backbone and policy, what LeRobot was given, and what it answered."""
    folder = GOLDEN / request.param
    imported = open_lerobot(folder)
    home = tmp_path_factory.mktemp(request.param)
    write_tensors(home / "model.safetensors", imported.sources("backbone"), metadata={"format": "pt"})
    (home / "config.json").write_text(json.dumps(imported.vlm_config))
    for file in imported.vlm_files:
        shutil.copy(file, home)
    backbone = load_backbone(imported.backbone_spec(home))
    parts = build_policy(imported.policy_spec("vlm"), backbone, seed=0, stats=imported.stats)
    parts.module.load_state_dict(dict(imported.module_tensors()), strict=True)
    given, expected = (load_file(folder / f"{name}.safetensors") for name in ("inputs", "expected"))
    text = json.loads((folder / "inputs.json").read_text())
    return SimpleNamespace(backbone=backbone, parts=parts, given=given, expected=expected, text=text)


def stacked(golden):
    """What the model is given: pixels of three cameras, which of them are there, and the prompt."""
    given = golden.given
    pixels = torch.stack([given[f"model.images.{index}"] for index in range(3)], dim=1)
    image_mask = torch.stack([given[f"model.img_masks.{index}"] for index in range(3)], dim=1)
    return pixels, image_mask, given["model.lang_tokens"], given["model.lang_masks"]


@pytest.fixture(scope="module")
def prefix(golden):
    """Features of images and language, from the pixels."""
    with torch.no_grad():
        hidden, pad, *layers = golden.backbone.encode_pixels(*stacked(golden))
    half = len(layers) // 2
    return PrefixFeatures(
        hidden=hidden, pad=pad, keys=tuple(layers[:half]), values=tuple(layers[half:]), signature="golden"
    )


def inputs(golden):
    """State and actions as the preprocessor leaves them, and what of the actions is no padding."""
    given = golden.given
    return given["batch.observation.state"], given["batch.action"], ~given["batch.action_is_pad"]


def require_close(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= RELATIVE * expected.abs().max()


def test_frames_of_any_size_become_the_pixels_of_the_reference(golden):
    for slot, name in enumerate(("top", "wrist")):
        frames = (golden.given[f"raw.observation.images.{name}"] * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        expected = golden.given[f"model.images.{slot}"]
        require_close(golden.backbone.pixels(frames), expected)
        assert torch.equal(golden.backbone.pixels(frames), resize_with_pad(frames, 64))
    black = torch.zeros(1, 48, 64, 3, dtype=torch.uint8)  # a missing camera: blanked, and masked
    assert torch.equal(golden.backbone.pixels(black).expand(3, -1, -1, -1), golden.given["model.images.2"])


def test_prompts_become_the_tokens_of_the_reference(golden):
    bucket = golden.given["model.lang_tokens"].shape[1]
    tokens, mask = golden.backbone.tokenize(golden.text["task_after_preprocessing"], bucket)
    assert torch.equal(tokens, golden.given["model.lang_tokens"])
    assert torch.equal(mask, golden.given["model.lang_masks"])


def test_states_and_actions_are_normalised_as_in_the_reference(golden):
    given, normalizer = golden.given, golden.parts.normalizer
    require_close(normalizer.state(given["raw.observation.state"]), given["batch.observation.state"])
    require_close(normalizer.actions(given["raw.action"]), given["batch.action"])
    require_close(
        normalizer.raw_actions(golden.expected["sample.actions"]), golden.expected["sample.actions_unnormalised"]
    )


@torch.no_grad()
def test_image_features_and_embeddings(golden):
    pixels, image_mask, tokens, token_mask = stacked(golden)
    features = golden.backbone._connector(golden.backbone._vision(pixel_values=pixels[:, 0]).last_hidden_state)
    require_close(features, golden.expected["prefix.image_features.0"])
    embedded, valid = golden.backbone.embed(pixels, image_mask, tokens, token_mask)
    state = functional.pad(golden.given["batch.observation.state"], (0, 4))
    token = golden.parts.module.state_proj(state)[:, None]
    ours = torch.cat([embedded, token], dim=1)[functional.pad(valid, (0, 1), value=True)]
    theirs = golden.expected["prefix.pad_masks"]
    require_close(ours, golden.expected["prefix.embs"][theirs])
    require_close(golden.given["model.state"], state)


@torch.no_grad()
def test_hidden_states_keys_and_values_of_every_row_that_is_read(golden, prefix):
    """The reference runs images, language and state together; here the state comes behind the cached others."""
    module, backbone = golden.parts.module, golden.backbone
    state = golden.given["model.state"]
    streams: list[torch.Tensor] = []
    layers = (backbone._layers[1].input_layernorm, backbone._norm)
    hooks = [each.register_forward_pre_hook(lambda _, given: streams.append(given[0])) for each in layers]
    backbone.encode_pixels(*stacked(golden))
    grown = backbone.extend(prefix, module.state_proj(state)[:, None])
    for hook in hooks:
        hook.remove()
    seen, theirs = ~grown.pad, golden.expected["prefix.pad_masks"]
    after_first, after_last = (torch.cat([streams[index], streams[index + 2]], dim=1) for index in range(2))
    for found, name in ((after_first, "after_first_layer"), (after_last, "after_last_layer")):
        require_close(found[seen], golden.expected[f"prefix.hidden.{name}"][theirs])
    require_close(grown.hidden[seen], golden.expected["prefix.hidden.final_normed"][theirs])
    for name, layer in (("first", 0), ("last", -1)):
        for kind, tensors in (("key", grown.keys), ("value", grown.values)):
            expected = golden.expected[f"prefix.kv.{name}.{kind}"]
            require_close(tensors[layer].transpose(1, 2)[seen], expected.transpose(1, 2)[theirs])
    positions = (seen.cumsum(dim=1) - 1)[seen]
    assert torch.equal(positions, golden.expected["prefix.position_ids"][theirs])


@torch.no_grad()
def test_suffix_and_velocity(golden, prefix):
    module, expected = golden.parts.module, golden.expected
    require_close(module.suffix(expected["flow.x_t"], golden.given["flow.time"]), expected["suffix.embs"])
    memory = module.remember(prefix, golden.given["batch.observation.state"])
    velocity = module.velocity(expected["flow.x_t"], golden.given["flow.time"], memory)
    require_close(velocity, expected["velocity.train_path"])
    require_close(velocity, expected["velocity.cached_path"])


def test_losses_and_gradients(golden, prefix):
    module, expected = golden.parts.module, golden.expected
    state, actions, valid = inputs(golden)
    elements = module.loss_elements(prefix, state, actions, golden.given["flow.noise"], golden.given["flow.time"])
    require_close(elements.detach(), expected["loss.per_element"])
    rows, weights = module.reduce(elements, valid), module.row_weights(valid)
    require_close(rows.detach(), expected["loss.per_sample"])
    loss = (rows * weights).sum() / weights.sum()
    require_close(loss.detach(), expected["loss.mean"])
    every = torch.ones_like(valid)
    whole = module.reduce(elements, every).mean()
    require_close(whole.detach(), expected["loss.mean_without_action_is_pad"])
    module.zero_grad()
    loss.backward()
    gradients = {name: each.grad for name, each in module.named_parameters()}
    assert gradients.keys() >= GRADIENTS
    assert all(each is not None for each in gradients.values())
    for name in GRADIENTS:
        prefixed = f"vlm_with_expert.{name}" if name.startswith("lm_expert") else name
        require_close(gradients[name], expected[f"grad.model.{prefixed}"])


@torch.no_grad()
def test_sampled_chunk_step_by_step(golden, prefix):
    module, expected = golden.parts.module, golden.expected
    state, noise = golden.given["batch.observation.state"], golden.given["sample.noise"]
    times = torch.tensor(euler_times(10))
    assert torch.equal(times, expected["sample.time_per_step"])
    memory, chunk = module.remember(prefix, state), noise
    for step, time in enumerate(times):
        require_close(chunk, expected["sample.x_t_per_step"][step])
        velocity = module.velocity(chunk, time.expand(3), memory)
        require_close(velocity, expected["sample.v_t_per_step"][step])
        chunk = chunk - 0.1 * velocity
    padded = module.sample(prefix, state, noise)
    require_close(padded, expected["sample.actions_padded"])
    require_close(padded[..., :7], expected["sample.actions"])
