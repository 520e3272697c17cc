"""What an engine's counts say, and that they say the same after every sum, split and subtraction."""

import dataclasses
import pickle

import pytest

from joynexus.observability.engine_usage import EngineLedger, RowCount
from joynexus.observability.usage_counts import as_counts, merge_usage, usage_growth


def counts(seconds: dict[str, float], *, idle_s: float = 0.0, name: str = "trainer") -> dict:
    ledger = EngineLedger()
    for tenant, amount in seconds.items():
        ledger.charge(tenant, "prefix", 0.75 * amount)
        ledger.charge(tenant, "backward", 0.25 * amount)
    ledger.record_group({tenant: RowCount(samples=4, encoded=1, reused=2, carried=1) for tenant in seconds})
    usage = dataclasses.replace(
        ledger.usage(), idle={"no_data": idle_s}, wall_seconds=idle_s + 1.0, capacity_seconds=2 * (idle_s + 1.0)
    )
    return as_counts(usage, engine=name)


def test_charges_are_summed_by_tenant_and_kind():
    ledger = EngineLedger()
    for tenant, kind, seconds in (
        ("a", "prefix", 1.0),
        ("b", "prefix", 2.0),
        ("a", "backward", 0.5),
        ("a", "prefix", 4.0),
    ):
        ledger.charge(tenant, kind, seconds)
    usage = ledger.usage()
    assert usage.by_kind == {"a": {"prefix": 5.0, "backward": 0.5}, "b": {"prefix": 2.0}}
    assert usage.device_seconds == {"a": 5.5, "b": 2.0}
    assert usage.busy_seconds == 7.5


def test_rows_are_summed_by_tenant_and_groups_averaged():
    ledger = EngineLedger()
    ledger.record_group({"a": RowCount(samples=3, encoded=3), "b": RowCount(samples=5, encoded=1, reused=2, carried=2)})
    ledger.record_group({"a": RowCount(samples=4, reused=4)})
    usage = ledger.usage()
    assert usage.samples == {"a": 7, "b": 5}
    assert usage.prefixes["a"] == {"encoded": 3, "reused": 4, "carried": 0}
    assert usage.prefixes["b"] == {"encoded": 1, "reused": 2, "carried": 2}
    assert (usage.encoded, usage.reused, usage.carried) == (4, 6, 2)
    assert (usage.num_groups, usage.mean_tenants, usage.mean_samples) == (2, 1.5, 6.0)


def test_an_engine_that_has_done_nothing():
    usage = EngineLedger().usage()
    assert (usage.busy_seconds, usage.device_seconds, usage.mean_samples) == (0.0, {}, 0.0)
    assert merge_usage([as_counts(usage)])["utilisation"] is None


def test_what_is_sent_with_a_ping_stays_small_whatever_the_number_of_groups():
    ledger = EngineLedger()
    for index in range(3000):
        ledger.record_group({f"tenant-{index % 8}": RowCount(samples=1, encoded=1)})
    assert len(pickle.dumps(ledger.usage())) < 4000
    assert len(pickle.dumps(ledger.groups.since())) < 60_000  # all that are kept
    assert len(pickle.dumps(ledger.groups.since(2990))) < 2000


def test_counts_of_several_engines_add_up():
    merged = merge_usage([counts({"a": 1.0, "b": 2.0}), counts({"b": 4.0}, idle_s=3.0, name="replica")])
    assert merged["device_seconds"] == {"a": 1.0, "b": 6.0}
    assert merged["by_kind"]["b"] == {"prefix": 4.5, "backward": 1.5}
    assert merged["busy_seconds"] == 7.0
    assert merged["prefixes"]["b"] == {"encoded": 2, "reused": 4, "carried": 2}
    assert merged["samples"] == {"a": 4, "b": 8}
    assert (merged["encoded"], merged["num_groups"], merged["mean_tenants"]) == (3, 2, 1.5)
    assert merged["idle"] == {"no_data": 3.0}
    assert merged["utilisation"] == pytest.approx(7.0 / 10.0)
    assert [(each["name"], each["busy_seconds"]) for each in merged["engines"]] == [("trainer", 3.0), ("replica", 4.0)]


def test_merging_takes_nothing_from_its_arguments():
    one, other = counts({"a": 1.0}), counts({"a": 2.0})
    merge_usage([one, other])
    assert one == counts({"a": 1.0})


def test_growth_is_what_a_run_added():
    before = [counts({"a": 1.0}), counts({"b": 1.0})]
    after = [*before, counts({"a": 4.0, "c": 2.0}, idle_s=5.0)]
    grown = usage_growth(before, after)
    assert grown["by_kind"]["a"] == {"prefix": 3.0, "backward": 1.0}
    assert grown["by_kind"]["c"] == {"prefix": 1.5, "backward": 0.5}
    assert grown["samples"] == {"a": 4, "b": 0, "c": 4}
    assert (grown["num_groups"], grown["mean_tenants"], grown["mean_samples"]) == (1, 2.0, 8.0)
    assert (grown["busy_seconds"], grown["idle"]) == (6.0, {"no_data": 5.0})


def test_nothing_is_nothing():
    assert merge_usage([])["device_seconds"] == {}
    assert usage_growth([], [])["mean_tenants"] == 0.0
