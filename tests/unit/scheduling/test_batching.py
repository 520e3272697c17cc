import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.scheduling.batching import FORGET_S, WORTH, Arrivals, Expected, ForwardCost, wait_until


def measured(fixed_s: float, row_s: float, sizes: list[int], noise: float = 0.0) -> ForwardCost:
    draw, cost = random.Random(0), ForwardCost()
    for rows in sizes:
        cost.measured(rows, (fixed_s + row_s * rows) * (1.0 + noise * draw.uniform(-1.0, 1.0)))
    return cost


# the cost of a forward


@settings(max_examples=15, deadline=None)
@given(fixed=st.floats(0.0, 0.1), row=st.floats(1e-4, 0.01), seed=st.integers(0, 2**16))
def test_two_parts_of_a_forward_are_found(fixed: float, row: float, seed: int):
    draw = random.Random(seed)
    cost = measured(fixed, row, [draw.choice([1, 2, 4, 8, 16, 32]) for _ in range(200)])
    assert cost.is_known
    assert cost.per_row_s == pytest.approx(row, rel=0.05)
    assert cost.fixed_s == pytest.approx(fixed, rel=0.05, abs=0.05 * row)


def test_noise_moves_them_little():
    draw = random.Random(1)
    cost = measured(0.01, 0.001, [draw.randint(1, 32) for _ in range(300)], noise=0.2)
    assert cost(16) == pytest.approx(0.026, rel=0.15)
    assert cost.per_row_s == pytest.approx(0.001, rel=0.4)


def test_runs_of_one_size_tell_the_parts_not_apart_and_forget_nothing():
    same = measured(0.01, 0.001, [8] * 50)
    assert not same.is_known
    assert same(8) == pytest.approx(0.018)
    learnt = measured(0.01, 0.001, [1, 32, 4, 16] * 20 + [8] * 500)
    assert learnt.per_row_s == pytest.approx(0.001, rel=0.05)


def test_a_hiccup_counts_little():
    cost = measured(0.01, 0.001, [4, 8, 16, 32] * 10)
    cost.measured(8, 10.0)
    assert cost(8) < 0.025


def test_a_device_that_gets_faster_is_noticed():
    cost = measured(0.1, 0.01, [1, 8, 32] * 20)
    for rows in [1, 8, 32] * 40:
        cost.measured(rows, 0.01 + 0.001 * rows)
    assert cost(8) == pytest.approx(0.018, rel=0.1)


# who is expected


def returning(arrivals: Arrivals, tenant: str, *, away_s: float, times: int = 10, start: float = 0.0) -> float:
    """Ask and ask again; returns when the last answer came."""
    now = start
    for _ in range(times):
        arrivals.enter(tenant, now)
        now += 0.01
        arrivals.leave(tenant, now)
        now += away_s
    return now - away_s


def test_a_caller_is_expected_after_its_usual_time_and_not_for_ever():
    arrivals = Arrivals()
    left = returning(arrivals, "a", away_s=0.1)
    (expected,) = arrivals.expected(left, left + 1.0)
    assert (expected.tenant, expected.due) == ("a", pytest.approx(left + 0.1))
    assert arrivals.expected(left, left + 0.05) == []
    assert arrivals.expected(left + 0.5, left + 1.0) == []
    arrivals.forget("a")
    assert arrivals.expected(left, left + 1.0) == []


def test_who_is_here_is_not_expected():
    arrivals = Arrivals()
    left = returning(arrivals, "a", away_s=0.1)
    arrivals.enter("a", left + 0.1)
    assert arrivals.expected(left + 0.1, left + 1.0) == []


def test_each_of_a_tenants_callers_is_expected():
    arrivals = Arrivals()
    now = 0.0
    for _ in range(10):
        for _ in range(3):
            arrivals.enter("a", now, rows=2)
        for _ in range(3):
            arrivals.leave("a", now + 0.01)
        now += 0.11
    expected = arrivals.expected(now - 0.05, now + 1.0)
    assert [each.rows for each in expected] == [2, 2, 2]


