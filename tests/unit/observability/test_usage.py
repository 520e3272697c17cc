import json

import pytest

from joynexus.observability.usage import UsageLedger


def test_readings_are_counters_and_not_amounts():
    ledger = UsageLedger()
    for reading in (1.0, 2.5, 2.5, 4.0):
        ledger.observe("trainer:lite", "training", {"alice": reading})
    assert ledger.device_seconds("alice") == 4.0


def test_sources_and_kinds_add_up():
    ledger = UsageLedger()
    ledger.observe("trainer:lite", "training", {"alice": 1.0, "bob": 2.0})
    ledger.observe("replica-0", "inference", {"alice": 0.5})
    ledger.observe("replica-1", "inference", {"alice": 0.25})
    assert ledger.by_tenant() == {"alice": {"training": 1.0, "inference": 0.75}, "bob": {"training": 2.0}}
    assert ledger.device_seconds("nobody") == 0.0


def test_a_process_that_started_anew_loses_and_repeats_nothing():
    ledger = UsageLedger()
    ledger.observe("trainer:lite", "training", {"alice": 10.0, "bob": 1.0})
    ledger.observe("trainer:lite", "training", {"alice": 3.0, "bob": 2.0})  # bob's alone would not tell
    ledger.observe("trainer:lite", "training", {"alice": 4.0, "bob": 2.0})
    assert ledger.by_tenant() == {"alice": {"training": 14.0}, "bob": {"training": 3.0}}


def test_a_tenant_that_left_keeps_its_account():
    ledger = UsageLedger()
    ledger.observe("trainer:lite", "training", {"alice": 2.0, "bob": 1.0})
    ledger.observe("trainer:lite", "training", {"bob": 3.0})
    assert ledger.device_seconds("alice") == 2.0
    assert ledger.device_seconds("bob") == 3.0


def test_the_ledger_survives_the_master():
    ledger = UsageLedger()
    ledger.observe("trainer:lite", "training", {"alice": 2.0})
    ledger.charge("alice", "inference", 1.0)
    restored = UsageLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    for each in (ledger, restored):
        each.observe("trainer:lite", "training", {"alice": 5.0})
    assert restored.by_tenant() == ledger.by_tenant() == {"alice": {"training": 5.0, "inference": 1.0}}


@pytest.mark.parametrize("amount", [-1.0, float("nan")])
def test_nobody_is_charged_nonsense(amount):
    with pytest.raises(ValueError, match="Give an amount of at least 0"):
        UsageLedger().charge("alice", "training", amount)
