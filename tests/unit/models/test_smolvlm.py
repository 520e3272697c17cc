import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMModel

from joynexus.errors import SpecError
from joynexus.models.backbone import load_backbone
from joynexus.models.backbones.smolvlm import SmolVlmBackbone
from joynexus.models.images import resize_with_pad
from joynexus.models.tokens import ByteTokenizer, PromptTable
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_SMOLVLM


@pytest.fixture(scope="module")
def library_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return SmolVLMModel(SmolVLMConfig(**TINY_SMOLVLM.config)).eval()


def wrap(model, **changes):
    spec = TINY_SMOLVLM.model_copy(update=changes)
    return SmolVlmBackbone(spec, model, PromptTable(ByteTokenizer().encode, pad_id=0)).freeze()


@torch.no_grad()
def test_layers_driven_by_hand_equal_the_library(library_model):
    backbone = wrap(library_model)
    embedded = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True] * 7, [True, True, False, False, True, True, True]])
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    mask = torch.where(valid[:, None, None, :], 0.0, torch.finfo(torch.float32).min).expand(2, 1, 7, 7)
    theirs = library_model.text_model(
        inputs_embeds=embedded, attention_mask=mask, position_ids=positions, use_cache=True
    )
    hidden, keys, values = backbone._run(embedded, positions, valid, (), ())
    assert torch.allclose(hidden[valid], theirs.last_hidden_state[valid], atol=1e-5)
    for index, layer in enumerate(theirs.cache.layers):
        assert torch.allclose(keys[index].transpose(1, 2)[valid], layer.keys.transpose(1, 2)[valid], atol=1e-5)
        assert torch.allclose(values[index].transpose(1, 2)[valid], layer.values.transpose(1, 2)[valid], atol=1e-5)


@torch.no_grad()
def test_extending_a_cached_prefix_equals_one_joint_pass(library_model):
    backbone = wrap(library_model)
    batch = fake_prefix_batch(backbone, 2)
    prefix = backbone.prefix(batch, "s")
    tokens = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(0))
    extended = backbone.extend(prefix, tokens).hidden[:, prefix.length :]
    for row in range(2):  # the joint pass of one row, without its padding
        valid = ~prefix.pad[row]
        keys = tuple(layer[row : row + 1, :, valid] for layer in prefix.keys)
        values = tuple(layer[row : row + 1, :, valid] for layer in prefix.values)
        count = int(valid.sum())
        positions = torch.arange(count, count + 2)[None]
        seen = torch.ones(1, count + 2, dtype=torch.bool)
        joint, _, _ = backbone._run(tokens[row : row + 1], positions, seen, keys, values)
        assert torch.allclose(joint[0], extended[row], atol=1e-5)
    swapped = backbone.extend(prefix, tokens.flip(1)).hidden[:, prefix.length :]
    assert not torch.allclose(swapped.flip(1), extended, atol=1e-3), "a token's place does not matter"


