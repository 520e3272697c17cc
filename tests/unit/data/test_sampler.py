import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.data.sampler import EpochSampler
from joynexus.errors import SpecError


def _stream(sampler: EpochSampler, batches: int, first: int = 0) -> list[int]:
    return list(itertools.chain.from_iterable(sampler.batch(first + each).tolist() for each in range(batches)))


@settings(deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 2**63))
def test_every_epoch_is_a_permutation_whatever_the_batch_size(num_samples: int, batch_size: int, seed: int):
    stream = _stream(EpochSampler(num_samples, batch_size, seed=seed), 3 * num_samples)
    assert len(stream) == 3 * num_samples * batch_size
    for start in range(0, len(stream) - num_samples + 1, num_samples):
        assert sorted(stream[start : start + num_samples]) == list(range(num_samples))


def test_a_new_sampler_goes_on_exactly_where_another_stopped():
    whole = _stream(EpochSampler(23, 5, seed=7), 30)
    resumed = _stream(EpochSampler(23, 5, seed=7), 11) + _stream(EpochSampler(23, 5, seed=7), 19, first=11)
    assert resumed == whole


def test_batches_do_not_depend_on_what_was_asked_before():
    asked = EpochSampler(23, 5, seed=7)
    for ordinal in (90, 2, 41, 3, 0, 90):
        assert asked.batch(ordinal).tolist() == EpochSampler(23, 5, seed=7).batch(ordinal).tolist()


def test_epochs_and_seeds_differ_in_order():
    sampler = EpochSampler(50, 50, seed=0)
    assert sampler.batch(0).tolist() != sampler.batch(1).tolist()
    assert sampler.batch(0).tolist() != EpochSampler(50, 50, seed=1).batch(0).tolist()


def test_the_order_is_pinned():
    # A change here changes what every resumed run learns from next.
    assert EpochSampler(8, 8, seed=0).batch(0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_a_batch_can_hold_the_end_of_one_epoch_and_the_beginning_of_the_next():
    batch = EpochSampler(4, 6, seed=0).batch(0)
    assert batch.dtype == np.int64
    assert sorted(batch[:4].tolist()) == [0, 1, 2, 3]
    assert len(batch) == 6


@pytest.mark.parametrize(("num_samples", "batch_size", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_samplers_are_refused(num_samples: int, batch_size: int, seed: int):
    with pytest.raises(SpecError, match="sampler"):
        EpochSampler(num_samples, batch_size, seed=seed)


def test_a_negative_ordinal_is_refused():
    with pytest.raises(SpecError, match="-1"):
        EpochSampler(3, 1, seed=0).batch(-1)
