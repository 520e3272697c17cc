import numpy as np
import pytest

from joynexus.observability.latency import LatencyBook, quantile_ms
from joynexus.observability.usage_counts import merge_usage


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_quantile_is_right_within_five_percent(share: float):
    seconds = np.random.default_rng(0).lognormal(-4.0, 1.0, 5000)
    book = LatencyBook()
    for each in seconds:
        book.note("a", float(each))
    assert quantile_ms(book.counts()["a"], share) == pytest.approx(1000 * np.quantile(seconds, share), rel=0.055)


def test_nothing_counted_has_no_quantile():
    assert quantile_ms({}, 0.5) is None


def test_counts_of_several_replicas_add_up():
    first, second = LatencyBook(), LatencyBook()
    for _ in range(99):
        first.note("a", 0.01)
    second.note("a", 1.0)
    second.note("b", 0.02)
    counts = [{**merge_usage([]), "latency": each.counts()} for each in (first, second)]
    merged = merge_usage(counts)["latency"]
    assert quantile_ms(merged["a"], 0.5) == pytest.approx(10.0, rel=0.06)
    assert quantile_ms(merged["a"], 1.0) == pytest.approx(1000.0, rel=0.06)
    assert sum(merged["b"].values()) == 1


def test_an_engine_that_serves_nobody_has_no_latency():
    assert merge_usage([])["latency"] == {}
