import pickle

import numpy as np
import pytest
import torch

from joynexus.errors import InvalidBatchError
from joynexus.models.backbone import load_backbone
from joynexus.models.prefix import PrefixFeatures, from_arrays, to_arrays
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.types import Observation, PrefixArrays, TrainingBatch

CPU = torch.device("cpu")


def drawn(rows, dtype, *, layers=2, signature="s"):
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, 5, 4), *[(rows, 2, 5, 3)] * (2 * layers)]
    hidden, *others = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    pad = torch.zeros(rows, 5, dtype=torch.bool)
    pad[:, 3:] = True
    return PrefixFeatures(
        hidden=hidden, pad=pad, keys=tuple(others[:layers]), values=tuple(others[layers:]), signature=signature
    )


def tensors(features):
    return [features.hidden, features.pad, *features.keys, *features.values]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same(left, right):
    assert left.signature == right.signature
    for a, b in zip(tensors(left), tensors(right), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [0, 2])
def test_arrays_give_the_features_back_bit_by_bit(dtype, layers):
    features = drawn(3, dtype, layers=layers)
    features.hidden[0, 0] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).to(dtype)
    arrays = pickle.loads(pickle.dumps(to_arrays(features)))
    assert arrays.nbytes == features.nbytes
    assert len(arrays) == 3
    assert_same(from_arrays(arrays, CPU), features)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_backbone_answers_comes_back_bit_by_bit(dtype):
    backbone = load_backbone(TINY_SMOLVLM.model_copy(update={"dtype": dtype}))
    features = backbone.prefix(fake_prefix_batch(backbone, 3), "tiny")
    assert_same(from_arrays(to_arrays(features), CPU), features)


def test_the_copies_share_nothing_with_their_source_and_may_come_from_read_only_arrays():
    features = drawn(2, torch.float32)
    arrays = to_arrays(features)
    kept = arrays.arrays["hidden"].copy()
    features.hidden.zero_()
    assert np.array_equal(arrays.arrays["hidden"], kept)
    for each in arrays.arrays.values():
        each.flags.writeable = False
    again = from_arrays(arrays, CPU)
    again.hidden.zero_()
    assert np.array_equal(arrays.arrays["hidden"], kept)


def test_a_transposed_view_is_shipped_in_order():
    features = drawn(2, torch.bfloat16, layers=0)
    turned = PrefixFeatures(
        hidden=features.hidden.transpose(1, 2), pad=torch.zeros(2, 4, dtype=torch.bool), signature="s"
    )
    arrays = to_arrays(turned)
    assert arrays.arrays["hidden"].flags.c_contiguous
    assert_same(from_arrays(arrays, CPU), turned)


def test_other_types_of_features_are_not_shipped():
    with pytest.raises(InvalidBatchError, match="float64"):
        to_arrays(drawn(1, torch.float64))


@pytest.mark.parametrize(
    "change",
    [
        {"drop": "value/1"},
        {"add": ("key/7", np.zeros((2, 2, 5, 3), np.float32))},
        {"add": ("hidden", np.zeros((2, 5, 4), np.float64))},
        {"add": ("pad", np.zeros((2, 5), np.uint8))},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
    ],
)
def test_arrays_of_another_form_are_refused(change):
    arrays = to_arrays(drawn(2, torch.float32))
    named = {name: each for name, each in arrays.arrays.items() if name != change.get("drop")}
    named |= dict([change["add"]]) if "add" in change else {}
    wrong = PrefixArrays(arrays=named, dtype=change.get("dtype", arrays.dtype), signature="s")
    with pytest.raises(InvalidBatchError, match="features"):
        from_arrays(wrong, CPU)


def test_rows_are_picked_and_stacked():
    arrays = to_arrays(drawn(4, torch.bfloat16))
    parts = [arrays.rows([2, 0]), arrays.rows(slice(1, 2))]
    stacked = PrefixArrays.concatenate(parts)
    assert len(stacked) == 3
    for name, each in stacked.arrays.items():
        assert np.array_equal(each, arrays.arrays[name][[2, 0, 1]])
    parts[0].arrays["hidden"][:] = 0
    assert arrays.arrays["hidden"].any()


@pytest.mark.parametrize(
    "other", [drawn(1, torch.float32, signature="t"), drawn(1, torch.bfloat16), drawn(1, torch.float32, layers=1)]
)
def test_features_of_other_kinds_are_not_stacked(other):
    with pytest.raises(InvalidBatchError, match="kinds"):
        PrefixArrays.concatenate([to_arrays(drawn(1, torch.float32)), to_arrays(other)])


def observation(rows, cameras=1):
    return Observation(
        images=np.full((rows, cameras, 8, 8, 3), 7, dtype=np.uint8),
        image_mask=np.ones((rows, cameras), dtype=np.bool_),
        state=np.zeros((rows, 2), dtype=np.float32),
        instructions=("go",) * rows,
    )


def test_an_observation_without_frames_says_so():
    seen = observation(2)
    bare = seen.without_frames()
    assert (seen.has_frames, bare.has_frames) == (True, False)
    assert bare.images.shape == (2, 1, 0, 0, 3)
    assert bare.nbytes == seen.nbytes - seen.images.nbytes
    assert not bare.rows([0]).has_frames
    assert not Observation.concatenate([bare, bare]).has_frames
    assert observation(2, cameras=0).without_frames().has_frames


def batch(rows, **more):
    return TrainingBatch(
        observation=observation(rows),
        actions=np.zeros((rows, 2, 1), dtype=np.float32),
        action_is_pad=np.zeros((rows, 2), dtype=np.bool_),
        sample_ids=tuple(f"s{row}" for row in range(rows)),
        **more,
    )


def test_the_rows_of_a_batch_keep_their_features():
    features = to_arrays(drawn(3, torch.float32))
    full = batch(3, features=features)
    assert full.nbytes == batch(3).nbytes + features.nbytes
    assert full.num_featured == 3
    picked = full.rows([2, 0])
    assert np.array_equal(picked.features.arrays["hidden"], features.arrays["hidden"][[2, 0]])
    both = TrainingBatch.concatenate([picked, full])
    assert len(both.features) == 5
    some = batch(3, features=features, featured=np.array([True, False, True]))
    assert some.num_featured == 2
    assert some.rows([1]).num_featured == 0
    for wrong in (batch(1), some):
        with pytest.raises(InvalidBatchError, match="features"):
            TrainingBatch.concatenate([full, wrong])
