import torch

from joynexus.models.prefix import PrefixFeatures
from joynexus.models.prefix_store import PrefixStore
from joynexus.specs.service import PrefixStoreSpec

ROW_BYTES = 4 * 2 * 4 + 4 + 2 * (1 * 4 * 2 * 4)


def features(rows, first=0.0):
    values = first + torch.arange(rows, dtype=torch.float32)
    return PrefixFeatures(
        hidden=values[:, None, None].expand(rows, 4, 2).contiguous(),
        pad=torch.zeros(rows, 4, dtype=torch.bool),
        keys=(values[:, None, None, None].expand(rows, 1, 4, 2).contiguous(),),
        values=(torch.zeros(rows, 1, 4, 2),),
        signature="s",
    )


def store(rows, host_rows=0):
    return PrefixStore(PrefixStoreSpec(device_bytes=rows * ROW_BYTES, host_bytes=host_rows * ROW_BYTES))


def test_rows_are_found_by_key_with_all_their_parts():
    kept = store(4)
    kept.insert([b"a", b"b"], features(2))
    first, second, third = kept.lookup([b"b", b"x", b"a"])
    assert second is None
    assert first.hidden[0, 0, 0] == 1
    assert third.keys[0][0, 0, 0, 0] == 0
    assert first.signature == "s"
    assert (kept.hits, kept.misses) == (2, 1)
    assert kept.nbytes == 2 * ROW_BYTES


def test_the_least_recently_used_row_leaves_first_and_the_budget_holds():
    kept = store(2)
    kept.insert([b"a", b"b"], features(2))
    kept.lookup([b"a"])
    kept.insert([b"c"], features(1, first=9.0))
    assert [row is not None for row in kept.lookup([b"a", b"b", b"c"])] == [True, False, True]
    assert kept.nbytes == 2 * ROW_BYTES
    assert len(kept) == 2


def test_on_a_cpu_both_budgets_are_one():
    kept = store(1, host_rows=2)
    kept.insert([b"a", b"b", b"c", b"d"], features(4))
    assert [row is not None for row in kept.lookup([b"a", b"b", b"c", b"d"])] == [False, True, True, True]


class TwoTierStore(PrefixStore):
    """As if the backbone were on an accelerator."""

    def _has_host_tier(self):
        return True


def test_a_row_that_leaves_the_device_waits_on_the_host_and_comes_back():
    kept = TwoTierStore(PrefixStoreSpec(device_bytes=2 * ROW_BYTES, host_bytes=ROW_BYTES))
    kept.insert([b"a", b"b", b"c"], features(3))
    assert (len(kept._device.rows), len(kept._host.rows), kept.nbytes) == (2, 1, 3 * ROW_BYTES)
    assert kept.lookup([b"a"])[0].hidden.sum() == 0
    assert [*kept._device.rows] == [b"c", b"a"]
    assert [*kept._host.rows] == [b"b"]
    kept.insert([b"b"], features(1, first=5.0))
    assert kept.lookup([b"b"])[0].hidden[0, 0, 0] == 5
    assert [*kept._host.rows] == [b"c"]
    kept.insert([b"d"], features(1))
    assert [row is not None for row in kept.lookup([b"c", b"a", b"b", b"d"])] == [False, True, True, True]


def test_rows_are_copies_that_nobody_outside_can_change():
    kept = store(2)
    given = features(1)
    kept.insert([b"a"], given)
    given.hidden.fill_(5.0)
    assert kept.lookup([b"a"])[0].hidden.sum() == 0
    assert kept.lookup([b"a"])[0].hidden.untyped_storage().nbytes() == 32


def test_a_row_that_never_fits_is_not_kept_and_drives_none_out():
    kept = PrefixStore(PrefixStoreSpec(device_bytes=ROW_BYTES, host_bytes=0))
    kept.insert([b"a"], features(1))
    large = PrefixFeatures(hidden=torch.zeros(1, 40, 2), pad=torch.zeros(1, 40, dtype=torch.bool), signature="s")
    kept.insert([b"large"], large)
    assert [row is not None for row in kept.lookup([b"a", b"large"])] == [True, False]
    nothing = PrefixStore(PrefixStoreSpec(device_bytes=0, host_bytes=0))
    nothing.insert([b"a"], features(1))
    assert len(nothing) == 0


def test_inserting_a_key_again_replaces_its_row():
    kept = store(2)
    kept.insert([b"a"], features(1))
    kept.insert([b"a"], features(1, first=3.0))
    assert kept.nbytes == ROW_BYTES
    assert kept.lookup([b"a"])[0].hidden[0, 0, 0] == 3


def test_clear_forgets_rows_and_keeps_counting():
    kept = store(2)
    kept.insert([b"a"], features(1))
    kept.lookup([b"a"])
    kept.clear()
    assert (len(kept), kept.nbytes, kept.hits) == (0, 0, 1)
