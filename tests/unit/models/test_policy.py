import statistics
import time

import numpy as np
import pytest
import torch

from joynexus.errors import InvalidBatchError, SpecError
from joynexus.models.backbone import load_backbone
from joynexus.models.policy import build_policy, encode, prefix_keys, prepare_prefix
from joynexus.models.prefix_store import PrefixStore
from joynexus.specs.action_module import OftModuleSpec
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.service import PrefixStoreSpec
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec
from joynexus.testing.model_inputs import UNCHANGED, fake_observation
from joynexus.types import NormalizationStats, Observation, PolicyStats

torch.set_num_threads(1)

ONE_CAMERA = {"images": np.zeros((2, 1, 32, 48, 3), np.uint8), "image_mask": np.ones((2, 1), np.bool_)}


def change(observation, **fields):
    values = {name: getattr(observation, name) for name in ("images", "image_mask", "state", "instructions")}
    return Observation(**(values | fields))


def action_stats(width):
    each = np.ones(width, dtype=np.float32)
    stats = NormalizationStats(mean=each, std=each, minimum=-each, maximum=each, q01=-each, q99=each, count=1)
    return PolicyStats(state=None, action=stats, source="demos.h5")


def keys_of(backbone, policy, observation, signature="s"):
    return prefix_keys(prepare_prefix(backbone, policy, observation, UNCHANGED), signature)


def test_the_template_wraps_each_instruction_and_braces_in_it_are_harmless(tiny, policy):
    observation = change(fake_observation(policy.observation, 1), instructions=("{0} {x}",))
    batch = prepare_prefix(tiny, policy, observation, UNCHANGED)
    expected, _ = tiny.tokenize(["do {0} {x} now"], 24)
    assert torch.equal(batch.tokens, expected)


def test_read_only_arrays_are_taken(tiny, policy):
    observation = fake_observation(policy.observation, 2)
    for each in (observation.images, observation.image_mask, observation.state):
        each.setflags(write=False)
    assert len(prepare_prefix(tiny, policy, observation, UNCHANGED)) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (ONE_CAMERA, r"images are uint8 \[2, 1, 32, 48, 3\], need uint8 \[2, 2"),
        (
            {"images": np.zeros((2, 2, 32, 32, 3), np.uint8)},
            r"frames are \[32, 32, 3\], the policy's are \[32, 48, 3\]",
        ),
        ({"state": np.zeros((2, 4), np.float32)}, r"state is float32 \[2, 4\], need float32 \[2, 3\]"),
        (ONE_CAMERA, r"image_mask is bool \[2, 1\], need bool \[2, 2\]"),
        ({"instructions": ("one",)}, r"need uint8 \[1, 2"),
        ({"instructions": ("x" * 60, "y")}, "tokens, the policy's bucket max_prompt_tokens is 24"),
    ],
)
def test_wrong_observations_are_refused_by_name(tiny, policy, fields, message):
    with pytest.raises(InvalidBatchError, match=message):
        prepare_prefix(tiny, policy, change(fake_observation(policy.observation, 2), **fields), UNCHANGED)


def test_no_rows_are_refused(tiny, policy):
    with pytest.raises(InvalidBatchError, match="there are no rows"):
        prepare_prefix(tiny, policy, fake_observation(policy.observation, 1).rows([]), UNCHANGED)


def test_keys_follow_content_and_nothing_else(tiny, policy):
    one = fake_observation(policy.observation, 2)
    keys = keys_of(tiny, policy, one)
    assert len({*keys}) == 2
    assert keys == keys_of(tiny, policy, one)
    assert keys[::-1] == keys_of(tiny, policy, one.rows([1, 0]))
    assert keys == keys_of(tiny, policy, change(one, state=one.state + 1))
    pixel = one.images.copy()
    pixel[0, 1, 0, 0, 0] ^= 1
    assert [a == b for a, b in zip(keys, keys_of(tiny, policy, change(one, images=pixel)), strict=True)] == [
        False,
        True,
    ]
    assert not {*keys} & {*keys_of(tiny, policy, change(one, instructions=("other", "words")))}
    assert not {*keys} & {*keys_of(tiny, policy, one, signature="t")}


def test_what_is_behind_a_masked_camera_does_not_matter(tiny, policy):
    one = fake_observation(policy.observation, 1)
    hidden = change(one, image_mask=np.array([[True, False]]))
    noise = one.images.copy()
    noise[:, 1] = 77
    assert keys_of(tiny, policy, hidden) == keys_of(tiny, policy, change(hidden, images=noise))
    assert keys_of(tiny, policy, hidden) != keys_of(tiny, policy, one)