def test_a_new_caller_is_expected_to_be_like_the_others():
    arrivals = Arrivals()
    left = returning(arrivals, "a", away_s=0.1)
    arrivals.enter("b", left)
    arrivals.leave("b", left)
    assert {each.tenant for each in arrivals.expected(left, left + 1.0)} == {"a", "b"}


def test_who_is_away_for_long_is_a_new_caller():
    arrivals = Arrivals()
    left = returning(arrivals, "a", away_s=0.1)
    arrivals.enter("a", left + 10 * FORGET_S)
    arrivals.leave("a", left + 10 * FORGET_S)
    (expected,) = arrivals.expected(left + 10 * FORGET_S, left + 10 * FORGET_S + 1.0)
    assert expected.due == pytest.approx(left + 10 * FORGET_S + 0.1)  # the pause taught nothing


# how long to wait


def decide(
    *dues: float, waiting: int = 1, fixed_s: float = 0.01 / WORTH, row_s: float = 0.0, **changes: float
) -> float:
    options = {"bound": 1.0, "sharing": waiting, "room": 100, **changes}
    expected = [Expected("a", due, 1, 0.0) for due in dues]
    return wait_until(0.0, waiting=waiting, expected=expected, cost=ForwardCost(fixed_s, row_s), **options)  # type: ignore[arg-type]


def test_nobody_expected_nobody_waits():
    assert decide() == 0.0


@pytest.mark.parametrize(("due", "waits"), [(0.009, True), (0.011, False)])
def test_one_waits_for_another_while_it_comes_within_what_the_fixed_part_of_a_forward_is_worth(due: float, waits: bool):
    assert decide(due) == (due if waits else 0.0)


def test_a_dearer_device_is_worth_a_longer_wait():
    assert decide(0.011, worth=2 * WORTH) == 0.011
    assert decide(0.021, worth=2 * WORTH) == 0.0


def test_the_more_wait_the_sooner_they_go():
    assert decide(0.004, waiting=2) == 0.004
    assert decide(0.004, waiting=3) == 0.0


def test_many_that_come_together_are_worth_a_longer_wait():
    assert decide(0.004, waiting=4) == 0.0
    assert decide(*[0.004] * 8, waiting=4) == 0.004


def test_rows_that_lengthen_the_forward_count_against_it():
    assert decide(0.001, waiting=2, row_s=0.001) == 0.001
    assert decide(0.001, waiting=2, row_s=0.006) == 0.0


def test_waiting_for_the_first_only_where_the_second_is_late():
    assert decide(0.001, 0.5) == 0.001


def test_bound_and_room_hold():
    assert decide(0.005, bound=0.004) == 0.0
    assert decide(0.005, room=0) == 0.0
    late = Expected("a", 0.005, 1, 0.1)
    cost = ForwardCost(0.01)
    assert wait_until(0.0, bound=0.02, waiting=1, sharing=1, room=9, expected=[late], cost=cost) == 0.02


@settings(max_examples=30, deadline=None)
@given(dues=st.lists(st.floats(0.0, 0.1), max_size=8), waiting=st.integers(1, 8), bound=st.floats(0.0, 0.1))
def test_a_wait_never_goes_beyond_its_bound(dues: list[float], waiting: int, bound: float):
    until = decide(*sorted(dues), waiting=waiting, bound=bound)
    assert 0.0 <= until <= bound


def test_rows_within_a_time() -> None:
    cost = ForwardCost(0.010, 0.001)
    assert [cost.rows_within(seconds) for seconds in (0.005, 0.010, 0.011, 0.0155, 0.042)] == [0, 0, 1, 5, 32]
    assert ForwardCost(0.010, 0.0).rows_within(0.005) == 0
    assert ForwardCost(0.010, 0.0).rows_within(0.010) > 10**9


def test_who_has_been_here_lately() -> None:
    arrivals = Arrivals()
    arrivals.enter("a", 0.0, 2)
    arrivals.enter("b", 0.0)
    assert arrivals.lately(0.5) == {}  # both are here
    arrivals.leave("a", 1.0)
    assert arrivals.lately(1.5) == {"a": 2}
    assert arrivals.lately(1.0 + FORGET_S + 0.1) == {}
