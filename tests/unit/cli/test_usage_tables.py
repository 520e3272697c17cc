"""What ``joynexus usage`` shows."""

import json

from rich.console import Console

from joynexus.cli.usage import engines_table, tenants_table
from joynexus.observability.engine_usage import EngineLedger, RowCount
from joynexus.observability.usage_counts import as_counts, merge_usage


def counts() -> dict:
    ledger = EngineLedger()
    ledger.charge("alice", "prefix", 3.0)
    ledger.charge("alice", "backward", 1.25)
    ledger.charge("bob", "copy", 0.75)
    ledger.record_group({"alice": RowCount(samples=40, encoded=10, reused=25, carried=5), "bob": RowCount(samples=7)})
    merged = merge_usage([as_counts(ledger.usage(), engine="trainer-lite")])
    (engine,) = merged["engines"]
    engine |= {"wall_seconds": 20.0, "utilisation": 0.25, "idle": {"no_data": 12.5, "waiting_for_group": 2.5}}
    return {**merged, "idle": engine["idle"], "utilisation": 0.25}


def shown(table: object) -> list[str]:
    """The lines of a table, with single spaces and no borders."""
    console = Console(width=240)
    with console.capture() as captured:
        console.print(table)
    return [" ".join(line.replace("\u2502", " ").split()) for line in captured.get().splitlines()]


def test_tenants_are_shown_by_kind_with_their_prefixes():
    lines = shown(tenants_table("lite: training", counts()))
    assert "alice 4.25 85.0 % 3.00 0.00 1.25 0.00 0.00 0.00 40 10 25 5" in lines
    assert "bob 0.75 15.0 % 0.00 0.00 0.00 0.00 0.75 0.00 7 0 0 0" in lines
    text = " ".join(lines)
    assert "10 prefixes encoded, 25 reused, 5 carried; 1 groups of 2.00 tenants and 47.0 samples" in text
    assert "busy 5.0 s (25% of its capacity); idle: no data 12.5 s, waiting for group 2.5 s" in text


def test_engines_are_shown_with_why_they_were_idle():
    lines = shown(engines_table({"lite": {"training": counts()}}))
    assert "trainer-lite 5.0 20.0 25% 12.5 2.5 0.0 0.0" in lines


def test_a_service_that_has_done_nothing_is_shown():
    nothing = merge_usage([])
    assert shown(tenants_table("x", nothing))
    assert shown(engines_table({"x": {"training": nothing}}))
    assert json.loads(json.dumps(nothing)) == nothing