def test_encode_computes_each_content_once_and_only_what_is_missing(tiny, policy):
    one = fake_observation(policy.observation, 3)
    rows = prepare_prefix(tiny, policy, one.rows([0, 1, 0, 2]), UNCHANGED)
    keys, store = prefix_keys(rows, "s"), PrefixStore(PrefixStoreSpec())
    before = tiny.num_encoded
    first, count = encode(tiny, store, rows, keys, "s")
    assert count.encoded == (True, True, False, True)
    assert (count.num_encoded, count.num_reused, tiny.num_encoded - before) == (3, 1, 3)
    second, count = encode(tiny, store, rows, keys, "s")
    assert count.num_encoded == 0
    assert tiny.num_encoded - before == 3
    plain = tiny.prefix(rows, "s")
    for features in (first, second):
        assert torch.equal(features.hidden, plain.hidden)
        assert torch.equal(features.pad, plain.pad)
        pairs = zip((*features.keys, *features.values), (*plain.keys, *plain.values), strict=True)
        assert all(torch.equal(mine, other) for mine, other in pairs)


def test_encoded_rows_may_be_changed_without_touching_the_store(tiny, policy):
    rows = prepare_prefix(tiny, policy, fake_observation(policy.observation, 1), UNCHANGED)
    keys, store = prefix_keys(rows, "s"), PrefixStore(PrefixStoreSpec())
    clean = encode(tiny, store, rows, keys, "s")[0].hidden.clone()
    for _ in range(2):
        found, _ = encode(tiny, store, rows, keys, "s")
        assert torch.equal(found.hidden, clean)
        found.hidden.zero_()


def test_encode_works_without_a_store_and_with_one_that_is_too_small(tiny, policy):
    rows = prepare_prefix(tiny, policy, fake_observation(policy.observation, 2), UNCHANGED)
    keys = prefix_keys(rows, "s")
    small = PrefixStore(PrefixStoreSpec(device_bytes=100, host_bytes=0))
    for store in (None, small):
        features, count = encode(tiny, store, rows, keys, "s")
        assert count.num_encoded == len(features) == 2


def test_a_policy_is_built_from_its_spec_and_seed_alone(tiny, policy):
    first, again, other = (build_policy(policy, tiny, seed=seed, stats=None) for seed in (1, 1, 2))
    assert first.signature == first.layout.signature == again.signature
    one, two, three = (list(each.module.parameters()) for each in (first, again, other))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_a_prefix_longer_than_the_module_reads_is_refused_when_it_is_built(tiny, policy):
    small = policy.action_module.model_copy(update={"max_prefix_tokens": 31})
    with pytest.raises(SpecError, match=r"has 32 tokens .* the module reads 31\. Raise max_prefix_tokens to 32"):
        build_policy(policy.model_copy(update={"action_module": small}), tiny, seed=0, stats=None)


def test_statistics_of_another_width_are_refused(tiny, policy):
    action = policy.action.model_copy(update={"normalization": "min_max"})
    seen = policy.observation.model_copy(update={"normalization": "identity"})
    normalized = policy.model_copy(update={"action": action, "observation": seen})
    assert build_policy(normalized, tiny, seed=0, stats=action_stats(2)).normalizer.mode == "min_max"
    with pytest.raises(SpecError, match=r"statistics from demos\.h5: action is 7 wide, the policy's is 2"):
        build_policy(normalized, tiny, seed=0, stats=action_stats(7))
    with pytest.raises(SpecError, match="no statistics"):
        build_policy(normalized, tiny, seed=0, stats=None)


def test_c56_a_mode_without_the_statistics_that_it_names_is_refused(tiny, policy):
    """Left as they are, states or actions would be in other units than the spec says."""
    action = policy.action.model_copy(update={"normalization": "min_max"})
    normalized = policy.model_copy(update={"action": action})
    with pytest.raises(SpecError, match=r"demos\.h5: there are none of the state, whose normalization is 'min_max'"):
        build_policy(normalized, tiny, seed=0, stats=action_stats(2))


def test_hashing_costs_little_beside_a_forward() -> None:
    """Both on this thread, one after the other, so that a busy machine slows both."""
    lite = load_backbone(LiteBackboneSpec())
    spec = ObservationSpec(cameras=("base", "wrist"), image_size=(128, 128), state_dim=2, max_prompt_tokens=32)
    policy = PolicySpec(
        backbone="lite",
        observation=spec,
        action=ActionSpec(dim=2, horizon=4, num_action_steps=2, normalization="identity"),
        action_module=OftModuleSpec(),
    )
    rows = prepare_prefix(lite, policy, fake_observation(spec, 2), UNCHANGED)
    ratios: list[float] = []
    for _ in range(3):
        began = time.thread_time()
        prefix_keys(rows, "s" * 64)
        hashed = time.thread_time()
        lite.prefix(rows, "s" * 64)
        ratios.append((hashed - began) / (time.thread_time() - hashed))
    assert statistics.median(ratios) < 0.02
