"""Who is charged for what, and what the groups were."""

import time

import pytest
import torch
from training_world import batch, engine, forward_call, policy, run, step_call, train_call

from joynexus.models.action_module import ActionModule
from joynexus.specs.service import TrainingSpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.training.losses import LOSSES, LossFunction, LossInputs, LossRows
from joynexus.types import Loss


def busy_loss(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    return LossRows(loss=module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator))


def test_device_seconds_sum_to_the_busy_time_and_follow_who_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "busy", LossFunction(compute=busy_loss))
    trainer = engine()
    for index, name in enumerate(("a", "b", "c")):
        trainer.open_slot(name, policy(), seed=index)
    measured = time.thread_time()
    results = []
    for step in range(4):
        calls = [train_call(name, step, batch(2, step + 10 * index)) for index, name in enumerate("ab")]
        results += run(trainer, *calls, train_call("c", step, batch(2, 90 + step), loss=Loss(name="busy")))
    measured = time.thread_time() - measured
    found = trainer.usage()
    assert sum(found.device_seconds.values()) == pytest.approx(found.busy_seconds, rel=0.05)
    assert found.busy_seconds <= measured
    assert found.busy_seconds > 0.5 * measured
    assert found.device_seconds["c"] > 0.2
    assert found.device_seconds["c"] > found.device_seconds["a"]
    charged = sum(result.device_seconds for result in results)
    assert charged == pytest.approx(found.busy_seconds, rel=0.25)


def test_every_second_has_a_tenant_and_a_kind() -> None:
    trainer = engine()
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    measured = time.thread_time()
    run(trainer, train_call("a", 0, batch(3, 1)), train_call("b", 0, batch(2, 2)))
    run(trainer, forward_call("a", 1, batch(3, 1)), forward_call("b", 1, batch(2, 2)))
    run(trainer, step_call("a", 2), step_call("b", 2))
    measured = time.thread_time() - measured
    found = trainer.usage()
    for tenant, kinds in found.by_kind.items():
        assert set(kinds) == {"prefix", "head_forward", "backward", "optimizer", "copy", "other"}
        assert min(kinds.values()) > 0
        assert sum(kinds.values()) == pytest.approx(found.device_seconds[tenant], abs=1e-9)
    assert sum(found.device_seconds.values()) == pytest.approx(found.busy_seconds, abs=1e-9)
    assert 0.5 * measured < found.busy_seconds <= measured
    assert found.samples == {"a": 6, "b": 4}
    assert found.prefixes["a"] == {"encoded": 3, "reused": 3, "carried": 0}
    assert found.idle == {}
    assert found.capacity_seconds == found.wall_seconds > 0


def test_an_answer_tells_what_the_call_has_cost() -> None:
    trainer = engine()
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    first = run(trainer, forward_call("a", 0, batch(3, 1)), forward_call("b", 0, batch(3, 2)))
    second = run(trainer, step_call("a", 1), step_call("b", 1))
    charged = sum(each.device_seconds for each in [*first, *second])
    assert min(each.device_seconds for each in [*first, *second]) > 0
    assert second[0].device_seconds < first[0].device_seconds
    assert 0.7 * trainer.usage().busy_seconds < charged <= trainer.usage().busy_seconds


def test_encoded_and_reused_prefixes() -> None:
    trainer = engine()
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    first = run(trainer, train_call("a", 0, batch(3, 1)))[0]
    assert (first.encoded, first.reused) == (3, 0)
    again = run(trainer, train_call("a", 1, batch(3, 1)), train_call("b", 0, batch(2, 2)))
    assert [(each.encoded, each.reused) for each in again] == [(0, 3), (2, 0)]
    found = trainer.usage()
    assert (found.encoded, found.reused) == (5, 3)


def test_a_prefix_that_two_tenants_share_is_encoded_once() -> None:
    trainer = engine(prefix_store={"device_bytes": 0, "host_bytes": 0})
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    results = run(trainer, train_call("a", 0, batch(3, 1)), train_call("b", 0, batch(3, 1)))
    assert sorted((each.encoded, each.reused) for each in results) == [(0, 3), (3, 0)]


def test_who_reuses_no_prefixes_encodes_them_for_each_call_and_learns_the_same() -> None:
    trainer = engine()
    for name, reuses in (("kept", True), ("anew", False)):
        trainer.open_slot(name, policy().model_copy(update={"reuse_prefixes": reuses}), seed=0)
    for index in range(2):
        results = run(trainer, *(train_call(name, index, batch(3, 1)) for name in ("kept", "anew")))
    assert [(each.encoded, each.reused) for each in results] == [(0, 3), (3, 0)]
    assert results[0].metrics == results[1].metrics
    assert trainer.usage().encoded == 9


def test_only_group_steps_with_batches_are_counted() -> None:
    trainer = engine()
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    run(trainer, forward_call("a", 0, batch(2, 1)), forward_call("b", 0, batch(3, 2)))
    alone = run(trainer, step_call("a", 1), step_call("b", 1))
    assert len({1, *(each.group_id for each in alone)}) == 3  # equal ids mean a shared forward
    run(trainer, train_call("a", 2, batch(1, 3)))
    found = trainer.usage()
    assert (found.num_groups, found.mean_tenants, found.mean_samples) == (2, 1.5, 3.0)
    groups = trainer.groups_since()
    assert (groups.tenants.tolist(), groups.samples.tolist()) == ([2, 1], [5, 1])
    assert groups.time_s[0] <= groups.time_s[1] <= time.time()


def test_an_idle_step_costs_nobody() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    assert trainer.step() == 0
    assert trainer.usage().busy_seconds == 0.0
    assert trainer.usage().device_seconds == {}


def test_an_engine_is_loaded_from_specs_with_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        loaded = TrainingEngine.load(TINY_SMOLVLM, TrainingSpec(num_threads=2), backbone_name="tiny")
        assert torch.get_num_threads() == 2
        assert loaded.tenants() == {}
    finally:
        torch.set_num_threads(before)
