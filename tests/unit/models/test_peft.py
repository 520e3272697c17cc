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


def test_merging_the_exported_files_by_hand_gives_the_features(backbone, adapter, exported):
    config = json.loads((exported / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(exported / "adapter_model.safetensors")
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 6.0, "none")
    assert len(tensors) == 2 * len(config["target_modules"]) == 12
    model, prompts = build_model(TINY_SMOLVLM, model_class="SmolVLMModel", config_class="SmolVLMConfig")
    scale = config["lora_alpha"] / config["r"]
    with torch.no_grad():
        for path in config["target_modules"]:
            a, b = (tensors[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")
            model.get_submodule(path).weight += scale * b @ a
    merged = SmolVlmBackbone(TINY_SMOLVLM, model, prompts).freeze()
    torch.testing.assert_close(hidden(merged, None), hidden(backbone, adapter), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(hidden(backbone, None), hidden(backbone, adapter), atol=1e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft calls
def test_peft_loads_it_on_the_librarys_model(backbone, adapter, exported):
    peft = pytest.importorskip("peft")
    model, prompts = build_model(TINY_SMOLVLM, model_class="SmolVLMModel", config_class="SmolVLMConfig")
    loaded = peft.PeftModel.from_pretrained(model, exported)
    names = {name for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert len(names) == 12
    merged = SmolVlmBackbone(TINY_SMOLVLM, loaded.merge_and_unload(), prompts).freeze()
    torch.testing.assert_close(hidden(merged, None), hidden(backbone, adapter), rtol=1e-4, atol=1e-4)


def test_a_policy_without_an_adapter_is_refused(tmp_path, policy):
    snapshot = PolicySnapshot(tenant="a", version=0, policy=policy, parameters={}, stats=None, seed=0)
    with pytest.raises(SpecError, match="its policy has no adapter, so there is nothing for PEFT"):
        write_peft(tmp_path, snapshot, TINY_SMOLVLM)
