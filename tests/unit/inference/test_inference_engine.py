import asyncio
import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from joynexus.errors import (
    CheckpointError,
    InvalidBatchError,
    JoyNexusError,
    NonFiniteError,
    ServiceError,
    SpecError,
    StalePolicyError,
    TenantFailedError,
    TenantNotFoundError,
)
from joynexus.inference.engine import InferenceEngine
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.specs.service import InferenceSpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.types import ActionChunk, NormalizationStats, PolicyStats

pytestmark = pytest.mark.timeout(180)  # the first test imports transformers, which takes long on a busy machine

NO_STORE = {"prefix_store": {"device_bytes": 0, "host_bytes": 0}}


def solo(engine, request) -> ActionChunk:
    (answer,) = engine.predict([request])
    assert isinstance(answer, ActionChunk), answer
    return answer


def assert_same(first: ActionChunk, second: ActionChunk, tolerance: float = 0.0) -> None:
    assert first.policy_version == second.policy_version
    pairs = [(first.actions, second.actions), (first.log_prob, second.log_prob), (first.value, second.value)]
    pairs += [(first.trace[name], second.trace[name]) for name in first.trace]
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def rounding() -> float:
    """0 where this machine's kernels round a row alike wherever it stands in a forward of fixed size, else 1e-6."""
    draw = torch.Generator().manual_seed(0)
    for width in (3, 8, 16, 32, 64, 2048):
        weight = torch.randn(width, 16, generator=draw)
        rows = torch.randn(4, width, generator=draw)
        if not torch.equal((rows @ weight).flip(0), rows.flip(0) @ weight):
            return 1e-6
    return 0.0


# versions


def test_newest_version_is_served_and_the_base_on_demand(engine, snapshot, request_of):
    for version in (0, 3, 7):
        assert engine.set_policy(snapshot("a", version, constant=float(version)))
    assert engine.versions() == {"a": 7}
    newest, base = solo(engine, request_of("a")), solo(engine, request_of("a", version=0))
    assert (newest.policy_version, base.policy_version) == (7, 0)
    assert np.all(newest.actions == 7.0)
    assert np.all(base.actions == 0.0)
    assert isinstance(engine.predict([request_of("a", version=3)])[0], StalePolicyError)