def test_the_gradient_through_extend_is_that_of_one_joint_pass(library_model):
    """Prefix and tokens in one pass of transformers' own layers, where no prefix token sees the others."""
    backbone = wrap(library_model)
    batch = fake_prefix_batch(backbone, 2)
    prefix = backbone.prefix(batch, "s")
    embedded, valid = backbone.embed(
        backbone.pixels(batch.images.flatten(0, 1)).view(2, 2, 3, 32, 32),
        batch.image_mask,
        batch.tokens,
        batch.token_mask,
    )
    tokens = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    grown = backbone.extend(prefix, tokens)
    length, count = embedded.shape[1], 2
    seen = torch.cat([valid, valid.new_ones(2, count)], dim=1)
    sees = seen[:, None, None, :].repeat(1, 1, length + count, 1)
    sees[:, :, :length, length:] = False
    other = tokens.detach().clone().requires_grad_()
    theirs = library_model.text_model(
        inputs_embeds=torch.cat([embedded, other], dim=1),
        attention_mask=torch.where(sees, 0.0, torch.finfo(torch.float32).min),
        position_ids=(seen.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
    )
    assert torch.allclose(grown.hidden[seen], theirs.last_hidden_state[seen], atol=1e-5)
    ours = sum(each[:, :, length:].sin().sum() for each in (*grown.keys, *grown.values)) + grown.hidden.cos().sum()
    layers = [each for layer in theirs.cache.layers for each in (layer.keys, layer.values)]
    reference = sum(each[:, :, length:].sin().sum() for each in layers) + theirs.last_hidden_state.cos().sum()
    (mine,) = torch.autograd.grad(ours, tokens)
    (joint,) = torch.autograd.grad(reference, other)
    assert torch.allclose(mine, joint, atol=1e-5 * float(joint.abs().max()))


def test_a_uniformly_grey_frame_is_seen(tiny):
    batch = fake_prefix_batch(tiny, 2)
    batch.images[1] = 0
    batch.images[1, 0] = 127
    grey = tiny.prefix(batch, "s").hidden[1]
    batch.images[1, 0] = 30
    assert not torch.allclose(tiny.prefix(batch, "s").hidden[1], grey, atol=1e-2)


def test_a_policy_without_cameras_has_a_text_prefix(tiny):
    batch = fake_prefix_batch(tiny, 3, cameras=0)
    features = tiny.prefix(batch, "s")
    assert features.length == tiny.prefix_length(0, (64, 64), 24) == 24
    assert torch.equal(features.pad, ~batch.token_mask)


def test_a_row_with_nothing_to_see_is_finite(tiny):
    batch = fake_prefix_batch(tiny, 2)
    batch.image_mask[0] = False
    batch.token_mask[0] = False
    features = tiny.prefix(batch, "s")
    assert features.hidden.isfinite().all()
    assert features.pad[0].all()


def test_num_layers_keeps_the_first_ones():
    whole, cut = load_backbone(TINY_SMOLVLM), load_backbone(TINY_SMOLVLM.model_copy(update={"num_layers": 1}))
    batch = fake_prefix_batch(whole, 2)
    one, two = cut.prefix(batch, "s"), whole.prefix(batch, "s")
    assert (len(one.keys), len(two.keys)) == (1, 2)
    assert torch.equal(one.keys[0], two.keys[0])
    with pytest.raises(SpecError, match="num_layers is 3, the model has 2"):
        load_backbone(TINY_SMOLVLM.model_copy(update={"num_layers": 3}))


def test_special_tokens_are_seen_even_where_the_camera_is_missing():
    spec = TINY_SMOLVLM.model_copy(update={"image_special_tokens": True, "pad_prefix_to": 50})
    framed = load_backbone(spec)
    batch = fake_prefix_batch(framed, 2)
    features = framed.prefix(batch, "s")
    assert features.length == framed.prefix_length(2, (64, 64), 24) == spec.prefix_length(2, (64, 64), 24) == 50
    assert framed.prefix_length(3, (64, 64), 40) == 3 * (2 + 4 + 1) + 40
    shown = ~features.pad
    assert shown[0, 7:14].tolist() == [True, True, *[False] * 4, True]
    assert torch.equal(shown[:, 14:38], batch.token_mask)
    assert not shown[:, 38:].any()
    wider = load_backbone(spec.model_copy(update={"pad_prefix_to": 60})).prefix(batch, "s")
    assert torch.allclose(wider.hidden[~wider.pad], features.hidden[shown], atol=1e-5)


def test_a_tokenizer_without_image_tokens_cannot_frame_images(library_model):
    spec = TINY_SMOLVLM.model_copy(update={"image_special_tokens": True})
    with pytest.raises(SpecError, match="image_special_tokens is true, the tokenizer knows no"):
        SmolVlmBackbone(spec, library_model, PromptTable(ByteTokenizer().encode, pad_id=0))


def test_scaled_embeddings_and_another_rotary_base_change_the_prefix(tiny):
    batch = fake_prefix_batch(tiny, 2)
    plain = tiny.prefix(batch, "s").hidden
    for changes in ({"embedding_scale": "sqrt_dim"}, {"rope_base": 500.0}):
        changed = load_backbone(TINY_SMOLVLM.model_copy(update=changes)).prefix(batch, "s").hidden
        assert not torch.allclose(changed, plain, atol=1e-2)
    same = load_backbone(TINY_SMOLVLM.model_copy(update={"rope_base": 10000.0})).prefix(batch, "s").hidden
    assert torch.allclose(same, plain, atol=1e-5)  # the config's own base


def test_bfloat16_stays_close_to_float32(tiny):
    small = load_backbone(TINY_SMOLVLM.model_copy(update={"dtype": "bfloat16"}))
    batch = fake_prefix_batch(tiny, 3)
    exact, rounded = tiny.prefix(batch, "s"), small.prefix(batch, "s")
    cosine = torch.nn.functional.cosine_similarity(exact.hidden, rounded.hidden.float(), dim=-1)
    assert cosine[~exact.pad].min() > 0.95
    assert rounded.nbytes < 0.55 * exact.nbytes


def test_resizing_keeps_the_aspect_and_pads_left_and_top_with_black():
    frames = torch.full((1, 24, 48, 3), 255, dtype=torch.uint8)
    square = resize_with_pad(frames, 32)
    assert square.shape == (1, 3, 32, 32)
    assert torch.equal(square[:, :, :16], torch.full((1, 3, 16, 32), -1.0))
    assert torch.allclose(square[:, :, 16:], torch.ones(1, 3, 16, 32))
    tall = resize_with_pad(frames.transpose(1, 2), 32)
    assert torch.equal(tall[..., :16], torch.full((1, 3, 32, 16), -1.0))
    whole = resize_with_pad(torch.full((1, 32, 32, 3), 51, dtype=torch.uint8), 32)
    assert torch.allclose(whole, torch.full_like(whole, 51 / 127.5 - 1))


def test_a_vocabulary_that_the_byte_tokenizer_does_not_fit_is_refused():
    config = {**TINY_SMOLVLM.config, "text_config": {**TINY_SMOLVLM.config["text_config"], "vocab_size": 100}}
    with pytest.raises(SpecError, match=r"vocab_size is 100; the byte-level tokenizer .* has 264 ids"):
        load_backbone(TINY_SMOLVLM.model_copy(update={"config": config}))


@pytest.fixture
def checkpoint(library_model, tmp_path):
    library_model.save_pretrained(tmp_path)
    words = {"[PAD]": 0, "[UNK]": 1, "pick": 2, "the": 3, "cube": 4}
    words |= {f"word{index}": index for index in range(5, 20)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_its_own_weights_and_tokenizer(library_model, checkpoint):
    spec = SmolVlmBackboneSpec(type="smolvlm", path=str(checkpoint), chunk_size=4)
    backbone = load_backbone(spec)
    ids, mask = backbone.tokenize(["pick the cube"], 6)
    assert ids.tolist() == [[2, 3, 4, 0, 0, 0]]
    assert mask.sum() == 3
    batch = fake_prefix_batch(backbone, 2)
    assert torch.equal(backbone.prefix(batch, "s").hidden, wrap(library_model).prefix(batch, "s").hidden)


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    spec = SmolVlmBackboneSpec(type="smolvlm", path=str(checkpoint))
    with pytest.raises(SpecError, match="smolvlm: cannot load"):
        load_backbone(spec)


def test_a_hub_id_is_not_downloaded_unless_it_is_allowed(monkeypatch):
    monkeypatch.delenv("JOYNEXUS_ALLOW_DOWNLOADS", raising=False)
    with pytest.raises(SpecError, match="downloaded only where JOYNEXUS_ALLOW_DOWNLOADS=1"):
        load_backbone(SmolVlmBackboneSpec(type="smolvlm", path="nobody/no-such-model"))
