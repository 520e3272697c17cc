"""The record of groups: bounded, evenly thinned out, and handed on without loss or repetition."""

import time
from itertools import pairwise

import pytest

from joynexus.observability import group_log
from joynexus.observability.group_log import GroupColumns, GroupLog


def log_of(count: int) -> GroupLog:
    log = GroupLog()
    for index in range(count):
        log.append(tenants=1 + index % 3, samples=index)
    return log


def test_groups_are_kept_in_order():
    columns = log_of(5).since()
    assert columns.ordinal.tolist() == [0, 1, 2, 3, 4]
    assert columns.tenants.tolist() == [1, 2, 3, 1, 2]
    assert columns.samples.tolist() == [0, 1, 2, 3, 4]
    assert columns.time_s[-1] == pytest.approx(time.time(), abs=60.0)


def test_a_log_is_bounded_and_spans_everything(monkeypatch):
    monkeypatch.setattr(group_log, "MAX_GROUPS", 8)
    log = log_of(100)
    kept = log.since().ordinal.tolist()
    assert log.next_ordinal == 100
    assert 4 <= len(kept) <= 8
    assert kept[0] == 0
    assert kept[-1] >= 80
    assert len({later - earlier for earlier, later in pairwise(kept)}) == 1


def test_only_what_is_new_is_handed_on():
    log = log_of(5)
    assert log.since(3).ordinal.tolist() == [3, 4]
    assert len(log.since(5)) == 0


def test_overlapping_parts_are_taken_once_and_in_order():
    source, collected = log_of(3), GroupLog()
    collected.extend(source.since())
    for index in range(3, 6):
        source.append(tenants=1, samples=index)
    collected.extend(source.since(1))
    collected.extend(source.since(1))
    assert collected.since().samples.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_collector_thins_out_as_the_engine_does(monkeypatch):
    monkeypatch.setattr(group_log, "MAX_GROUPS", 8)
    source, collected = GroupLog(), GroupLog()
    for index in range(50):
        source.append(tenants=1, samples=index)
        collected.extend(source.since(index))
    assert collected.since().ordinal.tolist() == source.since().ordinal.tolist()


def test_what_was_handed_out_does_not_change():
    log = log_of(2)
    columns = log.since()
    columns.samples[0] = 99
    assert log.since().samples.tolist() == [0, 1]


def test_groups_of_several_engines_are_merged_by_time():
    first, second = log_of(2).since(), log_of(1).since()
    first.time_s[:] = [1.0, 3.0]
    second.time_s[:] = [2.0]
    merged = GroupColumns.merge([first, second])
    assert merged.time_s.tolist() == [1.0, 2.0, 3.0]
    assert merged.ordinal.tolist() == [0, 0, 1]
    assert len(GroupColumns.merge([])) == 0
