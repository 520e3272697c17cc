import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import PaliGemmaConfig, PaliGemmaModel

from joynexus.errors import SpecError
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones import paligemma
from joynexus.models.backbones.paligemma import PaliGemmaBackbone
from joynexus.models.images import resize_with_pad
from joynexus.models.tokens import ByteTokenizer, PromptTable
from joynexus.specs.vlm_backbones import PaliGemmaBackboneSpec
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_PALIGEMMA

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def library_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return PaliGemmaModel(PaliGemmaConfig(**TINY_PALIGEMMA.config)).eval()


@pytest.fixture(scope="module")
def backbone(library_model):
    return PaliGemmaBackbone(TINY_PALIGEMMA, library_model, PromptTable(ByteTokenizer().encode, pad_id=0)).freeze()


@torch.no_grad()
def test_layers_driven_by_hand_equal_the_library(library_model, backbone):
    tokens = torch.arange(9, 23).view(2, 7)
    embedded, seen = backbone.embed(
        None, torch.ones(2, 0, dtype=torch.bool), tokens, torch.ones(2, 7, dtype=torch.bool)
    )
    assert torch.equal(embedded, library_model.language_model.embed_tokens.weight[tokens] * 32**0.5)
    seen[1, 2:4] = False
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    mask = torch.where(seen[:, None, None, :], 0.0, torch.finfo(torch.float32).min).expand(2, 1, 7, 7)
    theirs = library_model.language_model(
        inputs_embeds=embedded, attention_mask=mask, position_ids=positions, use_cache=True
    )
    hidden, keys, values = backbone._run(embedded, positions, seen, (), ())
    assert torch.allclose(hidden[seen], theirs.last_hidden_state[seen], atol=1e-5)
    for index, layer in enumerate(theirs.cache.layers):
        assert torch.allclose(keys[index].transpose(1, 2)[seen], layer.keys.transpose(1, 2)[seen], atol=1e-5)
        assert torch.allclose(values[index].transpose(1, 2)[seen], layer.values.transpose(1, 2)[seen], atol=1e-5)


@torch.no_grad()
def test_extending_a_cached_prefix_equals_one_joint_pass(backbone):
    prefix = backbone.prefix(fake_prefix_batch(backbone, 2), "s")
    tokens = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(0))
    grown = backbone.extend(prefix, tokens)
    for row in range(2):  # the same row without its padding, one token after the other where both see each other
        valid = ~prefix.pad[row]
        keys = [layer[row : row + 1, :, valid] for layer in prefix.keys]
        values = [layer[row : row + 1, :, valid] for layer in prefix.values]
        count = int(valid.sum())
        joint, _, _ = backbone._run(
            tokens[row : row + 1], torch.arange(count, count + 2)[None], torch.ones(1, count + 2) > 0, keys, values
        )
        assert torch.allclose(joint[0], grown.hidden[row, prefix.length :], atol=1e-5)


def test_cameras_come_in_order_and_a_missing_one_is_not_seen(backbone):
    batch = fake_prefix_batch(backbone, 2)
    features = backbone.prefix(batch, "s")
    assert backbone.prefix_length(2, (9, 9), 24) == features.length == 2 * 4 + 24
    assert features.pad[0].nonzero().flatten().tolist()[:4] == [4, 5, 6, 7]
    swapped = backbone.prefix(batch.pick(torch.tensor([1])), "s").hidden
    batch.images[1] = batch.images[1].flip(0)
    assert not torch.allclose(backbone.prefix(batch, "s").hidden[1], swapped[0], atol=1e-3)


def test_a_policy_without_cameras_has_a_text_prefix(backbone):
    batch = fake_prefix_batch(backbone, 3, cameras=0)
    features = backbone.prefix(batch, "s")
    assert features.length == 24
    assert torch.equal(features.pad, ~batch.token_mask)


def test_a_row_with_nothing_to_see_is_finite(backbone):
    batch = fake_prefix_batch(backbone, 2)
    batch.image_mask[0] = False
    batch.token_mask[0] = False
    features = backbone.prefix(batch, "s")
    assert features.hidden.isfinite().all()
    assert features.pad[0].all()


def test_frames_are_centred_with_the_odd_line_at_the_end():
    white = torch.full((1, 24, 33, 3), 255, dtype=torch.uint8)
    square = resize_with_pad(white, 33, centred=True)
    assert (square[:, :, :4] == -1).all()
    assert (square[:, :, 4:28] == 1).all()
    assert (square[:, :, 28:] == -1).all()
    tall = resize_with_pad(white.transpose(1, 2), 33, centred=True)
    assert torch.equal(tall, square.transpose(2, 3))


def test_num_layers_keeps_the_first_ones():
    whole, cut = load_backbone(TINY_PALIGEMMA), load_backbone(TINY_PALIGEMMA.model_copy(update={"num_layers": 1}))
    batch = fake_prefix_batch(whole, 2)
    one, two = cut.prefix(batch, "s"), whole.prefix(batch, "s")
    assert (len(one.keys), len(two.keys)) == (1, 2)
    assert torch.equal(one.keys[0], two.keys[0])
    with pytest.raises(SpecError, match="num_layers is 3, the model has 2"):
        load_backbone(TINY_PALIGEMMA.model_copy(update={"num_layers": 3}))


def test_the_second_generation_is_refused(library_model, monkeypatch):
    text = {**TINY_PALIGEMMA.config["text_config"], "model_type": "gemma2"}
    with pytest.raises(ValidationError, match="model_type is 'gemma2', need 'gemma'"):
        PaliGemmaBackboneSpec(init="random", config={**TINY_PALIGEMMA.config, "text_config": text})
    monkeypatch.setattr(library_model.config.text_config, "model_type", "gemma2")
    monkeypatch.setattr(paligemma, "build_model", lambda *_, **__: (library_model, None))
    with pytest.raises(SpecError, match="paligemma: the language model is 'gemma2', need 'gemma'"):
        load_backbone(TINY_PALIGEMMA)


@pytest.fixture
def checkpoint(library_model, tmp_path):
    library_model.save_pretrained(tmp_path)
    for file in (Path(__file__).parents[2] / "golden" / "pi0" / "tokenizer").iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def test_a_folder_gives_its_own_weights(backbone, checkpoint):
    loaded = load_backbone(PaliGemmaBackboneSpec(path=str(checkpoint), chunk_size=4))
    batch = fake_prefix_batch(backbone, 2)
    assert torch.equal(loaded.prefix(batch, "s").hidden, backbone.prefix(batch, "s").hidden)
    assert {path.split(".")[0] for path in loaded.adapter_layers()} == {"language_model"}
    assert len(loaded.adapter_layers()) == 2 * 7


def test_bfloat16_stays_close_to_float32(backbone, checkpoint):
    small = load_backbone(PaliGemmaBackboneSpec(path=str(checkpoint), dtype="bfloat16"))
    batch = fake_prefix_batch(backbone, 3)
    full, rounded = backbone.prefix(batch, "s"), small.prefix(batch, "s")
    cosine = torch.nn.functional.cosine_similarity(full.hidden, rounded.hidden.float(), dim=-1)
    assert cosine[~full.pad].min() > 0.99
    assert rounded.nbytes < 0.55 * full.nbytes
