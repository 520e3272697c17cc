import pytest
import torch
import transformers

from joynexus.errors import InvalidBatchError, SpecError
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones.qwen_vision import FrameScaling, to_patches
from joynexus.models.prefix import PrefixBatch
from joynexus.testing.model_contracts import check_backbone
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_QWEN2_5_VL, TINY_QWEN3_VL

FAMILIES = {"qwen3_vl": TINY_QWEN3_VL, "qwen2_5_vl": TINY_QWEN2_5_VL}
CLASSES = {"qwen3_vl": "Qwen3VLConfig", "qwen2_5_vl": "Qwen2_5_VLConfig"}
IMAGE_ID = 7


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
    return load_backbone(FAMILIES[request.param])


def library_model(spec):
    """Return the library's own model of the same weights."""
    config = getattr(transformers, CLASSES[spec.type])(**spec.config, image_token_id=IMAGE_ID, video_token_id=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()


@torch.no_grad()
def test_driven_by_hand_equals_the_library(tiny):
    """A row without its padding, given to the library as one sequence of ids and patches."""
    batch = fake_prefix_batch(tiny, 3, side=70)
    features = tiny.prefix(batch, "s")
    model = library_model(tiny.spec)
    pixels = tiny.pixels(batch.images.flatten(0, 1))
    merge = tiny._vision._merge
    patches = to_patches(pixels, side=tiny._vision._patch, merge=merge, frames=2)
    grid = [pixels.shape[2] // tiny._vision._patch, pixels.shape[3] // tiny._vision._patch]
    for row in range(3):
        cameras = [camera for camera in range(2) if batch.image_mask[row, camera]]
        frame = [tiny._around[0], *[IMAGE_ID] * (grid[0] * grid[1] // merge**2), tiny._around[1]]
        ids = [*tiny._header, *frame * len(cameras), *batch.tokens[row][batch.token_mask[row]].tolist()]
        theirs = model(
            input_ids=torch.tensor([ids]),
            mm_token_type_ids=torch.tensor([[int(each == IMAGE_ID) for each in ids]]),
            pixel_values=torch.cat([patches[2 * row + camera] for camera in cameras]),
            image_grid_thw=torch.tensor([[1, *grid]] * len(cameras)),
            use_cache=True,
        )
        real = ~features.pad[row]
        assert torch.allclose(features.hidden[row, real], theirs.last_hidden_state[0], atol=2e-5)
        for index, layer in enumerate(theirs.cache.layers):
            assert torch.allclose(features.keys[index][row][:, real], layer.keys[0], atol=2e-5)
            assert torch.allclose(features.values[index][row][:, real], layer.values[0], atol=2e-5)


@torch.no_grad()
def test_extending_a_text_prefix_by_one_embedding_equals_a_longer_prompt(tiny):
    batch = fake_prefix_batch(tiny, 2, cameras=0)
    longer = tiny.prefix(batch, "s")
    last = tiny._embed(batch.tokens[:, -1:])
    shorter = tiny.prefix(
        PrefixBatch(
            images=batch.images,
            image_mask=batch.image_mask,
            tokens=batch.tokens[:, :-1],
            token_mask=batch.token_mask[:, :-1],
        ),
        "s",
    )
    grown = tiny.extend(shorter, last)
    assert torch.equal(grown.pad, longer.pad)
    assert torch.allclose(grown.hidden[:, -1], longer.hidden[:, -1], atol=1e-5)
    assert torch.allclose(grown.keys[1][:, :, -1], longer.keys[1][:, :, -1], atol=1e-5)


def test_a_prompt_ends_where_its_bucket_ends(tiny):
    ids, mask = tiny.tokenize(["a", "abc"], 12)
    footer = tiny._footer.encode()
    assert mask.sum(dim=1).tolist() == [2 + len(footer), 4 + len(footer)]
    assert mask[:, -1].all()
    assert ids[0, mask[0]].tolist() == [1, ord("a") + 8, *(byte + 8 for byte in footer)]
    with pytest.raises(InvalidBatchError, match="max_prompt_tokens is 3"):
        tiny.tokenize(["abc"], 3)


def test_num_layers_keeps_the_first_and_last_layer_is_read_before_the_norm():
    spec = TINY_QWEN3_VL
    whole, cut = load_backbone(spec), load_backbone(spec.model_copy(update={"num_layers": 2}))
    raw = load_backbone(spec.model_copy(update={"num_layers": 2, "hidden_state": "last_layer"}))
    batch = fake_prefix_batch(whole, 2)
    assert [len(each.prefix(batch, "s").keys) for each in (whole, cut, raw)] == [3, 2, 2]
    assert torch.equal(cut.prefix(batch, "s").keys[1], whole.prefix(batch, "s").keys[1])
    assert torch.equal(raw._norm(raw.prefix(batch, "s").hidden), cut.prefix(batch, "s").hidden)


def test_a_missing_camera_takes_no_place():
    backbone = load_backbone(TINY_QWEN3_VL)
    mask = torch.tensor([[True, True], [False, True]])
    places = backbone.positions([(2, 2), (2, 2)], mask, torch.ones(2, 3, dtype=torch.bool))
    lead = backbone.num_lead_tokens
    second = lead + 6  # two tokens around four
    assert places[:, 0, second].tolist() == [lead + 4] * 3, "a frame of 2 x 2 takes two places, and one each around it"
    assert places[:, 1, second].tolist() == [lead] * 3
    assert (places[:, 0, -3:] - places[:, 1, -3:] == 4).all()
    assert places[:, 0, second + 1 : second + 5].tolist() == [
        [lead + 5] * 4,
        [lead + 5, lead + 5, lead + 6, lead + 6],
        [lead + 5, lead + 6, lead + 5, lead + 6],
    ]


@pytest.mark.parametrize(
    ("frame", "size"),
    [((64, 64), (64, 64)), ((48, 64), (64, 64)), ((40, 32), (32, 32)), ((10, 10), (32, 32)), ((300, 100), (128, 32))],
)
def test_frames_are_resized_to_whole_tokens_within_the_range(frame, size):
    scaling = FrameScaling(
        factor=32, min_pixels=1024, max_pixels=6144, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )  # fmt: skip
    assert scaling.size(*frame) == size
    assert scaling.pixels(torch.zeros(1, *frame, 3, dtype=torch.uint8)).shape == (1, 3, *size)


def test_ids_that_the_vocabulary_lacks_are_refused():
    config = {**TINY_QWEN3_VL.config, "vision_end_token_id": 151653}
    with pytest.raises(SpecError, match=r"vision_end_token_id \[5, 151653\], the vocabulary 264 ids"):
        load_backbone(TINY_QWEN3_VL.model_copy(update={"config": config}))


def test_last_layer_in_bfloat16_keeps_the_promises_of_a_backbone():
    check_backbone(TINY_QWEN3_VL.model_copy(update={"dtype": "bfloat16", "hidden_state": "last_layer"}))
