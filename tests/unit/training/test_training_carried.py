"""Features that come with a call or a trajectory: exact, private, checked, and nothing is encoded again."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import training_world as world
from training_world import are_equal, assert_same, engine, parameters, run, train_call

from joynexus.errors import InvalidBatchError, JoyNexusError, NonFiniteError, SequenceConflictError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import load_backbone
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.training.learners.experience import check_trajectory, collect_decisions
from joynexus.training.learners.ppo import PpoLearner
from joynexus.training.runtime import TrainingRuntime
from joynexus.types import (
    LaneItem,
    Observation,
    PredictRequest,
    PrefixArrays,
    TrainingBatch,
    TrainingResult,
    Trajectory,
)

NO_STORE = {"prefix_store": {"device_bytes": 0, "host_bytes": 0}}
MODULES = ["oft", "gaussian", "flow_matching"]


@cache
def replica(dtype: str = "float32", module: str = "oft") -> InferenceEngine:
    """A replica with a backbone of its own, as in another process."""
    spec = TINY_SMOLVLM.model_copy(update={"dtype": dtype})
    served = InferenceEngine(load_backbone(spec), InferenceSpec(), backbone_name="tiny")
    trainer = TrainingEngine(load_backbone(spec), TrainingSpec(), backbone_name="tiny")
    trainer.open_slot("a", world.policy(module), seed=0)
    served.set_policy(trainer.snapshot("a"))
    return served


def features_of(seen: Observation, dtype: str = "float32") -> PrefixArrays:
    """What the replica gives along while it acts, one request per row, as rollouts ask."""
    asked = [
        PredictRequest(tenant="a", observation=seen.rows([row]), seeds=(row,), with_features=True)
        for row in range(len(seen))
    ]
    parts = []
    for start in range(0, len(asked), 3):
        for answer in replica(dtype).predict(asked[start : start + 3]):
            assert not isinstance(answer, JoyNexusError)
            assert answer.features is not None
            parts.append(answer.features)
    return PrefixArrays.concatenate(parts)


def carrying(data: TrainingBatch, dtype: str = "float32") -> TrainingBatch:
    """The same rows with features in place of frames."""
    return replace(data, observation=data.observation.without_frames(), features=features_of(data.observation, dtype))


def mixed(data: TrainingBatch) -> TrainingBatch:
    """Every second row brings features, and a black frame; the others are to be encoded."""
    featured = np.arange(len(data)) % 2 == 0
    images = data.observation.images.copy()
    images[featured] = 0
    features = features_of(data.observation)
    for each in features.arrays.values():
        each[~featured] = 0
    return replace(data, observation=replace(data.observation, images=images), features=features, featured=featured)


def opened(tenant: str = "a", module: str = "oft", **changes: object) -> TrainingEngine:
    trainer = engine(**changes)
    trainer.open_slot(tenant, world.policy(module), seed=1)
    return trainer


def carried(results: list[TrainingResult]) -> list[tuple[int, int, int]]:
    return [(each.encoded, each.reused, each.carried) for each in results]


# ---- exact


@pytest.mark.parametrize("module", MODULES)
def test_training_from_carried_features_equals_training_from_encoding(module):
    data = [world.batch(5, seed) for seed in range(3)]
    plain, given = opened(module=module), opened(module=module)
    encoded = run(plain, *[train_call("a", step, each) for step, each in enumerate(data)])
    shipped = run(given, *[train_call("a", step, carrying(each)) for step, each in enumerate(data)])
    assert carried(shipped) == [(0, 0, 5)] * 3
    assert [each.metrics["loss"] for each in shipped] == [each.metrics["loss"] for each in encoded]
    assert are_equal(parameters(plain, "a"), parameters(given, "a"))


def test_rows_with_and_without_features_in_one_batch_give_the_same():
    data = world.batch(5, 3)
    plain, given = opened(), opened()
    run(plain, train_call("a", 0, data))
    assert carried(run(given, train_call("a", 0, mixed(data)))) == [(2, 0, 3)]
    assert are_equal(parameters(plain, "a"), parameters(given, "a"))


def test_masked_rows_leave_with_their_features():
    data = world.with_arrays(world.batch(5, 3), extras={"valid": np.array([True, False, True, True, False])})
    plain, given = opened(), opened()
    run(plain, train_call("a", 0, data))
    assert carried(run(given, train_call("a", 0, carrying(data)))) == [(0, 0, 3)]
    assert are_equal(parameters(plain, "a"), parameters(given, "a"))


def test_features_of_a_bfloat16_backbone_are_exact_too():
    backbone = load_backbone(TINY_SMOLVLM.model_copy(update={"dtype": "bfloat16"}))
    data = world.batch(4, 1)
    found = []
    for each in (data, carrying(data, "bfloat16")):
        trainer = TrainingEngine(backbone, TrainingSpec(), backbone_name="tiny")
        trainer.open_slot("a", world.policy(), seed=1)
        run(trainer, train_call("a", 0, each))
        found.append(parameters(trainer, "a"))
    assert are_equal(*found)


def test_neighbours_that_encode_do_not_change_a_tenant_that_does_not():
    trainer, alone = opened(), opened()
    trainer.open_slot("b", world.policy("flow_matching"), seed=2)
    trainer.open_slot("c", world.policy("gaussian"), seed=3)
    data = carrying(world.batch(4, 7))
    results = run(
        trainer,
        train_call("b", 0, world.batch(3, 8)),
        train_call("a", 0, data),
        train_call("c", 0, mixed(world.batch(5, 9))),
    )
    assert len({each.group_id for each in results}) == 1
    assert carried(results) == [(3, 0, 0), (0, 0, 4), (2, 0, 3)]
    run(alone, train_call("a", 0, data))
    assert are_equal(parameters(trainer, "a"), parameters(alone, "a"))
    for tenant, module, own in (("b", "flow_matching", world.batch(3, 8)), ("c", "gaussian", world.batch(5, 9))):
        other = engine()
        other.open_slot(tenant, world.policy(module), seed={"b": 2, "c": 3}[tenant])
        run(other, train_call(tenant, 0, own))
        assert_same(parameters(trainer, tenant), parameters(other, tenant))


# ---- private


def test_carried_features_never_enter_the_store_that_others_read():
    data, honest = world.batch(4, 5), opened("b")
    poisoned = carrying(data)
    poisoned.features.arrays["hidden"][:] = 0.5
    trainer = opened()
    trainer.open_slot("b", world.policy(), seed=1)
    run(trainer, train_call("a", 0, replace(poisoned, observation=data.observation)))  # frames and all
    (result,) = run(trainer, train_call("b", 0, data))
    assert (result.encoded, result.reused) == (4, 0)
    run(honest, train_call("b", 0, data))
    assert are_equal(parameters(trainer, "b"), parameters(honest, "b"))


# ---- checked


def changed(data: TrainingBatch, name: str, array: object) -> TrainingBatch:
    arrays = {**data.features.arrays, name: array}
    return replace(data, features=replace(data.features, arrays=arrays))


def spoiled(data: TrainingBatch, name: str, value: float) -> TrainingBatch:
    array = data.features.arrays[name].copy()
    array[1].flat[0] = value
    return changed(data, name, array)


WRONG = {
    "signature": (lambda data: replace(data, features=replace(data.features, signature="x")), "signature 'x'"),
    "width": (lambda data: changed(data, "hidden", data.features.arrays["hidden"][..., :-1]), "hidden"),
    "length": (lambda data: changed(data, "pad", data.features.arrays["pad"][:, :-1]), "pad"),
    "heads": (lambda data: changed(data, "key/1", data.features.arrays["key/1"][:, :1]), "key/1"),
    "layer": (lambda data: changed(data, "value/9", data.features.arrays["value/1"]), "value/9"),
    "double": (lambda data: changed(data, "hidden", data.features.arrays["hidden"].astype(np.float64)), "float64"),
    "bfloat16": (lambda data: replace(data, features=replace(data.features, dtype="bfloat16")), "bfloat16"),
    "nan": (lambda data: spoiled(data, "hidden", np.nan), "sample '5/1'"),
    "infinity": (lambda data: spoiled(data, "value/0", np.inf), "sample '5/1'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_features_fail_their_call_alone(name):
    spoil, message = WRONG[name]
    good, data = world.batch(3, 6), carrying(world.batch(4, 5))
    trainer = opened()
    trainer.open_slot("b", world.policy("gaussian"), seed=2)
    before = parameters(trainer, "a")
    futures = [trainer.submit(each) for each in (train_call("a", 0, spoil(data)), train_call("b", 0, good))]
    world.drain(trainer)
    error = futures[0].exception(timeout=0)
    assert isinstance(error, NonFiniteError if name in {"nan", "infinity"} else InvalidBatchError)
    assert message in str(error)
    assert are_equal(parameters(trainer, "a"), before)
    alone = engine()
    alone.open_slot("b", world.policy("gaussian"), seed=2)
    run(alone, train_call("b", 0, good))
    assert futures[1].result(timeout=0).encoded == 3
    assert are_equal(parameters(trainer, "b"), parameters(alone, "b"))
    assert carried(run(trainer, train_call("a", 1, data))) == [(0, 0, 4)]  # and it goes on


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: replace(data, features=None),
        lambda data: replace(data, featured=np.array([True, True, False, True])),
        lambda data: replace(data, features=data.features.rows([0, 1])),
        lambda data: replace(data, features=replace(data.features, arrays={})),
    ],
)
def test_rows_that_have_neither_frames_nor_features_take_no_number(spoil):
    trainer = opened()
    with pytest.raises(InvalidBatchError, match=r"frames|features"):
        trainer.submit(train_call("a", 0, spoil(carrying(world.batch(4, 5)))))
    assert trainer.status("a").next_sequence == 0


def test_a_repeated_call_has_to_bring_the_same_features():
    trainer, data = opened(), carrying(world.batch(4, 5))
    first = run(trainer, train_call("a", 0, data))
    assert run(trainer, train_call("a", 0, carrying(world.batch(4, 5)))) == first
    others = [
        spoiled(data, "key/0", 1.0),
        replace(data, features=replace(data.features, signature="x")),
        replace(data, featured=np.ones(4, dtype=np.bool_)),
    ]
    for other in others:
        with pytest.raises(SequenceConflictError):
            trainer.submit(train_call("a", 0, other))


# ---- from trajectories


def shipped(plain: Trajectory) -> Trajectory:
    return replace(plain, observation=plain.observation.without_frames(), features=features_of(plain.observation))


def item(episode: int, *, is_shipped: bool) -> LaneItem:
    plain = world.rl_item("a", episode)
    return replace(plain, payload=shipped(plain.payload)) if is_shipped else plain


def learn(
    trainer: TrainingEngine, ships: tuple[bool, ...], **changes: object
) -> tuple[PpoLearner, list[TrainingResult]]:
    """One update; the results of its calls."""
    tenant = world.rl_tenant(num_epochs=4, minibatch_size=4, episodes=len(ships), num_iterations=1, **changes)
    learner = PpoLearner(tenant, 0)
    for episode, is_shipped in enumerate(ships):
        assert learner.offer(item(episode, is_shipped=is_shipped)) == "ok"
    results: list[TrainingResult] = []
    while (call := learner.next_call()) is not None:
        results += run(
            trainer,
            train_call("a", len(results), call.batch, loss=call.loss, optimizer=call.optimizer),
        )
        learner.on_result(results[-1])
    return learner, results


@pytest.mark.parametrize(("ships", "encoded"), [((True,) * 3, 0), ((False,) * 3, 9), ((True, False, True), 3)])
def test_an_update_of_four_epochs_encodes_only_what_came_without_features_and_that_once(ships, encoded):
    plain, trainer = opened(module="gaussian"), opened(module="gaussian")
    learn(plain, (False,) * 3)
    learner, results = learn(trainer, ships)
    assert len(results) == 4 * 3
    assert sum(each.encoded for each in results) == encoded
    assert sum(each.carried for each in results) == 4 * (9 - encoded)
    assert sum(each.reused for each in results) == 3 * encoded
    assert are_equal(parameters(plain, "a"), parameters(trainer, "a"))
    metrics = learner.progress().metrics
    assert metrics["features_shipped"] == pytest.approx(1 - encoded / 9)
    assert metrics["decision_bytes"] > 0


def test_without_a_store_carried_features_still_spare_every_encoding():
    trainer = opened(module="gaussian", **NO_STORE)
    _, results = learn(trainer, (True, True))
    assert {each.encoded for each in results} == {0}


def test_a_batch_of_trajectories_that_all_bring_features_holds_no_frames():
    plain = [world.trajectory("a", episode) for episode in range(2)]
    settings = {"discount": 0.9, "gae_lambda": 0.9, "is_normalized": True}
    both = replace(shipped(plain[1]), observation=plain[1].observation)
    decisions = collect_decisions([shipped(plain[0]), both], **settings)
    assert not decisions.batch.observation.has_frames
    assert (decisions.batch.num_featured, decisions.batch.featured) == (6, None)
    some = collect_decisions([plain[0], shipped(plain[1])], **settings).batch
    assert some.featured.tolist() == [False] * 3 + [True] * 3
    assert np.array_equal(some.observation.images[:3], plain[0].observation.images)
    assert not some.observation.images[3:].any()
    none = collect_decisions(plain, **settings).batch
    assert (none.features, none.featured) == (None, None)


def test_trajectories_of_different_kinds_are_not_mixed():
    first, second = (shipped(world.trajectory("a", episode)) for episode in range(2))
    other = replace(second, features=replace(second.features, signature="x"))
    with pytest.raises(InvalidBatchError, match="kinds"):
        collect_decisions([first, other], discount=0.9, gae_lambda=0.9, is_normalized=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trajectory_is_checked_before_it_counts(dtype):
    plain = world.trajectory("a", 0)
    good = replace(plain, features=features_of(plain.observation, dtype))
    check_trajectory(good)
    with pytest.raises(InvalidBatchError, match="neither frames nor features"):
        check_trajectory(replace(plain, observation=plain.observation.without_frames()))
    with pytest.raises(InvalidBatchError, match="features/hidden"):
        check_trajectory(replace(plain, features=good.features.rows([0])))
    good.features.arrays["key/1"].flat[3] = np.nan if dtype == "float32" else 0x7F80
    with pytest.raises(NonFiniteError, match="features"):
        check_trajectory(good)
    learner = PpoLearner(world.rl_tenant(), 0)
    assert learner.offer(replace(world.rl_item("a", 0), payload=good)) == "stale"
    assert learner.progress().metrics["dropped_invalid"] == 1


def serve(folder: Path, items: list[LaneItem], *, crash_after: int | None) -> dict[str, np.ndarray]:
    """Run a workload to its end, through one crash; leased items come again until they are acknowledged."""
    acknowledged: set[str] = set()
    for steps in (crash_after, 100):
        trainer = engine(**NO_STORE)
        runtime = TrainingRuntime(trainer, publish=lambda _: None, keep_checkpoints=2)
        runtime.open_tenant(world.rl_tenant(num_iterations=2, episodes=2), folder, None)
        runtime.start_workload("a", 0)
        leased: set[str] = set()
        for _ in range(steps or 0):
            free = [each for each in items if each.item_id not in leased | acknowledged]
            taken = free[: runtime.wanted().get("a", 0)]
            leased |= {each.item_id for each in taken}
            acknowledged.update(runtime.offer(taken))
            outcome = runtime.step()
            acknowledged.update(outcome.acknowledged)
            assert all(each.encoded == 0 for each in outcome.results.values())
    assert runtime.progress()["a"].finished
    return parameters(trainer, "a")


def test_a_crash_within_an_update_gets_its_features_again(tmp_path: Path):
    items = [item(episode, is_shipped=True) for episode in range(4)]
    whole = serve(tmp_path / "whole", items, crash_after=None)
    for steps in (3, 6):
        assert are_equal(whole, serve(tmp_path / f"crashed{steps}", items, crash_after=steps))


def test_without_cameras_rows_with_and_without_features_stack():
    blind = Observation(
        images=np.zeros((2, 0, 8, 8, 3), dtype=np.uint8),
        image_mask=np.zeros((2, 0), dtype=np.bool_),
        state=np.zeros((2, 4), dtype=np.float32),
        instructions=("a", "b"),
    )
    assert len(Observation.concatenate([blind, blind.without_frames()])) == 4
