import pytest
import torch

from joynexus.errors import InvalidBatchError, SpecError
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones.hf import HfBackbone
from joynexus.models.tokens import PromptTable
from joynexus.specs.vlm_backbones import HfBackboneSpec
from joynexus.testing.model_contracts import check_backbone
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_HF

TEXT = {**TINY_HF.config["text_config"], "model_type": "llama"}
VISION = {**TINY_HF.config["vision_config"], "model_type": "siglip_vision_model", "vision_use_head": False}
TINY_GEMMA3 = HfBackboneSpec(
    init="random",
    chunk_size=4,
    image_side=32,
    tokens_per_image=4,
    header="user:",
    config={
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "image_token_id": 3,
        "boi_token_id": 4,
        "eoi_token_id": 5,
        "text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
        "vision_config": VISION,
    },
)
TINY_LLAVA = HfBackboneSpec(
    init="random",
    chunk_size=4,
    image_side=32,
    tokens_per_image=16,
    fit="pad",
    config={
        "model_type": "llava",
        "image_token_id": 3,
        "image_seq_length": 16,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "text_config": TEXT,
        "vision_config": VISION,
    },
)


@pytest.fixture(scope="module")
def idefics():
    return load_backbone(TINY_HF)


@pytest.mark.parametrize("spec", [TINY_GEMMA3, TINY_LLAVA], ids=["gemma3", "llava"])
def test_other_families_keep_the_promises_of_a_backbone(spec):
    check_backbone(spec)


@torch.no_grad()
@pytest.mark.parametrize("spec", [TINY_HF, TINY_GEMMA3], ids=["idefics3", "gemma3"])
def test_a_padded_row_has_the_features_that_it_has_without_padding(spec):
    backbone = load_backbone(spec)
    batch = fake_prefix_batch(backbone, 2, cameras=1)
    batch.image_mask[:] = True
    features = backbone.prefix(batch, "s")
    for row in range(2):
        real = batch.token_mask[row]
        ids = torch.cat([torch.tensor([*backbone._header, *backbone._frame]), batch.tokens[row, real]])[None]
        pixels = backbone.pixels(batch.images[row])
        kinds = {"token_type_ids": (ids == 3).long()} if "token_type_ids" in backbone._takes else {}
        alone = backbone._model(
            input_ids=ids,
            pixel_values=pixels[None] if spec.frames_by_row else pixels,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **kinds,
        )
        assert torch.allclose(features.hidden[row, ~features.pad[row]], alone.last_hidden_state[0], atol=1e-5)


def test_a_frame_that_normalises_to_0_is_not_dropped(idefics):
    spec = TINY_HF.model_copy(update={"image_mean": (0.0, 0.0, 0.0)})
    batch = fake_prefix_batch(idefics, 2)
    batch.images[:] = 0
    assert load_backbone(spec).prefix(batch, "s").hidden.isfinite().all()


def test_an_earlier_layer_may_be_read(idefics):
    batch = fake_prefix_batch(idefics, 2)
    embeddings = load_backbone(TINY_HF.model_copy(update={"hidden_layer": 0})).prefix(batch, "s").hidden
    assert torch.equal(embeddings[0, 0], idefics._model.text_model.embed_tokens.weight[idefics._header[0]])


def test_a_wrong_number_of_tokens_is_refused_when_the_model_is_built():
    with pytest.raises(SpecError, match=r"takes no frame of image_side 32 as 5 tokens.*from its processor"):
        load_backbone(TINY_HF.model_copy(update={"tokens_per_image": 5}))
    config = {name: value for name, value in TINY_HF.config.items() if name != "image_token_id"}
    with pytest.raises(SpecError, match="image_token_id is 128257, the vocabulary has 264 ids"):
        load_backbone(TINY_HF.model_copy(update={"config": config}))


def test_a_prompt_with_an_image_token_is_refused(idefics):
    table = PromptTable(lambda prompt: [1, *[3 if each == "#" else 9 for each in prompt]], pad_id=0)
    backbone = HfBackbone(TINY_HF, idefics._model, table)
    assert backbone.tokenize(["ab"], 3)[0].tolist() == [[9, 9, 0]]
    with pytest.raises(InvalidBatchError, match="stands for an image"):
        backbone.tokenize(["a#"], 3)


def test_stretched_frames_fill_the_square_and_padded_ones_keep_their_aspect(idefics):
    frames = torch.full((1, 24, 48, 3), 255, dtype=torch.uint8)
    assert torch.allclose(idefics.pixels(frames), torch.ones(1, 3, 32, 32))
    padded = load_backbone(TINY_LLAVA).pixels(frames)
    assert torch.equal(padded[:, :, :16], torch.full((1, 3, 16, 32), -1.0))
    assert torch.allclose(padded[:, :, 16:], torch.ones(1, 3, 16, 32))
