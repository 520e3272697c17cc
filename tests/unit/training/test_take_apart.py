"""Import and export: byte-equal where nothing was trained, and small in memory however big the checkpoint is."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.backbone import load_backbone
from joynexus.models.formats.imported import ImportedPolicy
from joynexus.models.formats.lerobot import open_lerobot
from joynexus.models.formats.starvla import open_starvla
from joynexus.models.formats.streaming import TensorFile, TensorInfo, TensorSource, write_tensors
from joynexus.specs.loading import load_service, load_tenant
from joynexus.training.export import read_export, write_export
from joynexus.training.put_together import put_together
from joynexus.training.take_apart import take_apart
from joynexus.types import PolicySnapshot

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ("smolvla", "smolvla_b", "pi0", "pi05", "starvla_oft", "starvla_gr00t")


def opened(path: Path, name: str) -> ImportedPolicy:
    return open_starvla(path) if name.startswith("starvla") else open_lerobot(path)


def project(name: str) -> str:
    return "starvla" if name.startswith("starvla") else "lerobot"


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("expected*", "inputs*", "checkpoint_*"))
    return folder


def trained(export: Path, folder: Path, **changes: object) -> PolicySnapshot:
    """The same policy a little later, exported to another folder."""
    was = read_export(export)
    parameters = {name: each + np.float32(0.125) for name, each in was.parameters.items()}
    fields = {"stats": was.stats, "parameters": parameters, **changes}
    later = PolicySnapshot(tenant="t", version=3, policy=was.policy, seed=0, **fields)  # pyright: ignore
    write_export(folder, later, signature="s")
    return later


@pytest.mark.parametrize("name", NAMES)
def test_what_was_imported_and_not_trained_is_exported_byte_for_byte(name, tmp_path):
    take_apart(opened(GOLDEN / name, name), tmp_path / "in")
    put_together(tmp_path / "in" / "policy", tmp_path / "back", project=project(name))
    files = [each for each in (tmp_path / "back").rglob("*") if each.is_file()]
    assert any(each.suffix == ".safetensors" for each in files)
    for each in files:
        assert filecmp.cmp(each, GOLDEN / name / each.relative_to(tmp_path / "back"), shallow=False), each
    again = opened(tmp_path / "back", name)
    assert again.policy == opened(GOLDEN / name, name).policy


def test_both_layouts_of_pi0_come_back_as_they_were(tmp_path):
    folder = copied("pi0", tmp_path / "c")
    other = GOLDEN / "pi0" / "checkpoint_without_prefix" / "model.safetensors"
    shutil.copy(other, folder)
    take_apart(open_lerobot(folder), tmp_path / "in")
    put_together(tmp_path / "in" / "policy", tmp_path / "back", project="lerobot")
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", other, shallow=False)


def test_a_run_on_qwen2_5_vl_with_the_flat_configuration_of_the_hub(tmp_path):
    folder = copied("starvla_gr00t", tmp_path / "c")
    config = {
        "model_type": "qwen2_5_vl",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 9,  # the file has 3
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 336,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
        },
    }
    (folder / "tiny-Qwen3-VL" / "config.json").write_text(json.dumps(config))
    path = folder / "checkpoints" / "steps_1_model.safetensors"
    kind = transformers.CONFIG_MAPPING["qwen2_5_vl"]
    model = transformers.AutoModelForImageTextToText.from_config(kind.from_dict({**config, "num_hidden_layers": 3}))
    tensors = {name: each for name, each in safetensors.torch.load_file(path).items() if name.startswith("action_")}
    tensors |= {f"qwen_vl_interface.model.{name}": each.contiguous() for name, each in model.state_dict().items()}
    safetensors.torch.save_file(tensors, path)
    take_apart(open_starvla(folder), tmp_path / "in")
    (spec,) = load_service(tmp_path / "in" / "service.yaml").backbones.values()
    assert spec.type == "qwen2_5_vl"
    assert load_backbone(spec).hidden_dim == 64
    put_together(tmp_path / "in" / "policy", tmp_path / "back", project="starvla")
    assert filecmp.cmp(tmp_path / "back" / "checkpoints" / path.name, path, shallow=False)


@pytest.mark.parametrize("name", ["smolvla", "pi05", "starvla_gr00t"])
def test_what_was_trained_differs_in_the_tenants_keys_alone(name, tmp_path):
    imported = opened(GOLDEN / name, name)
    take_apart(imported, tmp_path / "in")
    later = trained(tmp_path / "in" / "policy", tmp_path / "e")
    put_together(tmp_path / "e", tmp_path / "back", project=project(name), imported=tmp_path / "in")
    before = safetensors.torch.load_file(imported.tensors.path)
    after = safetensors.torch.load_file(tmp_path / "back" / imported.layout["weights"])
    assert {*before} == {*after}
    changed = {key for key, each in after.items() if not torch.equal(each, before[key])}
    assert changed == set(imported.names("policy").values())
    for inner, original in imported.names("policy").items():
        assert np.array_equal(after[original].numpy(), later.parameters[inner])


def test_halves_survive_float32_to_the_bit(tmp_path):
    """A checkpoint in bfloat16 and float16: trained in float32, written back in its own types."""
    folder = copied("smolvla", tmp_path / "c")
    path = folder / "model.safetensors"
    halves = (torch.bfloat16, torch.float16)
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: each.to(halves[len(name) % 2]) for name, each in tensors.items()}, path)
    take_apart(open_lerobot(folder), tmp_path / "in")
    assert {each.dtype for each in TensorFile(tmp_path / "in/policy/module.safetensors").infos.values()} == {"F32"}
    put_together(tmp_path / "in" / "policy", tmp_path / "back", project="lerobot")
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", path, shallow=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_are_written_are_a_service_and_a_tenant(name, tmp_path):
    take_apart(opened(GOLDEN / name, name), tmp_path / "in", name="mine")
    service, tenant = load_service(tmp_path / "in/service.yaml"), load_tenant(tmp_path / "in/tenant.yaml")
    assert tenant.tenant == "mine"
    assert tenant.policy.init_from == str(tmp_path / "in/policy")
    (backbone,) = service.backbones.values()
    loaded = load_backbone(backbone)
    assert loaded.kv_shape[0] in (0, 4)
    moved = shutil.move(tmp_path / "in", tmp_path / "elsewhere")
    assert load_tenant(Path(moved) / "tenant.yaml").policy.init_from == str(tmp_path / "elsewhere/policy")


def test_statistics_that_are_not_the_imported_ones_are_written(tmp_path):
    for name in ("pi05", "starvla_oft"):
        take_apart(opened(GOLDEN / name, name), tmp_path / name)
        stats = read_export(tmp_path / name / "policy").stats
        assert stats is not None
        assert stats.action is not None
        stats.action.q01[0] -= 1
        stats.action.minimum[-1] -= 1  # masked in StarVLA's file: stays
        trained(tmp_path / name / "policy", tmp_path / f"{name}_e", stats=stats)
        put_together(tmp_path / f"{name}_e", tmp_path / f"{name}_back", project=project(name), imported=tmp_path / name)
        found = opened(tmp_path / f"{name}_back", name).stats
        assert found is not None
        assert found.action is not None
        assert np.array_equal(found.action.q01, stats.action.q01)
        assert (found.action.minimum[-1] == stats.action.minimum[-1]) == (name == "pi05")


def test_a_checkpoint_without_statistics_gets_those_that_it_was_trained_with(tmp_path):
    folder = copied("smolvla", tmp_path / "c")
    for file in folder.glob("policy_*.json"):
        content = json.loads(file.read_text())
        for step in content["steps"]:
            step.pop("state_file", None)
        file.write_text(json.dumps(content))
    done = take_apart(open_lerobot(folder), tmp_path / "in")
    assert not done.has_stats
    put_together(tmp_path / "in" / "policy", tmp_path / "plain", project="lerobot")
    assert open_lerobot(tmp_path / "plain").stats is None
    stats = open_lerobot(GOLDEN / "smolvla").stats
    trained(tmp_path / "in" / "policy", tmp_path / "e", stats=stats)
    put_together(tmp_path / "e", tmp_path / "back", project="lerobot", imported=tmp_path / "in")
    found = open_lerobot(tmp_path / "back").stats
    assert found is not None
    assert stats is not None
    assert found.action is not None
    assert stats.action is not None
    assert np.array_equal(found.action.std, stats.action.std)


# ---- what is refused, and leaves nothing


def test_nothing_is_left_of_an_import_that_fails(tmp_path):
    folder = copied("smolvla", tmp_path / "c")
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.state_proj.bias"]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"1 missing: state_proj.bias"):
        take_apart(open_lerobot(folder), tmp_path / "in")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c"]


def test_nothing_is_left_when_the_checkpoint_ends_halfway(tmp_path):
    folder = copied("pi0", tmp_path / "c")
    imported = open_lerobot(folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="it ends within tensor"):
        take_apart(imported, tmp_path / "in")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c"]


def test_a_folder_that_is_there_is_never_written_to(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        take_apart(open_lerobot(GOLDEN / "smolvla"), tmp_path / "in")
    take_apart(open_lerobot(GOLDEN / "smolvla"), tmp_path / "ok")
    with pytest.raises(CheckpointError, match="exists already"):
        put_together(tmp_path / "ok" / "policy", tmp_path / "in", project="lerobot")
    assert not any((tmp_path / "in").iterdir())


def test_only_a_continuation_of_the_import_goes_back(tmp_path):
    take_apart(open_lerobot(GOLDEN / "smolvla"), tmp_path / "in")
    take_apart(open_lerobot(GOLDEN / "pi0"), tmp_path / "other")
    policy = tmp_path / "in" / "policy"
    with pytest.raises(CheckpointError, match=r"came from a lerobot checkpoint \(smolvla\).*--format lerobot"):
        put_together(policy, tmp_path / "back", project="starvla")
    with pytest.raises(CheckpointError, match=r"its module is not that of .*other \(pi0\): \d+ missing"):
        put_together(policy, tmp_path / "back", project="lerobot", imported=tmp_path / "other")
    moved = tmp_path / "alone"
    shutil.copytree(policy, moved / "policy")
    with pytest.raises(CheckpointError, match=r"came from no import: .*--import, or export it with --format joynexus"):
        put_together(moved / "policy", tmp_path / "back", project="lerobot")
    adapted = read_export(policy).parameters | {"adapter.x.lora_A.weight": np.zeros((1, 1), dtype=np.float32)}
    trained(policy, tmp_path / "lora", parameters=adapted)
    with pytest.raises(CheckpointError, match=r"has a LoRA adapter.*--format peft"):
        put_together(tmp_path / "lora", tmp_path / "back", project="lerobot", imported=tmp_path / "in")
    assert not (tmp_path / "back").exists()


def test_a_backbone_that_was_replaced_is_noticed(tmp_path):
    take_apart(open_lerobot(GOLDEN / "pi0"), tmp_path / "in")
    path = tmp_path / "in" / "backbone" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(iter(tensors))
    safetensors.torch.save_file({**tensors, name: torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"lacks .* as it was imported"):
        put_together(tmp_path / "in" / "policy", tmp_path / "back", project="lerobot")


def test_a_name_that_no_tenant_can_have_is_asked_for(tmp_path):
    folder = copied("pi0", tmp_path / "___")
    with pytest.raises(SpecError, match=r"no name can be made of it. Give --name"):
        take_apart(open_lerobot(folder), tmp_path / "in")


# ---- memory


@pytest.mark.timeout(120)
def test_a_big_checkpoint_streams(tmp_path):
    """200 MB, most of it one embedding: the memory grows by far less than the file."""
    folder = copied("pi0", tmp_path / "c")
    config = json.loads((folder / "paligemma_config.json").read_text())
    rows, width = 780_000, 64
    config["text_config"]["vocab_size"] = rows
    (folder / "paligemma_config.json").write_text(json.dumps(config))
    old = TensorFile(folder / "model.safetensors")
    block = np.random.default_rng(0).bytes(width * 4 * 1000)

    def source(name: str) -> TensorSource:
        if not name.endswith("paligemma.model.language_model.embed_tokens.weight"):
            return old.source(name)
        info = TensorInfo(dtype="F32", shape=(rows, width))
        return TensorSource(info=info, blocks=lambda: (block for _ in range(rows // 1000)))

    write_tensors(folder / "big", {name: source(name) for name in old.infos})
    (folder / "big").rename(folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    assert size > 200e6
    script = Path(__file__).parent / "big_checkpoint.py"
    done = subprocess.run([sys.executable, str(script), str(folder), str(tmp_path)], capture_output=True, check=True)
    growth = json.loads(done.stdout)["growth"]
    assert growth < 0.3 * size, (growth, size)  # the bound is 1.3 times the file
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", folder / "model.safetensors", shallow=False)
