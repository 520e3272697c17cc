import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.scheduling.shipping import (
    MARGIN,
    MAX_TOO_LARGE,
    MIN_PUTS,
    FeatureShipping,
    ShippingRates,
    is_worth_shipping,
    max_feature_bytes,
)

MB = 1_000_000


def rates(**changes: float) -> ShippingRates:
    """Features of 1 MB and frames of 0.5 MB at 1 GB/s: 2 MB more, 2 ms; encoding takes 5 ms."""
    base = {"feature_bytes": 1.0 * MB, "frame_bytes": 0.5 * MB, "seconds_per_byte": 1e-9, "encode_seconds": 5e-3}
    return ShippingRates(**{**base, **changes})


def shipping(mode="auto", max_bytes=100 * MB) -> FeatureShipping:
    return FeatureShipping(mode, max_bytes=max_bytes)


def measure(decision: FeatureShipping, *, puts: int = MIN_PUTS, per_byte: float = 1e-9, encode: float = 5e-3) -> None:
    """Answers of 4 rows, and puts of 10 MB beside calls of 1 ms that carry nothing."""
    decision.note_answer(rows=4, feature_bytes=4 * MB, frame_bytes=2 * MB, encode_seconds=encode)
    for _ in range(puts):
        decision.note_empty_call(1e-3)
        decision.note_put(10 * MB, 1e-3 + per_byte * 10 * MB)


def test_features_take_three_hops_and_frames_would_take_two():
    assert rates().transport_seconds == pytest.approx(2e-3)
    assert rates(frame_bytes=0.0).transport_seconds == pytest.approx(3e-3)
    assert rates(frame_bytes=3.0 * MB).transport_seconds == 0.0


@pytest.mark.parametrize(("encode", "expected"), [(2.01e-3, True), (1.99e-3, False), (0.0, False)])
def test_the_first_decision_is_the_cheaper_way(encode, expected):
    assert is_worth_shipping(rates(encode_seconds=encode), is_shipping=None) is expected


def test_smaller_features_than_frames_always_travel():
    assert is_worth_shipping(rates(frame_bytes=2.0 * MB, encode_seconds=1e-9, seconds_per_byte=1.0), is_shipping=None)


@settings(max_examples=50, deadline=None)
@given(
    ratio=st.floats(0.01, 100.0),
    is_shipping=st.booleans(),
)
def test_a_decision_is_taken_back_only_where_it_is_clearly_worse(ratio, is_shipping):
    transport = rates().transport_seconds
    decided = is_worth_shipping(rates(encode_seconds=transport * ratio), is_shipping=is_shipping)
    if 1 / MARGIN * 1.001 < ratio < MARGIN * 0.999:
        assert decided is is_shipping
    elif ratio > MARGIN * 1.001 or ratio < 1 / MARGIN * 0.999:
        assert decided is (ratio > 1)


def test_features_travel_until_enough_is_measured():
    decision = shipping()
    assert (decision.reason, decision.rates, decision.wants_features) == ("measuring", None, True)
    measure(decision, puts=MIN_PUTS - 1)
    assert decision.reason == "measuring"
    decision.note_put(10 * MB, 11e-3)
    assert decision.reason == "cheaper"
    assert decision.rates.seconds_per_byte == pytest.approx(1e-9)
    assert decision.rates.feature_bytes == MB


def test_it_keeps_measuring_while_a_rate_is_unknown():
    decision = shipping()
    decision.note_answer(rows=1, feature_bytes=MB, frame_bytes=0, encode_seconds=0.0)
    for _ in range(5):
        decision.note_put(MB, 1.0)
    assert decision.reason == "measuring"
    decision.note_answer(rows=1, feature_bytes=0, frame_bytes=0, encode_seconds=1e-3)
    decision.note_put(MB, 1.0)
    assert (decision.reason, decision.wants_features) == ("dearer", False)


def test_the_decision_follows_the_rates_both_ways():
    decision = shipping()
    measure(decision, per_byte=1e-7)
    assert decision.reason == "dearer"
    measure(decision, per_byte=1e-9, puts=40)
    assert decision.reason == "cheaper"
    measure(decision, per_byte=1e-9, encode=1.8e-3)
    assert decision.reason == "cheaper"  # within the margin
    measure(decision, per_byte=1e-9, encode=1.5e-3)
    assert decision.reason == "dearer"
    measure(decision, per_byte=1e-9, encode=2.2e-3)
    assert decision.reason == "dearer"
    measure(decision, per_byte=1e-9, encode=2.6e-3)
    assert decision.reason == "cheaper"


def test_a_pause_of_the_machine_turns_nothing():
    decision = shipping()
    measure(decision, puts=9)
    decision.note_put(10 * MB, 30.0)
    assert decision.reason == "cheaper"


def test_calls_that_take_longer_than_puts_make_transport_free():
    decision = shipping()
    decision.note_empty_call(1.0)
    decision.note_answer(rows=1, feature_bytes=MB, frame_bytes=0, encode_seconds=1e-6)
    for _ in range(MIN_PUTS):
        decision.note_put(MB, 0.5)
    assert decision.reason == "cheaper"
    assert decision.report()["bytes_per_second"] is None


@pytest.mark.parametrize(("mode", "wants"), [("always", True), ("never", False)])
def test_a_fixed_mode_does_not_look_at_rates(mode, wants):
    decision = shipping(mode)
    for per_byte in (1e-12, 1e-3):
        measure(decision, per_byte=per_byte)
        assert (decision.reason, decision.wants_features) == (mode, wants)


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_features_that_are_too_large_stay_behind_and_are_soon_not_asked_for(mode):
    decision = shipping(mode, max_bytes=10 * MB)
    for _ in range(MAX_TOO_LARGE - 1):
        assert not decision.fits(feature_bytes=11 * MB, frame_bytes=MB)
        decision.note_trajectory(is_shipped=False)
    assert decision.fits(feature_bytes=10 * MB, frame_bytes=MB)
    assert decision.fits(feature_bytes=12 * MB, frame_bytes=12 * MB)  # no more than without them
    decision.note_trajectory(is_shipped=True)
    for _ in range(MAX_TOO_LARGE):
        assert decision.wants_features
        assert not decision.fits(feature_bytes=11 * MB, frame_bytes=MB)
    assert (decision.reason, decision.wants_features) == ("too large", False)
    report = decision.report()
    assert (report["shipped"], report["trajectories"]) == (1, MAX_TOO_LARGE)


@settings(max_examples=25, deadline=None)
@given(lane_bytes=st.integers(1, 1 << 40), waiting=st.integers(1, 1000))
def test_the_features_of_all_that_wait_leave_half_a_lane(lane_bytes, waiting):
    assert max_feature_bytes(lane_bytes, waiting) * waiting <= lane_bytes / 2


def test_the_report_holds_the_decision_and_its_rates():
    decision = shipping()
    measure(decision)
    report = decision.report()
    assert report["reason"] == "cheaper"
    assert report["feature_bytes"] == MB
    assert report["frame_bytes"] == MB / 2
    assert report["bytes_per_second"] == pytest.approx(1e9)
    assert report["transport_seconds"] == pytest.approx(2e-3)
    assert report["encode_seconds"] == 5e-3
