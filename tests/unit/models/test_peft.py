import importlib.util
import json

import pytest
import safetensors.torch
import torch

from joynexus.errors import SpecError
from joynexus.models.adapted_rows import AdaptedRows
from joynexus.models.adapters import PREFIX, build_adapter
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones.pretrained import build_model
from joynexus.models.backbones.smolvlm import SmolVlmBackbone
from joynexus.models.formats.peft import write_peft
from joynexus.specs.adapter import AdapterSpec
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.types import PolicySnapshot

SPEC = AdapterSpec(rank=4, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def backbone():
    torch.set_num_threads(1)
    return load_backbone(TINY_SMOLVLM)


@pytest.fixture
def adapter(backbone):
    return build_adapter(SPEC, backbone, seed=1).randomized(1)


@pytest.fixture
def exported(tmp_path, policy, adapter):
    parameters = {f"{PREFIX}{name}": each.detach().numpy() for name, each in adapter.named_parameters().items()}
    module = {"leave.weight": torch.zeros(2, 2).numpy()}
    snapshot = PolicySnapshot(
        tenant="a",
        version=3,
        policy=policy.model_copy(update={"adapter": SPEC}),
        parameters={**module, **parameters},
        stats=None,
        seed=0,
    )
    return write_peft(tmp_path / "peft", snapshot, TINY_SMOLVLM)


def hidden(backbone, adapter):
    rows = AdaptedRows([adapter] * 3)
    with rows.active():
        return backbone.prefix(fake_prefix_batch(backbone, 3), "s").hidden


def library_model():
    return build_model(TINY_SMOLVLM, model_class="SmolVLMModel", config_class="SmolVLMConfig")


def merged_by_hand(model, folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    with torch.no_grad():
        for path in config["target_modules"]:
            a, b = (tensors[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")
            model.get_submodule(path).weight += scale * b @ a
    return model


def merged_by_peft(model, folder):
    loaded = importlib.import_module("peft").PeftModel.from_pretrained(model, folder)
    assert len([name for name, _ in loaded.named_parameters() if ".lora_" in name]) == 12
    return loaded.merge_and_unload()


LOADERS = [merged_by_hand, *([merged_by_peft] if importlib.util.find_spec("peft") else [])]
"""PEFT itself where it is installed; it is no dependency."""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft calls
@pytest.mark.parametrize("merged", LOADERS)
def test_the_exported_files_give_the_features_on_the_librarys_model(merged, backbone, adapter, exported):
    model, prompts = library_model()
    found = SmolVlmBackbone(TINY_SMOLVLM, merged(model, exported), prompts).freeze()
    torch.testing.assert_close(hidden(found, None), hidden(backbone, adapter), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(hidden(backbone, None), hidden(backbone, adapter), atol=1e-2)


def test_names_and_shapes_are_those_of_peft(exported):
    config = json.loads((exported / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(exported / "adapter_model.safetensors")
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 6.0, "none")
    assert len(tensors) == 2 * len(config["target_modules"]) == 12
    assert config["target_modules"][0] == "text_model.layers.0.self_attn.q_proj"
    assert tensors["base_model.model.text_model.layers.0.self_attn.v_proj.lora_A.weight"].shape == (4, 32)
    assert tensors["base_model.model.text_model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)


def test_a_policy_without_an_adapter_is_refused(tmp_path, policy):
    snapshot = PolicySnapshot(tenant="a", version=0, policy=policy, parameters={}, stats=None, seed=0)
    with pytest.raises(SpecError, match="its policy has no adapter, so there is nothing for PEFT"):
        write_peft(tmp_path, snapshot, TINY_SMOLVLM)