def test_older_and_repeated_publications_are_ignored(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", 5, constant=5.0))
    assert not engine.set_policy(snapshot("a", 5, constant=-1.0))
    assert not engine.set_policy(snapshot("a", 4, constant=4.0))
    assert np.all(solo(engine, request_of("a")).actions == 5.0)


def test_base_that_comes_late_is_kept_beside_the_newest(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", 5, constant=5.0))
    assert isinstance(engine.predict([request_of("a", version=0)])[0], StalePolicyError)
    assert engine.set_policy(snapshot("a", 0, constant=9.0))
    assert not engine.set_policy(snapshot("a", 0, constant=-1.0))
    assert engine.versions() == {"a": 5}
    assert np.all(solo(engine, request_of("a")).actions == 5.0)
    assert np.all(solo(engine, request_of("a", version=0)).actions == 9.0)


def test_unknown_and_removed_tenants_are_not_found_and_no_other_is_named(engine, snapshot, request_of):
    engine.set_policy(snapshot("secret"))
    engine.set_policy(snapshot("a", 4))
    engine.remove_policy("a")
    engine.remove_policy("a")
    assert engine.versions() == {"secret": 0}
    with pytest.raises(TenantNotFoundError) as raised:
        engine.signature_of("a")
    assert "secret" not in str(raised.value)
    first, second = engine.predict([request_of("a"), request_of("secret")])
    assert isinstance(first, TenantNotFoundError)
    assert isinstance(second, ActionChunk)


def test_tenant_that_comes_back_begins_with_its_own_base(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", 9, constant=9.0))
    engine.remove_policy("a")
    engine.set_policy(snapshot("a", 0, constant=1.0))
    assert np.all(solo(engine, request_of("a")).actions == 1.0)


def test_publication_that_does_not_fit_is_refused_and_the_old_one_stays(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", 1, constant=1.0))
    good = snapshot("a", 2, constant=2.0)
    missing = {name: each for name, each in good.parameters.items() if name != "leave.bias"}
    wide = {**good.parameters, "leave.bias": np.zeros(99, dtype=np.float32)}
    for parameters in (missing, wide):
        with pytest.raises(CheckpointError, match=r"'a', version 2"):
            engine.set_policy(dataclasses.replace(good, parameters=parameters))
    elsewhere = good.policy.model_copy(update={"backbone": "large"})
    with pytest.raises(SpecError, match="'large'"):
        engine.set_policy(dataclasses.replace(good, policy=elsewhere))
    assert np.all(solo(engine, request_of("a")).actions == 1.0)
    assert engine.versions() == {"a": 1}


def test_arrays_that_arrive_read_only_are_copied(engine, snapshot, request_of):
    publication = snapshot("a", 1, constant=1.0)
    for each in publication.parameters.values():
        each.flags.writeable = False
    engine.set_policy(publication)
    other = snapshot("a", 2, constant=2.0)
    engine.set_policy(other)
    for each in other.parameters.values():
        each[...] = 77.0
    assert np.all(solo(engine, request_of("a")).actions == 2.0)


def test_new_policy_spec_of_a_tenant_is_built_anew(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", 1, module="oft"))
    before = engine.signature_of("a")
    engine.set_policy(snapshot("a", 2, module="gaussian", max_prompt_tokens=12))
    assert engine.signature_of("a") != before
    assert solo(engine, request_of("a")).log_prob is not None


def test_statistics_come_with_each_publication(engine, snapshot, request_of):
    for version, high in ((1, 10.0), (2, 20.0)):
        engine.set_policy(snapshot("a", version, constant=1.0, stats=statistics(high), normalization="min_max"))
        assert solo(engine, request_of("a")).actions == pytest.approx(high)


def statistics(high: float) -> PolicyStats:
    def stats(width: int) -> NormalizationStats:
        low, top = np.full(width, -high, dtype=np.float32), np.full(width, high, dtype=np.float32)
        middle = np.zeros(width, dtype=np.float32)
        return NormalizationStats(mean=middle, std=top, minimum=low, maximum=top, q01=low, q99=top, count=2)

    return PolicyStats(state=stats(3), action=stats(2), source="test")


# independence


@pytest.mark.parametrize("module", ["oft", "gaussian", "flow_matching"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_answer_does_not_depend_on_the_neighbours(make_engine, snapshot, request_of, rounding, module, deterministic):
    """Neither on other tenants' requests, nor on the tenant's own, nor on their number and order."""
    publications = [snapshot(f"t{index}", module=module, seed=index) for index in range(3)]
    requests = [
        request_of(f"t{index % 3}", index, rows=1 + index % 3, deterministic=deterministic) for index in range(9)
    ]

    def fresh():
        engine = make_engine()
        for publication in publications:
            engine.set_policy(publication)
        return engine

    alone = [solo(fresh(), request) for request in requests]
    assert len({answer.actions.tobytes() for answer in alone}) == len(requests)
    for seed in range(3):
        order = random.Random(seed).sample(range(9), k=9 - seed)
        answers = fresh().predict([requests[index] for index in order])
        for index, answer in zip(order, answers, strict=True):
            assert_same(answer, alone[index], tolerance=rounding)


def test_noise_depends_on_the_row_seed_alone(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", module="gaussian"))
    request = request_of("a", 1, rows=2)
    first, again = solo(engine, request), solo(engine, request)
    other = solo(engine, dataclasses.replace(request, seeds=(request.seeds[0], 12345)))
    assert_same(first, again)
    assert np.array_equal(first.actions[0], other.actions[0])
    assert not np.array_equal(first.actions[1], other.actions[1])


def test_global_randomness_is_neither_used_nor_moved(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", module="flow_matching"))
    torch.manual_seed(1)
    first = solo(engine, request_of("a"))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert_same(first, solo(engine, request_of("a")))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_and_acting_without_exploration_share_a_group(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", module="gaussian"))
    sampled, best = engine.predict([request_of("a", 1), request_of("a", 1, deterministic=True)])
    assert not np.array_equal(sampled.actions, best.actions)
    assert best.log_prob[0] > sampled.log_prob[0]


@pytest.mark.parametrize("version", [None, 0])
def test_c01_interleaved_requests_each_get_their_own_policy(engine, snapshot, request_of, version):
    """Heads of constant +1 and -1, eight interleaved requests inside one wait window, through the batcher."""
    for tenant, constant in (("a", 1.0), ("b", -1.0)):
        engine.set_policy(snapshot(tenant, constant=constant))
    requests = [request_of("ab"[index % 2], index, version=version) for index in range(8)]
    alone = [solo(engine, request) for request in requests]

    async def main():
        batcher = GroupBatcher(engine.predict, engine.signature_of, InferenceSpec(max_wait_ms=50.0))
        answers = await asyncio.gather(*(batcher.submit(request) for request in requests))
        await batcher.aclose()
        return answers, batcher.stats()

    answers, stats = asyncio.run(main())
    assert stats.mean_tenants == 2.0
    for index, answer in enumerate(answers):
        assert np.all(answer.actions == (1.0, -1.0)[index % 2])
        assert_same(answer, alone[index])


# faults


def test_nan_in_one_requests_state_fails_that_request_alone(engine, snapshot, request_of):
    for tenant in "ab":
        engine.set_policy(snapshot(tenant, seed=ord(tenant)))
    good = [request_of("a", 1), request_of("b", 2)]
    alone = [solo(engine, request) for request in good]
    first, bad, infinite, second = engine.predict(
        [good[0], request_of("a", 3, state=float("nan")), request_of("b", 4, state=float("inf")), good[1]]
    )
    assert isinstance(bad, NonFiniteError)
    assert isinstance(infinite, NonFiniteError)
    assert_same(first, alone[0])
    assert_same(second, alone[1])


def test_nan_in_one_tenants_weights_fails_that_tenant_alone(engine, snapshot, request_of):
    engine.set_policy(snapshot("sick", 3, constant=float("nan")))
    engine.set_policy(snapshot("well", 1, constant=1.0))
    sick, well = engine.predict([request_of("sick", 1), request_of("well", 1)])
    assert isinstance(sick, NonFiniteError)
    assert "version 3" in str(sick)
    assert np.all(well.actions == 1.0)


def test_malformed_requests_fail_alone(engine, snapshot, request_of):
    engine.set_policy(snapshot("a", constant=1.0))
    good = request_of("a", rows=2)
    camera = dataclasses.replace(
        good.observation,
        images=np.zeros((2, 2, 32, 32, 3), dtype=np.uint8),
        image_mask=np.ones((2, 2), dtype=np.bool_),
    )
    wide = dataclasses.replace(good.observation, state=np.zeros((2, 4), dtype=np.float32))
    long = dataclasses.replace(good.observation, instructions=("far too long a prompt for eight tokens",) * 2)
    bad = [dataclasses.replace(good, observation=each) for each in (camera, wide, long)]
    bad += [dataclasses.replace(good, seeds=seeds) for seeds in ((1,), (1, 2**64))]
    answers = engine.predict([good, *bad, good])
    assert [type(each) for each in answers[1:-1]] == [InvalidBatchError] * len(bad)
    assert all(np.all(each.actions == 1.0) for each in (answers[0], answers[-1]))


def test_no_requests_no_answers(engine):
    assert engine.predict([]) == []


def test_module_that_raises_on_one_request_fails_it_alone(engine, snapshot, request_of, monkeypatch):
    engine.set_policy(snapshot("a", 2, constant=1.0))
    engine.set_policy(snapshot("b", constant=2.0))
    module = engine._policies.find("a").parts.module
    act = module.act

    def picky(prefix, state, generators, *, deterministic):
        if (state == 7.0).any():
            raise RuntimeError("seven")
        return act(prefix, state, generators, deterministic=deterministic)

    monkeypatch.setattr(module, "act", picky)
    answers = engine.predict(
        [request_of("a", 1), request_of("a", 2, state=7.0), request_of("b", 3, state=7.0), request_of("a", 4)]
    )
    assert isinstance(answers[1], TenantFailedError)
    assert "RuntimeError: seven" in str(answers[1])
    assert [float(answers[index].actions[0, 0, 0]) for index in (0, 2, 3)] == [1.0, 2.0, 1.0]


def test_forward_that_fails_is_taken_again_for_each_request_alone(engine, backbone, snapshot, request_of, monkeypatch):
    """As where a group is too large for the memory, or one request's content is poison."""
    for tenant, constant in (("a", 1.0), ("b", 2.0)):
        engine.set_policy(snapshot(tenant, constant=constant))
    poison = request_of("b", 3)
    pixel = int(poison.observation.images[0, 0, 0, 0, 0])
    forward = backbone.prefix

    def fragile(batch, signature):
        if (batch.images[:, 0, 0, 0, 0] == pixel).any():
            raise RuntimeError("poison")
        return forward(batch, signature)

    monkeypatch.setattr(backbone, "prefix", fragile)
    answers = engine.predict([request_of("a", 1), poison, request_of("b", 2)])
    assert isinstance(answers[1], ServiceError)
    assert [float(answers[index].actions[0, 0, 0]) for index in (0, 2)] == [1.0, 2.0]


# prefixes and usage


def test_same_prefix_is_encoded_once_whoever_asks(engine, backbone, snapshot, request_of):
    for tenant, constant in (("a", 1.0), ("b", 2.0)):
        engine.set_policy(snapshot(tenant, constant=constant))
    before = backbone.num_encoded
    engine.predict([request_of("a", 1), request_of("b", 1), request_of("a", 2, rows=2)])
    engine.predict([request_of("b", 2, rows=2), request_of("a", 1)])
    usage = engine.usage()
    assert backbone.num_encoded - before == usage.encoded == 3
    assert usage.reused == 4
    assert (usage.num_groups, usage.mean_tenants, usage.mean_samples) == (2, 2.0, 3.5)
    assert engine.groups_since().tenants.tolist() == [2, 2]
    assert engine.groups_since().samples.tolist() == [4, 3]


def test_who_reuses_no_prefixes_encodes_them_for_each_request(engine, snapshot, request_of):
    anew = snapshot("anew", constant=1.0)
    engine.set_policy(snapshot("kept", constant=1.0))
    engine.set_policy(dataclasses.replace(anew, policy=anew.policy.model_copy(update={"reuse_prefixes": False})))
    for _ in range(2):
        kept, fresh = engine.predict([request_of("kept", 1), request_of("anew", 1)])
        assert_same(kept, fresh)
    usage = engine.usage()
    assert (usage.encoded, usage.reused) == (3, 1)


def test_stored_and_fresh_features_give_the_same_answer(make_engine, snapshot, request_of):
    answers = []
    for engine in (make_engine(), make_engine(**NO_STORE)):
        engine.set_policy(snapshot("a", module="gaussian"))
        engine.predict([request_of("a", content) for content in (1, 2)])
        answers.append(engine.predict([request_of("a", content) for content in (3, 1)]))
    for stored, fresh in zip(*answers, strict=True):
        assert_same(stored, fresh)


def test_requests_of_several_signatures_are_answered_in_one_call(engine, snapshot, request_of):
    engine.set_policy(snapshot("short", constant=1.0))
    engine.set_policy(snapshot("long", constant=2.0, max_prompt_tokens=16))
    answers = engine.predict([request_of(tenant, index) for index, tenant in enumerate(["short", "long"] * 3)])
    assert [float(each.actions[0, 0, 0]) for each in answers] == [1.0, 2.0] * 3


def test_device_seconds_sum_to_the_busy_time(make_engine, snapshot, request_of):
    engine = make_engine(**NO_STORE)
    for tenant in "abc":
        engine.set_policy(snapshot(tenant, module="flow_matching"))
    for content in range(6):
        engine.predict(
            [
                request_of("a", 100 + content, rows=8),
                request_of("b", 200 + content),
                request_of("c", 300 + content, state=float("nan")),
                request_of("gone"),
            ]
        )
    usage = engine.usage()
    assert set(usage.device_seconds) == {"a", "b"}
    assert usage.busy_seconds > 0
    assert sum(usage.device_seconds.values()) == pytest.approx(usage.busy_seconds, rel=0.05)
    assert usage.device_seconds["a"] > usage.device_seconds["b"] > 0


def test_every_second_of_acting_has_a_tenant_and_a_kind(engine, snapshot, request_of):
    for tenant in "ab":
        engine.set_policy(snapshot(tenant, module="flow_matching"))
    engine.predict([request_of("a", 1, rows=2), request_of("b", 2)])
    engine.predict([request_of("a", 1, rows=2), request_of("b", 2)])
    usage = engine.usage()
    for tenant, kinds in usage.by_kind.items():
        assert set(kinds) == {"prefix", "head_forward", "copy", "other"}
        assert sum(kinds.values()) == pytest.approx(usage.device_seconds[tenant], abs=1e-9)
    assert sum(usage.device_seconds.values()) == pytest.approx(usage.busy_seconds, abs=1e-9)
    assert usage.samples == {"a": 4, "b": 2}
    assert usage.prefixes == {
        "a": {"encoded": 2, "reused": 2, "carried": 0},
        "b": {"encoded": 1, "reused": 1, "carried": 0},
    }


def test_who_finds_a_prefix_in_the_store_does_not_pay_for_it(engine, snapshot, request_of, monkeypatch):
    ticks = iter(range(1000))
    for tenant in "ab":
        engine.set_policy(snapshot(tenant))
    monkeypatch.setattr(engine._clock._marks, "mark", lambda: float(next(ticks)))
    engine.predict([request_of("a", 1)])
    before = engine.usage().device_seconds
    engine.predict([request_of("a", 1), request_of("b", 2)])
    after = engine.usage().device_seconds
    # One second each for encoding and for each module; the rest of the five is split.
    assert after["b"] - (after["a"] - before["a"]) == pytest.approx(1.0)


# publications and predictions at the same time


class BlockedParameters(dict):
    """Parameters that can be read only once somebody says so: a publication that is in the middle of its work."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters)
        self.is_reading = threading.Event()
        self.go = threading.Event()

    def items(self):
        self.is_reading.set()
        assert self.go.wait(20.0)
        return super().items()


def test_c16_ten_publications_hold_up_nobody(engine, snapshot, request_of):
    """B is answered, unchanged, while each of A's publications is under way; A itself by its old version."""
    engine.set_policy(snapshot("a", 0, constant=0.0))
    engine.set_policy(snapshot("b", 3, module="gaussian"))
    requests = [request_of("b", content) for content in range(4)]
    alone = [solo(engine, request) for request in requests]
    answered: list[tuple[bool, int]] = []
    with ThreadPoolExecutor(1) as publisher:
        for version in range(1, 11):
            publication = snapshot("a", version, constant=float(version))
            parameters = BlockedParameters(publication.parameters)
            done = publisher.submit(engine.set_policy, dataclasses.replace(publication, parameters=parameters))
            try:
                assert parameters.is_reading.wait(20.0)
                answers = engine.predict([*requests, request_of("a", version)])
                answered.append((not done.done(), answers[-1].policy_version))
            finally:
                parameters.go.set()
            assert done.result(20.0)
            for answer, expected in zip(answers[:-1], alone, strict=True):
                assert_same(answer, expected)
    assert answered == [(True, version) for version in range(10)]
    assert engine.versions() == {"a": 10, "b": 3}


def test_prediction_that_runs_is_finished_with_the_version_it_began_with(engine, snapshot, request_of, monkeypatch):
    engine.set_policy(snapshot("a", 1, constant=1.0))
    module = engine._policies.find("a").parts.module
    act, is_acting, go = module.act, threading.Event(), threading.Event()

    def slow(*args, **options):
        is_acting.set()
        assert go.wait(20.0)
        return act(*args, **options)

    monkeypatch.setattr(module, "act", slow)
    with ThreadPoolExecutor(1) as predictor:
        running = predictor.submit(engine.predict, [request_of("a")])
        try:
            assert is_acting.wait(20.0)
            monkeypatch.undo()
            engine.set_policy(snapshot("a", 2, constant=2.0))
            engine.remove_policy("a")
        finally:
            go.set()
        (answer,) = running.result(20.0)
    assert answer.policy_version == 1
    assert np.all(answer.actions == 1.0)


def test_c18_version_label_is_that_of_the_weights_that_acted(engine, snapshot, request_of):
    """The weights encode their version; a thread publishes as fast as it can while another predicts."""
    publications = [snapshot("a", version, constant=float(version)) for version in range(40)]
    engine.set_policy(publications[0])
    seen: list[int] = []
    is_over = threading.Event()

    def publish() -> None:
        for publication in publications[1:]:
            engine.set_policy(publication)
        is_over.set()

    with ThreadPoolExecutor(1) as publisher:
        done = publisher.submit(publish)
        was_over = False
        while not was_over:
            was_over = is_over.is_set() or done.done()
            for answer in engine.predict([request_of("a", content, rows=2) for content in range(3)]):
                assert np.all(answer.actions == float(answer.policy_version))
                seen.append(answer.policy_version)
        done.result(20.0)
    assert seen == sorted(seen)
    assert seen[-1] == 39


def test_publications_that_race_end_with_the_newest(engine, snapshot, request_of):
    late = snapshot("a", 1, constant=1.0)
    parameters = BlockedParameters(late.parameters)
    with ThreadPoolExecutor(1) as publisher:
        done = publisher.submit(engine.set_policy, dataclasses.replace(late, parameters=parameters))
        assert parameters.is_reading.wait(20.0)
        engine.set_policy(snapshot("a", 2, constant=2.0))
        parameters.go.set()
        assert done.result(20.0) is False
    assert np.all(solo(engine, request_of("a")).actions == 2.0)


def test_errors_are_typed(engine, request_of):
    assert all(isinstance(each, JoyNexusError) for each in engine.predict([request_of("nobody")]))


def test_loading_from_a_spec_gives_a_working_engine(snapshot, request_of):
    engine = InferenceEngine.load(TINY_SMOLVLM, InferenceSpec(), backbone_name="tiny")
    engine.set_policy(snapshot("a", constant=1.0))
    assert np.all(solo(engine, request_of("a")).actions == 1.0)
