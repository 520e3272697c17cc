"""Which items go without frames: pure decisions, driven by hand."""

from joynexus.data.light_epochs import LEAST_FETCHED, LightEpochs
from joynexus.data.sampler import EpochSampler


def epochs(*, rows: int = 40, batch_size: int = 4, is_enabled: bool = True) -> LightEpochs:
    made = LightEpochs(EpochSampler(rows, batch_size, seed=1), is_enabled=is_enabled)
    made.begin(0, stored_from=0)
    return made


def choices(light: LightEpochs, first: int, last: int) -> list[bool]:
    return [light.choose(ordinal) for ordinal in range(first, last)]


def test_an_item_is_light_when_all_its_rows_were_sent() -> None:
    assert choices(epochs(), 0, 25) == [False] * 10 + [True] * 15
    assert not any(choices(epochs(is_enabled=False), 0, 25))
    # Batches that span two epochs: what is new in one is not light.
    uneven = epochs(rows=10, batch_size=4)
    assert choices(uneven, 0, 2) == [False, False]
    sampler = EpochSampler(10, 4, seed=1)
    sent = {int(each) for ordinal in range(2) for each in sampler.batch(ordinal)}
    assert uneven.choose(2) == (set(sampler.batch(2).tolist()) <= sent)


def test_a_row_twice_in_its_first_batch_is_not_light() -> None:
    assert choices(epochs(rows=3, batch_size=4), 0, 2) == [False, True]


def test_a_new_producer_trusts_a_trainer_that_stayed_and_not_a_new_one() -> None:
    stayed, fresh, half = epochs(), epochs(), epochs()
    stayed.begin(12, stored_from=0)
    fresh.begin(12, stored_from=12)
    half.begin(5, stored_from=0)
    assert all(choices(stayed, 12, 30))
    found = choices(fresh, 12, 40)
    assert found[:8] == [False] * 8  # the rest of its epoch, then what it has not seen of the next one
    assert False in found[8:18]
    assert all(found[18:])
    assert choices(half, 5, 12) == [False] * 5 + [True] * 2


def test_few_fetched_items_change_nothing() -> None:
    light = epochs()
    choices(light, 0, 50)
    for ordinal in (3, 12, 12, 25, 40):  # one that was full, and one twice
        light.fetched(ordinal)
    assert all(choices(light, 50, 60))


def test_many_fetched_items_bring_full_ones_for_longer_and_longer() -> None:
    light = epochs()
    pauses: list[int] = []
    ordinal = 0
    for _ in range(4):
        full = 0
        while not light.choose(ordinal):
            ordinal, full = ordinal + 1, full + 1
        pauses.append(full)
        ordinal += 1
        tried = list(range(ordinal - 1, ordinal + 7))
        assert all(choices(light, ordinal, ordinal + 7))
        ordinal += 7
        for each in tried:  # the answers come late, and those after the first few tell nothing new
            light.fetched(each)
    assert pauses[0] == 10  # the first epoch
    for pause, epochs_between in zip(pauses[1:], (1, 2, 4), strict=True):  # and until all rows were sent again
        assert 10 * epochs_between <= pause < 10 * (epochs_between + 1)


def test_a_try_that_held_for_an_epoch_begins_anew() -> None:
    light = epochs()
    choices(light, 0, 200)
    for each in range(190, 190 + 8):
        light.fetched(each)
    assert choices(light, 200, 212) == [False] * 10 + [True] * 2


def test_a_share_that_is_small_is_borne() -> None:
    light = epochs()
    choices(light, 0, 200)
    for each in range(100, 200, 8):
        light.fetched(each)
    assert LEAST_FETCHED == 4
    assert all(choices(light, 200, 210))
