import pytest

from joynexus.actors.usage import as_mapping, merge_usage
from joynexus.observability.engine_usage import EngineUsage, GroupRecord


def usage(seconds: dict[str, float], *, groups: int, tenants: float, start: float = 0.0) -> EngineUsage:
    records = tuple(GroupRecord(start + index, 1, 2) for index in range(groups))
    return EngineUsage(
        device_seconds=seconds,
        busy_seconds=sum(seconds.values()),
        encoded=groups,
        reused=2 * groups,
        num_groups=groups,
        mean_tenants=tenants,
        mean_samples=4.0,
        groups=records,
    )


def test_counts_of_a_dead_and_a_living_engine_add_up():
    dead, living = (
        usage({"a": 1.0, "b": 2.0}, groups=3, tenants=1.0),
        usage({"b": 4.0}, groups=1, tenants=2.0, start=9.0),
    )
    merged = merge_usage([as_mapping(living), as_mapping(dead)])
    assert merged["device_seconds"] == {"a": 1.0, "b": 6.0}
    assert merged["busy_seconds"] == sum(merged["device_seconds"].values())
    assert (merged["encoded"], merged["reused"], merged["num_groups"]) == (4, 8, 4)
    assert merged["mean_tenants"] == pytest.approx(1.25)
    assert [each["time_s"] for each in merged["groups"]] == [0.0, 1.0, 2.0, 9.0]


def test_no_engine_is_nothing():
    assert merge_usage([])["device_seconds"] == {}
    assert merge_usage([])["mean_tenants"] == 0.0
