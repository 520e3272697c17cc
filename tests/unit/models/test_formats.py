"""Checkpoints of other projects: read safely, refused with a reason, mapped without losing a tensor."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.expected import check_tensors
from joynexus.models.formats.lerobot import open_lerobot
from joynexus.models.formats.lerobot_stats import write_lerobot_stats
from joynexus.models.formats.paligemma_sizes import EMBEDDING, PATCHES, POSITIONS, paligemma_config
from joynexus.models.formats.starvla import StarVlaOptions, open_starvla
from joynexus.models.formats.streaming import TensorFile, array_source, file_sha256, tensor_source, write_tensors

GOLDEN = Path(__file__).parents[2] / "golden"
LEROBOT = ("smolvla", "smolvla_b", "pi0", "pi05")
STARVLA = ("starvla_oft", "starvla_gr00t")


def copied(name: str, folder: Path) -> Path:
    """A checkpoint to change: its files are copied when they are written to."""
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("expected*", "inputs*", "checkpoint_*"))
    return folder


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


# ---- the safetensors reader and writer


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4), st.sampled_from(["F32", "BF16", "I64", "BOOL"]))
def test_what_is_written_the_reference_reads_and_back(shapes, dtype):
    made = {f"t{index}": torch.randint(0, 2, shape) for index, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own"
        digest = write_tensors(path, {name: tensor_source(each, dtype) for name, each in made.items()})
        assert digest == file_sha256(path)
        reference, own = tensors_of(path), TensorFile(path)
        assert list(own.infos) == list(made)
        assert {*reference} == {*made}
        assert all(torch.equal(own.tensor(name), reference[name]) for name in made)
        theirs = Path(folder) / "theirs"
        safetensors.torch.save_file(reference, theirs, metadata={"format": "pt"})
        again = TensorFile(theirs)
        assert all(torch.equal(again.tensor(name), reference[name]) for name in made)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80), st.one_of(st.none(), st.integers(0, 90)))
def test_no_bytes_bring_the_reader_down(content, length):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(content if length is None else length.to_bytes(8, "little") + b'{"a":' + content)
        try:
            TensorFile(path)
        except CheckpointError as error:
            assert "Copy it again." in str(error) or "Known types" in str(error)  # noqa: PT017


def written(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "no JSON object"),
        (b"[]", b"", "no JSON object"),
        (b'{"a":{},"a":{}}', b"", "a key twice"),
        ({"a": {"dtype": "F32"}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": entry(0, 8, (-2,))}, bytes(8), r"has shape \[-2\]"),
        ({"a": entry(0, 8, dtype="F8_E4M3")}, bytes(8), "is F8_E4M3. Known types"),
        ({"a": entry(0, 12)}, bytes(12), "bytes 0 to 12, its place is 0 to 8"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "bytes 4 to 12"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), "bytes 12 to 20"),
        ({"a": entry(0, 8)}, bytes(4), "8 bytes, the file 4"),
        ({"a": entry(0, 8)}, bytes(12), "8 bytes, the file 12"),
        ({"a": entry(0, 1 << 62, (1 << 60,))}, bytes(8), "4611686018427387904 bytes, the file 8"),
    ],
)
def test_a_damaged_file_is_refused_before_a_tensor_is_read(header, data, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        TensorFile(written(tmp_path / "x.safetensors", header, data))


def test_a_header_longer_than_the_file_is_not_allocated(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="its header would have 4611686018427387904 bytes"):
        TensorFile(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="its header would have"):
        TensorFile(path)


def test_a_source_that_gives_too_little_is_no_file(tmp_path):
    short = array_source(np.zeros(4, dtype=np.float32))
    lying = type(short)(info=type(short.info)(dtype="F32", shape=(5,)), blocks=short.blocks)
    with pytest.raises(CheckpointError, match="16 bytes, need 20"):
        write_tensors(tmp_path / "x", {"a": lying})


# ---- every tensor has a place


@pytest.mark.parametrize("name", LEROBOT)
def test_a_lerobot_policy_is_taken_whole(name):
    found = open_lerobot(GOLDEN / name)
    assert [*found.places] == [*found.tensors.infos]
    named = [(place.part, place.name) for place in found.places.values()]
    assert len(set(named)) == len(named)
    assert all(original.endswith("lm_head.weight") for original in found.names("kept").values())
    state = dict(found.module_tensors())
    original = "model.action_in_proj.weight"
    assert torch.equal(state["action_in_proj.weight"], tensors_of(GOLDEN / name / "model.safetensors")[original])
    check_tensors(found)


@pytest.mark.parametrize("name", STARVLA)
def test_a_starvla_run_is_taken_whole(name):
    found = open_starvla(GOLDEN / name)
    assert [*found.places] == [*found.tensors.infos]
    assert [*found.names("kept").values()] == ["qwen_vl_interface.model.lm_head.weight"]
    assert found.layout["robot"] == "tiny_arm"
    check_tensors(found)


def test_pi0_in_its_other_layout_is_the_same_policy(tmp_path):
    folder = copied("pi0", tmp_path / "c")
    shutil.copy(GOLDEN / "pi0" / "checkpoint_without_prefix" / "model.safetensors", folder)
    first, second = open_lerobot(GOLDEN / "pi0"), open_lerobot(folder)
    check_tensors(second)
    assert second.policy == first.policy
    for part in ("module_tensors", "backbone_tensors"):
        one, other = dict(getattr(first, part)()), dict(getattr(second, part)())
        assert {*one} == {*other}
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_released_pi0_needs_no_configuration_of_its_model():
    shapes = {EMBEDDING: (257152, 2048), PATCHES: (1152, 3, 14, 14), POSITIONS: (256, 1152)}
    config = paligemma_config(shapes, Path("model.safetensors"))
    assert config["vision_config"]["image_size"] == 224
    assert config["text_config"]["num_hidden_layers"] == 18
    with pytest.raises(CheckpointError, match="is 64 wide with a vision tower of 1152"):
        paligemma_config(shapes | {EMBEDDING: (257152, 64)}, Path("model.safetensors"))


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("smolvla", {"type": "act"}, r"config.json: type 'act': not supported. Known: smolvla, pi0, pi05"),
        ("smolvla", {"attention_mode": "self_attn"}, "config.json: attention_mode 'self_attn': not supported"),
        ("smolvla", {"n_obs_steps": 2}, "config.json: n_obs_steps 2"),
        ("smolvla", {"use_delta_joint_actions_aloha": True}, "use_delta_joint_actions_aloha True"),
        ("smolvla", {"resize_imgs_with_padding": [96, 96]}, r"resize_imgs_with_padding \[96, 96\]"),
        ("smolvla", {"num_vlm_layers": 3}, "num_vlm_layers is 3, model.safetensors has 4 layers"),
        ("pi0", {"use_relative_actions": True}, "config.json: use_relative_actions True: not supported, need False"),
        ("pi0", {"rtc_config": {"enabled": True}}, "config.json: rtc_config"),
        ("pi0", {"time_sampling_beta_alpha": 1.0}, "config.json: time_sampling_beta_alpha 1.0"),
        ("pi0", {"image_resolution": [224, 224]}, r"image_resolution \[224, 224\]"),
        ("pi05", {"normalization_mapping": {"STATE": "QUANTILE10"}}, "normalization_mapping.STATE 'QUANTILE10'"),
        ("pi05", {"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "normalization_mapping.VISUAL 'MEAN_STD'"),
        ("pi05", {"chunk_size": "six"}, "chunk_size is 'six', need a whole number"),
        ("pi05", {"output_features": {}}, "output_features"),
        ("pi05", {"input_features": {"observation.environment_state": {"type": "ENV", "shape": [3]}}}, "need cameras"),
    ],
)
def test_an_option_that_is_not_supported_is_named_with_its_file(name, fields, message, tmp_path):
    folder = copied(name, tmp_path / "c")
    change(folder / "config.json", **fields)
    with pytest.raises((SpecError, CheckpointError), match=message):
        open_lerobot(folder)


def test_steps_of_a_processor_that_nobody_knows_are_refused(tmp_path):
    folder = copied("pi0", tmp_path / "c")
    path = folder / "policy_preprocessor.json"
    content = json.loads(path.read_text())
    relative = next(each for each in content["steps"] if each["registry_name"] == "relative_actions_processor")
    relative["config"]["enabled"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match=r"policy_preprocessor.json: steps\[5\].config.enabled: relative actions"):
        open_lerobot(folder)
    relative["registry_name"] = "my_own"
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match=r"policy_preprocessor.json: steps\[5\] 'my_own': not supported"):
        open_lerobot(folder)


def test_statistics_are_read_from_the_file_that_the_processor_names(tmp_path):
    folder = copied("pi05", tmp_path / "c")
    path = folder / "policy_preprocessor.json"
    content = json.loads(path.read_text())
    step = next(each for each in content["steps"] if "state_file" in each)
    (folder / step["state_file"]).rename(folder / "policy_preprocessor_step_9_normalizer_processor.safetensors")
    step["state_file"] = "policy_preprocessor_step_9_normalizer_processor.safetensors"
    path.write_text(json.dumps(content))
    assert open_lerobot(folder).stats is not None
    for name in ("missing.safetensors", "../c/config.json"):
        step["state_file"] = name
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"state_file '{name}': no such file beside it"):
            open_lerobot(folder)


def test_statistics_that_the_mode_needs_have_to_be_there(tmp_path):
    folder = copied("pi05", tmp_path / "c")
    (path,) = folder.glob("policy_preprocessor_*.safetensors")
    kept = {name: each for name, each in tensors_of(path).items() if name != "action.q01"}
    safetensors.torch.save_file(kept, path)
    with pytest.raises(CheckpointError, match=r"action lacks \['q01'\], which normalisation 'quantile' needs"):
        open_lerobot(folder)


def test_tensors_that_do_not_fit_are_all_named_in_one_error(tmp_path):
    folder = copied("smolvla", tmp_path / "c")
    path = folder / "model.safetensors"
    tensors = tensors_of(path)
    for layer in range(4):
        del tensors[f"model.vlm_with_expert.lm_expert.layers.{layer}.mlp.up_proj.weight"]
    del tensors["model.action_in_proj.bias"]
    tensors["model.other.weight"] = torch.zeros(1)
    tensors["model.state_proj.bias"] = torch.zeros(65)
    tensors["model.vlm_with_expert.vlm.model.text_model.norm.weight"] = torch.zeros(63)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(open_lerobot(folder))
    (message,) = str(caught.value).splitlines()
    assert "5 missing: " in message
    assert "and 1 more" in message
    assert "'model.other.weight'" in message
    assert "'model.state_proj.bias' is [65], need [64]" in message
    assert "'model.vlm_with_expert.vlm.model.text_model.norm.weight' is [63], need [64]" in message


def test_a_tensor_of_nobody_is_refused(tmp_path):
    folder = copied("starvla_oft", tmp_path / "c")
    (path,) = (folder / "checkpoints").iterdir()
    safetensors.torch.save_file({**tensors_of(path), "dino.weight": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"1 tensors that nobody knows: dino.weight"):
        open_starvla(folder)


def test_a_model_that_is_not_here_is_asked_for(tmp_path):
    folder = copied("smolvla", tmp_path / "c")
    shutil.move(folder / "vlm", tmp_path / "vlm")
    change(folder / "config.json", vlm_model_name="nobody/has-this")
    with pytest.raises(CheckpointError, match=r"names the vision-language model 'nobody/has-this'.* Give --vlm FOLDER"):
        open_lerobot(folder)
    assert open_lerobot(folder, vlm=tmp_path / "vlm").vlm_config["model_type"] == "smolvlm"


# ---- StarVLA


def test_masked_dimensions_are_left_as_they_are():
    stats = open_starvla(GOLDEN / "starvla_oft").stats
    assert stats is not None
    assert stats.action is not None
    last = {name: getattr(stats.action, name)[-1] for name in ("mean", "std", "minimum", "maximum", "q01", "q99")}
    assert last == {"mean": 0, "std": 1, "minimum": -1, "maximum": 1, "q01": -1, "q99": 1}
    assert stats.action.minimum[0] == np.float32(-1.075847864151001)


def test_what_a_run_does_not_say_can_be_said(tmp_path):
    options = StarVlaOptions(cameras=("top", "wrist"), normalization="quantile")
    found = open_starvla(GOLDEN / "starvla_gr00t", options=options).policy_spec("b")
    assert found.observation.cameras == ("top", "wrist")
    assert found.action.normalization == "quantile"
    folder = copied("starvla_gr00t", tmp_path / "c")
    path = folder / "dataset_statistics.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "other_arm": content["tiny_arm"]}))
    with pytest.raises(CheckpointError, match=r"statistics of 2 robots: other_arm, tiny_arm. Name one with --robot"):
        open_starvla(folder)
    assert open_starvla(folder, options=StarVlaOptions(robot="other_arm")).layout["robot"] == "other_arm"


def test_the_prompt_of_oft_holds_state_and_action_tokens():
    text = json.loads((GOLDEN / "starvla_oft" / "inputs.json").read_text())
    found = open_starvla(GOLDEN / "starvla_oft").policy_spec("b")
    filled = found.observation.prompt_template.replace("{instruction}", text["lang"][1])
    filled = filled.replace("{state}", "37 38 23 51 109 72 227 191")
    assert filled + "<|im_end|>\n<|im_start|>assistant\n" in text["decoded_input_ids"][1]


def test_pickles_and_several_checkpoints_are_refused(tmp_path):
    folder = copied("starvla_oft", tmp_path / "c")
    (path,) = (folder / "checkpoints").iterdir()
    shutil.copy(path, path.with_name("steps_2_model.safetensors"))
    with pytest.raises(CheckpointError, match=r"2 checkpoints: .* Give the path of one"):
        open_starvla(folder)
    assert open_starvla(path).layout["weights"] == "checkpoints/steps_1_model.safetensors"
    for each in (folder / "checkpoints").iterdir():
        each.rename(each.with_suffix(".pt"))
    with pytest.raises(CheckpointError, match="whose format can run code"):
        open_starvla(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: QwenGR00T", "name: QwenPI", "config.yaml: framework.name 'QwenPI': not supported"),
        ("norm_type: ada_norm", "norm_type: layer_norm", "diffusion_model_cfg.norm_type 'layer_norm'"),
        ("interleave_self_attention: true", "interleave_self_attention: false", "interleave_self_attention False"),
        ("num_attention_heads: 4", "num_attention_heads: 8", "8 heads of 16 are not the width 64"),
        ("{instruction}", "{task}", "CoT_prompt 'Your task is {task}.': lacks"),
    ],
)
def test_a_framework_that_is_not_supported_is_named(old, new, message, tmp_path):
    folder = copied("starvla_gr00t", tmp_path / "c")
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SpecError, match=message):
        open_starvla(folder)


# ---- statistics on the way back


def test_statistics_are_written_where_they_differ_and_nowhere_else(tmp_path):
    folder = copied("smolvla", tmp_path / "c")
    before = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    stats = open_lerobot(folder).stats
    assert stats is not None
    write_lerobot_stats(folder, stats)
    assert before == {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    assert stats.action is not None
    stats.action.mean[0] += 1
    write_lerobot_stats(folder, stats)
    again = open_lerobot(folder).stats
    assert again is not None
    assert again.action is not None
    assert np.array_equal(again.action.mean, stats.action.mean)
    (after,) = folder.glob("policy_postprocessor_*.safetensors")
    was = safetensors.torch.load(before[after.name])
    changed = [name for name, each in tensors_of(after).items() if not torch.equal(each, was[name])]
    assert changed == ["action.mean"]
