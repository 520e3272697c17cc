import pytest

from joynexus.scheduling.fairness import FairShare
from joynexus.scheduling.preemption import LEAST_GAIN, LONGEST_WAIT, MEMORY_S, Need, Pauses, is_worth_it


def test_a_little_is_not_worth_a_forward_that_nobody_shares():
    assert is_worth_it(1.1 * LEAST_GAIN, 1.0)
    assert not is_worth_it(0.9 * LEAST_GAIN, 1.0)
    assert not is_worth_it(-0.5, 1.0)


def test_need_is_the_part_of_the_device_and_fades():
    need = Need()
    now = 0.0
    for _ in range(1000):  # a: 10 ms in each 50 ms, b: 5 ms
        now += 0.05
        need.note("a", 0.010, now)
        need.note("b", 0.005, now)
    assert need.of_others("b", now) == pytest.approx(0.2, rel=0.05)
    assert need.of_others("a", now) == pytest.approx(0.1, rel=0.05)
    assert need.of_others("c", now) == need.of_all(now) == pytest.approx(0.3, rel=0.05)
    assert need.of_others("c", now + 3 * MEMORY_S) < 0.02
    need.forget("a")
    need.forget("a")
    assert need.of_others("c", now) == pytest.approx(0.1, rel=0.05)


def test_who_is_owed_more_than_whoever_is_served():
    fair = FairShare()
    for tenant, priority in (("flood", "normal"), ("a", "normal"), ("b", "normal"), ("low", "low"), ("high", "high")):
        fair.add(tenant, 1.0, priority)
    ready = dict.fromkeys(("flood", "a", "b", "low", "high"), 0.0)
    fair.choose(ready)
    fair.charge("b", 2.0)
    fair.charge("flood", 1.0)
    assert fair.before({"flood"}, ready) == ["high", "a"]
    assert fair.before({"flood", "a"}, ready) == ["high"]
    assert fair.before({"high"}, ready) == []


def test_an_estimate_of_what_runs_is_nobody_elses_debt():
    """The flood is charged ten times too much, and somebody comes before that is settled."""
    fair = FairShare()
    for tenant in ("flood", "a"):
        fair.add(tenant)
    fair.choose({"flood": 0.0})
    fair.charge("flood", 10.0)
    assert fair.before({"flood"}, {"flood": 0.0, "a": 0.0}) == ["a"]
    turns = fair.begin_round({"flood": 0.0, "a": 0.0}, ["a"], {"flood"})
    assert turns.next() == "a"
    turns.charge("a", 1.0, has_more=False)
    fair.settle("flood", -9.0)
    fair.charge("flood", 1.0)
    assert fair.before({"flood"}, {"flood": 0.0, "a": 0.0}) == ["a"]


def test_a_floods_batch_is_as_long_as_its_pauses_allow():
    pauses = Pauses()
    assert pauses.longest_flood(0.01) == LONGEST_WAIT * 0.01  # without pauses it would be waited for from end to end
    pauses.measured(0.002, 0.020)
    assert pauses.longest_flood(0.01) == pytest.approx(LONGEST_WAIT * 0.1)
    for _ in range(30):
        pauses.measured(0.030, 0.020)  # clocks of two threads
    assert pauses.longest_flood(0.01) == pytest.approx(LONGEST_WAIT * 0.01, rel=0.01)
