import dataclasses
import threading
import time
from itertools import pairwise

import pytest
import torch

from joynexus.observability import engine_usage
from joynexus.observability.engine_usage import EngineLedger, device_clock


def test_what_nobody_caused_is_split_so_that_charges_sum_to_the_busy_time():
    ledger = EngineLedger()
    ledger.charge({"a": 3.0, "b": 1.0}, busy=6.0)
    ledger.charge({"b": 2.0}, busy=2.5)
    usage = ledger.usage()
    assert usage.device_seconds == {"a": 4.0, "b": 4.5}
    assert usage.busy_seconds == 8.5


def test_time_without_a_tenant_is_not_booked():
    ledger = EngineLedger()
    ledger.charge({}, busy=1.0)
    assert ledger.usage().busy_seconds == 0.0


def test_clock_that_reads_less_than_its_parts_charges_the_parts():
    ledger = EngineLedger()
    ledger.charge({"a": 2.0}, busy=1.0)
    assert ledger.usage().device_seconds == {"a": 2.0}
    assert ledger.usage().busy_seconds == 2.0


def test_groups_are_counted_averaged_and_thinned_out(monkeypatch):
    monkeypatch.setattr(engine_usage, "MAX_GROUPS", 8)
    ledger = EngineLedger()
    for index in range(40):
        ledger.record_group(tenants=1 + index % 2, samples=index, encoded=3, reused=1)
    usage = ledger.usage()
    assert (usage.num_groups, usage.encoded, usage.reused) == (40, 120, 40)
    assert (usage.mean_tenants, usage.mean_samples) == (1.5, 19.5)
    kept = [group.samples for group in usage.groups]
    assert len(kept) <= 8
    assert kept[0] == 0
    assert len({later - earlier for earlier, later in pairwise(kept)}) == 1


def test_usage_becomes_plain_values():
    ledger = EngineLedger()
    ledger.record_group(tenants=2, samples=5, encoded=4, reused=1)
    (group,) = dataclasses.asdict(ledger.usage())["groups"]
    assert (group["tenants"], group["samples"]) == (2, 5)
    assert group["time_s"] == pytest.approx(time.time(), abs=60.0)


def test_clock_of_a_cpu_does_not_run_while_others_work():
    clock = device_clock(torch.device("cpu"))
    began = clock()
    other = threading.Thread(target=lambda: sum(range(3_000_000)))
    other.start()
    other.join()
    waited = clock() - began
    sum(range(3_000_000))
    assert clock() - began - waited > waited
