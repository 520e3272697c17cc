"""Answers that carry the features of their rows, and what encoding a row costs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from joynexus.inference.encode_rates import WINDOW_ROWS, EncodeRates
from joynexus.models.policy import prepare_prefix
from joynexus.models.prefix import from_arrays
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.types import ActionChunk, PredictRequest


def asking(request: PredictRequest) -> PredictRequest:
    return replace(request, with_features=True)


def test_an_answer_carries_the_features_of_its_own_rows(engine, backbone, snapshot, request_of):
    published = [snapshot("a"), snapshot("b", module="gaussian")]
    for each in published:
        engine.set_policy(each)
    requests = [asking(request_of("a", 1, rows=2)), request_of("b", 2), asking(request_of("b", 1, rows=2))]
    first, without, shared = engine.predict(requests)
    assert without.features is None
    for answer, request in ((first, requests[0]), (shared, requests[2])):
        assert len(answer.features) == 2
        found = from_arrays(answer.features, torch.device("cpu"))
        prefix = prepare_prefix(backbone, published[0].policy, request.observation, UNCHANGED)
        expected = backbone.prefix(prefix, engine.signature_of("a"))
        assert found.signature == expected.signature
        for mine, theirs in zip(
            (found.hidden, found.pad, *found.keys, *found.values),
            (expected.hidden, expected.pad, *expected.keys, *expected.values),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


def test_features_are_copies_that_share_nothing(engine, snapshot, request_of):
    engine.set_policy(snapshot("a"))
    engine.set_policy(snapshot("b", seed=3))
    requests = [asking(request_of("a", 1)), asking(request_of("b", 1))]
    first, other = engine.predict(requests)
    for each in first.features.arrays.values():
        each[:] = 1
    again, other_again = engine.predict(requests)
    assert not np.array_equal(again.features.arrays["hidden"], first.features.arrays["hidden"])
    assert np.array_equal(other.features.arrays["hidden"], other_again.features.arrays["hidden"])


def test_asking_for_features_changes_nothing_else(make_engine, snapshot, request_of):
    plain, asked = make_engine(), make_engine()
    for each in (plain, asked):
        each.set_policy(snapshot("a", module="gaussian"))
    (one,), (two,) = plain.predict([request_of("a", 4)]), asked.predict([asking(request_of("a", 4))])
    assert np.array_equal(one.actions, two.actions)
    assert np.array_equal(one.log_prob, two.log_prob)


def test_a_request_that_fails_carries_none(engine, snapshot, request_of):
    engine.set_policy(snapshot("a"))
    bad, good = engine.predict([asking(request_of("a", 1, state=float("nan"))), asking(request_of("a", 2))])
    assert isinstance(bad, Exception)
    assert isinstance(good, ActionChunk)
    assert good.features is not None


def test_every_answer_tells_what_encoding_a_row_costs(engine, snapshot, request_of):
    engine.set_policy(snapshot("a"))
    answers = [engine.predict([request_of("a", content)])[0] for content in range(4)]
    usage = engine.usage()
    assert answers[-1].prefix_seconds > 0
    assert answers[-1].prefix_seconds <= usage.by_kind["a"]["prefix"]
    assert answers[-1].features is None


class Work:
    """Seconds and rows so far."""

    def __init__(self):
        self.seconds, self.rows = 0.0, 0

    def __call__(self, tenant: str) -> tuple[float, int]:
        return (self.seconds, self.rows) if tenant == "a" else (0.0, 0)

    def add(self, rows: int, each: float) -> None:
        self.rows += rows
        self.seconds += rows * each


def test_the_mean_moves_with_the_newest_windows():
    work = Work()
    rates = EncodeRates(work)
    assert rates.seconds_per_row("a") == 0.0
    work.add(1, 1.0)  # warms up
    assert rates.seconds_per_row("a") == 1.0
    work.add(WINDOW_ROWS - 1, 0.1)
    first = rates.seconds_per_row("a")
    assert first == pytest.approx((1.0 + 0.1 * (WINDOW_ROWS - 1)) / WINDOW_ROWS)
    assert rates.seconds_per_row("a") == first
    work.add(1, 5.0)
    assert rates.seconds_per_row("a") == first
    for _ in range(12):
        work.add(WINDOW_ROWS, 0.2)
        latest = rates.seconds_per_row("a")
    assert latest == pytest.approx(0.2, rel=1e-2)
    assert rates.seconds_per_row("b") == 0.0
    rates.forget("a")
    assert rates.seconds_per_row("a") == pytest.approx(work.seconds / work.rows)
