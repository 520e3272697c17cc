"""The runtime: workloads from end to end, crashes at every point, and tenants that fail alone."""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_world import (
    FAST,
    are_equal,
    batch,
    engine,
    forward_call,
    policy_stats,
    rl_item,
    rl_tenant,
    sft_item,
    sft_tenant,
    step_call,
    train_call,
)

from joynexus.errors import (
    CheckpointError,
    SequenceConflictError,
    SpecError,
    TenantExistsError,
    TenantNotFoundError,
)
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.algorithm import PpoSpec
from joynexus.specs.tenant import EvaluationSpec, TenantSpec
from joynexus.training.checkpoint import read_checkpoint
from joynexus.training.export import read_export
from joynexus.training.learners.base import Boundary
from joynexus.training.learners.ppo import PpoLearner
from joynexus.training.learners.sft import SftLearner
from joynexus.training.runtime import TrainingRuntime
from joynexus.types import Array, LaneItem, PolicySnapshot, TrainingResult


class Replicas:
    """Where versions are published; checks that a version never changes."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, int], PolicySnapshot] = {}
        self.order: list[tuple[str, int]] = []
        self.is_away = False

    def __call__(self, snapshot: PolicySnapshot) -> None:
        if self.is_away:
            raise ConnectionError("the store is away")
        key = (snapshot.tenant, snapshot.version)
        known = self.versions.setdefault(key, snapshot)
        assert are_equal(dict(known.parameters), dict(snapshot.parameters)), f"version {key} changed"
        self.order.append(key)


class Lanes:
    """Stands for the training queue: hands items out, and takes them back until they are acknowledged."""

    def __init__(self, items: Sequence[LaneItem]) -> None:
        self.items = {item.item_id: item for item in items}
        self.leased: set[str] = set()
        self.acknowledged: set[str] = set()

    def feed(self, runtime: TrainingRuntime) -> None:
        for tenant, room in runtime.wanted().items():
            free = [
                item
                for name, item in self.items.items()
                if item.tenant == tenant and name not in self.leased | self.acknowledged
            ]
            taken = free[:room]
            self.leased |= {item.item_id for item in taken}
            self.acknowledge(runtime.offer(taken))

    def acknowledge(self, names: Sequence[str]) -> None:
        self.acknowledged |= set(names)
        self.leased -= set(names)

    def consumer_died(self) -> None:
        self.leased.clear()


def start(folder: Path, *specs: TenantSpec, replicas: Replicas | None = None, **changes: Any) -> TrainingRuntime:
    runtime = TrainingRuntime(
        engine(**changes), publish=Replicas() if replicas is None else replicas, keep_checkpoints=2
    )
    for spec in specs:
        runtime.open_tenant(spec, folder / spec.tenant, None)
        runtime.start_workload(spec.tenant, 0)
    return runtime


def is_over(runtime: TrainingRuntime) -> bool:
    return all(each.finished or each.error for each in runtime.progress().values())


def finish(runtime: TrainingRuntime, lanes: Lanes, *, steps: int | None = None) -> int:
    """Run until every workload is over, or for so many steps."""
    done = 0
    while not is_over(runtime) and (steps is None or done < steps):
        lanes.feed(runtime)
        outcome = runtime.step()
        lanes.acknowledge(outcome.acknowledged)
        done += 1
        assert done < 500, "no end"
    return done


def weights(runtime: TrainingRuntime, tenant: str = "a") -> dict[str, Array]:
    return dict(runtime._engine.snapshot(tenant).parameters)


def sft_items(tenant: str, count: int) -> list[LaneItem]:
    return [sft_item(tenant, ordinal) for ordinal in range(count)]


def rl_items(tenant: str, count: int, *, per_iteration: int = 3) -> list[LaneItem]:
    return [rl_item(tenant, episode, version=episode // per_iteration) for episode in range(count)]


# ---- workloads


def test_an_sft_workload_from_end_to_end(tmp_path: Path) -> None:
    replicas, lanes = Replicas(), Lanes(sft_items("a", 6))
    runtime = start(tmp_path, sft_tenant(num_steps=6, checkpoint_every=2), replicas=replicas)
    assert runtime.wanted() == {"a": 5}
    assert runtime.progress()["a"].next_ordinal == 0
    finish(runtime, lanes)
    progress = runtime.progress()["a"]
    assert (progress.finished, progress.error, progress.steps, progress.policy_version) == (True, None, 6, 3)
    assert progress.loss_first != progress.loss_last
    assert lanes.acknowledged == set(lanes.items)
    assert replicas.order == [("a", version) for version in range(4)]
    assert are_equal(dict(replicas.versions["a", 3].parameters), weights(runtime))
    kept = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert kept == ["step_00000004_v000002", "step_00000006_v000003"]
    assert runtime.wanted() == {"a": 0}
    assert not runtime.step().did_work
    assert runtime.start_workload("a", 0) == progress


def test_an_rl_workload_from_end_to_end(tmp_path: Path) -> None:
    replicas, lanes = Replicas(), Lanes(rl_items("a", 9))
    runtime = start(tmp_path, rl_tenant(num_iterations=3), replicas=replicas)
    versions, oldest, iterations = [], [], []
    while not is_over(runtime):
        lanes.feed(runtime)
        outcome = runtime.step()
        lanes.acknowledge(outcome.acknowledged)
        versions += outcome.versions.values()
        oldest += outcome.oldest_useful.values()
        iterations += [each.metrics for each in outcome.progress.values()]
        assert set(outcome.results) <= {"a"}
    progress = runtime.progress()["a"]
    assert (progress.iterations, progress.steps, progress.policy_version, progress.next_ordinal) == (3, 18, 3, 9)
    assert versions == [1, 2, 3]
    assert oldest == [0, 1, 2]
    assert len(iterations) == 3
    assert {"return_mean", "success_once", "success_at_end", "kl", "clip_fraction", "value_loss", "policy_loss"} <= set(
        iterations[0]
    )
    assert {"entropy", "explained_variance", "decisions"} <= set(iterations[0])
    assert lanes.acknowledged == set(lanes.items)
    usage = runtime.usage()
    assert usage.encoded == 27  # each decision once, though it was seen in two epochs
    assert usage.reused == 27


def test_workloads_follow_each_other_with_a_fresh_optimizer(tmp_path: Path) -> None:
    spec = sft_tenant(num_steps=2)
    spec = spec.model_copy(update={"workloads": spec.workloads * 2})
    runtime = start(tmp_path, spec)
    with pytest.raises(SequenceConflictError, match="start_workload 1 while workload 0 runs"):
        runtime.start_workload("a", 1)
    finish(runtime, Lanes(sft_items("a", 2)))
    assert runtime.start_workload("a", 1).steps == 0
    assert runtime._engine.status("a").schedule_step == 0
    assert all(not each.any() for each in runtime._engine._slot("a").state.optimizer.tensors().values())
    assert runtime.start_workload("a", 0).finished
    finish(runtime, Lanes([sft_item("a", ordinal, workload=1) for ordinal in range(2)]))
    assert runtime.progress()["a"].workload == 1
    assert runtime._engine.status("a").optimizer_steps == 4
    resumed = start(tmp_path, spec)
    assert resumed.start_workload("a", 1) == dataclasses.replace(runtime.progress()["a"])
    assert are_equal(weights(runtime), weights(resumed))


def test_a_workload_that_the_spec_does_not_hold_can_be_given(tmp_path: Path) -> None:
    with_one = sft_tenant(num_steps=2)
    bare = with_one.model_copy(update={"workloads": ()})
    runtime = TrainingRuntime(engine(), publish=Replicas(), keep_checkpoints=2)
    runtime.open_tenant(bare, tmp_path, None)
    with pytest.raises(SpecError, match="workload 0 is no training workload"):
        runtime.start_workload("a", 0)
    runtime.start_workload("a", 3, with_one.workloads[0])  # type: ignore[arg-type]
    finish(runtime, Lanes([sft_item("a", ordinal, workload=3) for ordinal in range(2)]))
    assert runtime.progress()["a"].finished
    runtime.open_tenant(with_one, tmp_path, None)  # the same tenant, with a workload more: nothing changes


class PatientLearner(PpoLearner):
    """A third party's algorithm: PPO that publishes every other iteration."""

    def on_result(self, result: TrainingResult) -> Boundary:
        boundary = super().on_result(result)
        return dataclasses.replace(boundary, publish=boundary.publish and self.progress().iterations % 2 == 0)


class PatientSpec(PpoSpec):
    """Its spec, which names it."""

    implementation = f"{__name__}:PatientLearner"


def test_the_algorithms_spec_names_its_learner(tmp_path: Path) -> None:
    spec = rl_tenant(num_iterations=4, max_staleness=4)
    workload = spec.workloads[0].model_copy(update={"algorithm": PatientSpec(num_epochs=1, minibatch_size=4)})
    replicas, lanes = Replicas(), Lanes([rl_item("a", episode) for episode in range(12)])
    runtime = start(tmp_path, spec.model_copy(update={"workloads": (workload,)}), replicas=replicas)
    assert isinstance(runtime._runs["a"].workload.learner, PatientLearner)  # type: ignore[union-attr]
    finish(runtime, lanes)
    assert runtime.progress()["a"].iterations == 4
    assert replicas.order == [("a", 0), ("a", 1), ("a", 2)]
    assert lanes.acknowledged == set(lanes.items)


def test_what_was_durable_but_not_published_becomes_a_version_of_its_own(tmp_path: Path) -> None:
    spec = rl_tenant(num_iterations=3, max_staleness=4)
    workload = spec.workloads[0].model_copy(update={"algorithm": PatientSpec(num_epochs=1, minibatch_size=4)})
    spec = spec.model_copy(update={"workloads": (workload,)})
    replicas = Replicas()
    finish(start(tmp_path, spec, replicas=replicas), Lanes([rl_item("a", episode) for episode in range(9)]))
    resumed = start(tmp_path, spec, replicas=replicas)
    assert replicas.order == [("a", 0), ("a", 1), ("a", 0), ("a", 2)]
    assert resumed.progress()["a"].iterations == 3


def test_an_evaluation_is_no_training_workload(tmp_path: Path) -> None:
    spec = rl_tenant()
    evaluation = EvaluationSpec(environment=spec.workloads[0].environment)  # type: ignore[union-attr]
    runtime = TrainingRuntime(engine(), publish=Replicas(), keep_checkpoints=2)
    runtime.open_tenant(spec.model_copy(update={"workloads": (evaluation,)}), tmp_path, None)
    with pytest.raises(SpecError, match="no training workload"):
        runtime.start_workload("a", 0)
    with pytest.raises(SpecError, match="no training workload"):
        runtime.start_workload("a", 7)


# ---- crashes


def uninterrupted(folder: Path, spec: TenantSpec, items: Sequence[LaneItem]) -> dict[str, Array]:
    runtime = start(folder, spec)
    finish(runtime, Lanes(items))
    return weights(runtime, spec.tenant)


def with_adapter(spec: TenantSpec, adapter: AdapterSpec | None) -> TenantSpec:
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"adapter": adapter})})


@pytest.mark.parametrize(("steps", "adapter"), [(1, None), (2, None), (3, None), (5, None), (3, AdapterSpec())])
def test_a_crash_of_sft_loses_and_repeats_nothing(tmp_path: Path, steps: int, adapter: AdapterSpec | None) -> None:
    spec = with_adapter(sft_tenant(num_steps=6, checkpoint_every=2, module="flow_matching"), adapter)
    items = sft_items("a", 6)
    expected = uninterrupted(tmp_path / "whole", spec, items)
    replicas, lanes = Replicas(), Lanes(items)
    first = start(tmp_path, spec, replicas=replicas)
    finish(first, lanes, steps=steps)
    del first  # without closing anything
    lanes.consumer_died()
    second = start(tmp_path, spec, replicas=replicas)
    known = sorted(lanes.acknowledged)
    assert second.offer([lanes.items[name] for name in known]) == known
    finish(second, lanes)
    assert are_equal(weights(second), expected)
    assert second.progress()["a"].steps == 6
    assert lanes.acknowledged == set(lanes.items)


@pytest.mark.parametrize(("steps", "adapter"), [(1, None), (6, None), (7, None), (13, None), (7, AdapterSpec())])
def test_a_crash_of_rl_loses_and_repeats_nothing(tmp_path: Path, steps: int, adapter: AdapterSpec | None) -> None:
    spec, items = with_adapter(rl_tenant(num_iterations=3), adapter), rl_items("a", 9)
    expected = uninterrupted(tmp_path / "whole", spec, items)
    replicas, lanes = Replicas(), Lanes(items)
    first = start(tmp_path, spec, replicas=replicas)
    finish(first, lanes, steps=steps)
    del first
    lanes.consumer_died()
    second = start(tmp_path, spec, replicas=replicas)
    known = sorted(lanes.acknowledged)
    assert second.offer([lanes.items[name] for name in reversed(known)]) == list(reversed(known))
    finish(second, lanes)
    assert are_equal(weights(second), expected)
    assert second.progress()["a"].policy_version == 3
    assert lanes.acknowledged == set(lanes.items)


def test_a_lost_acknowledgement_makes_known_duplicates(tmp_path: Path) -> None:
    spec, items = sft_tenant(num_steps=4, checkpoint_every=2), sft_items("a", 4)
    expected = uninterrupted(tmp_path / "whole", spec, items)
    first = start(tmp_path, spec)
    for item in items[:2]:
        first.offer([item])
        first.step()
    second = start(tmp_path, spec)  # everything was applied and durable, and nothing acknowledged
    lanes = Lanes(items)
    lanes.acknowledge(second.offer(items))
    assert lanes.acknowledged == {items[0].item_id, items[1].item_id}
    finish(second, lanes)
    assert are_equal(weights(second), expected)


class CrashError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_the_checkpoint_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    spec, items = sft_tenant(num_steps=4, checkpoint_every=2), sft_items("a", 4)
    expected = uninterrupted(tmp_path / "whole", spec, items)
    replicas, lanes = Replicas(), Lanes(items)
    first = start(tmp_path, spec, replicas=replicas)
    real: Callable[..., Path] = first._engine.save_state

    def dying(tenant: str, folder: Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        if when == "after":
            real(tenant, folder, extra=extra)
        raise CrashError

    monkeypatch.setattr(first._engine, "save_state", dying)
    with pytest.raises(CrashError):
        finish(first, lanes)
    assert replicas.order == [("a", 0)]  # a version is durable before it is published
    assert lanes.acknowledged == set()
    lanes.consumer_died()
    second = start(tmp_path, spec, replicas=replicas)
    assert second.progress()["a"].steps == (2 if when == "after" else 0)
    finish(second, lanes)
    assert are_equal(weights(second), expected)
    assert [version for _, version in replicas.order][-2:] == [1, 2]


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").iterdir())[-1]


def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec, items = sft_tenant(num_steps=6, checkpoint_every=2), sft_items("a", 6)
    expected = uninterrupted(tmp_path / "whole", spec, items)
    replicas = Replicas()
    first = start(tmp_path, spec, replicas=replicas)
    finish(first, Lanes(items), steps=4)
    damaged = newest(tmp_path / "a") / "module.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        second = start(tmp_path, spec, replicas=replicas)
    assert "module.safetensors" in caplog.text
    assert "trying the one before it" in caplog.text
    progress = second.progress()["a"]
    assert (progress.steps, progress.next_ordinal) == (2, 2)
    assert progress.policy_version == 3  # 2 was published by what is lost, and is never given to other parameters
    finish(second, Lanes(items))
    assert are_equal(weights(second), expected)
    assert [version for _, version in replicas.order] == [0, 1, 2, 0, 3, 4, 5]


def test_a_run_without_one_good_checkpoint_is_refused(tmp_path: Path) -> None:
    spec = sft_tenant(num_steps=4, checkpoint_every=2)
    finish(start(tmp_path, spec), Lanes(sft_items("a", 4)))
    for folder in (tmp_path / "a" / "checkpoints").iterdir():
        (folder / "state.json").unlink()
    runtime = TrainingRuntime(engine(slots=1), publish=Replicas(), keep_checkpoints=2)
    with pytest.raises(CheckpointError, match="none of 2 checkpoints can be used"):
        runtime.open_tenant(spec, tmp_path / "a", None)
    runtime.open_tenant(spec, tmp_path / "elsewhere", None)  # the slot is free


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    finish(start(tmp_path, sft_tenant(num_steps=2)), Lanes(sft_items("a", 2)))
    runtime = TrainingRuntime(engine(), publish=Replicas(), keep_checkpoints=2)
    with pytest.raises(CheckpointError, match=r"another run: .'seed'"):
        runtime.open_tenant(sft_tenant(num_steps=2, seed=1), tmp_path / "a", None)


def test_c82_a_resumed_run_keeps_its_statistics(tmp_path: Path) -> None:
    spec = sft_tenant(num_steps=2)
    replicas = Replicas()
    runtime = TrainingRuntime(engine(), publish=replicas, keep_checkpoints=2)
    used = runtime.open_tenant(spec, tmp_path, policy_stats(shift=0.5))
    assert used is not None
    assert used.source == "d0.5"
    runtime.start_workload("a", 0)
    finish(runtime, Lanes(sft_items("a", 2)))
    again = TrainingRuntime(engine(), publish=replicas, keep_checkpoints=2)
    told = again.open_tenant(spec, tmp_path, policy_stats(shift=9.0))
    kept = again._engine.snapshot("a").stats
    assert kept is not None
    assert kept.source == "d0.5"
    assert told is kept
    assert again.open_tenant(spec, tmp_path, policy_stats(shift=9.0)) is kept
    assert replicas.order == [("a", 0), ("a", 1), ("a", 0), ("a", 1)]


# ---- tenants beside each other


def test_a_failing_tenant_fails_alone(tmp_path: Path) -> None:
    good = sft_tenant("good", num_steps=4)
    expected = uninterrupted(tmp_path / "whole", good, sft_items("good", 4))
    runtime = start(tmp_path, good, sft_tenant("nan"), rl_tenant("confused"))
    poisoned = sft_items("nan", 6)
    poisoned[1].payload.observation.state[:] = np.nan
    confused = dataclasses.replace(sft_item("confused", 0), tenant="confused")
    lanes = Lanes([*sft_items("good", 4), *poisoned, confused])
    finish(runtime, lanes)
    progress = runtime.progress()
    assert progress["nan"].error is not None
    assert progress["nan"].error.startswith("NonFiniteError: tenant 'nan': state")
    assert progress["nan"].steps == 1
    assert progress["confused"].error is not None
    assert progress["confused"].error.startswith("InvalidBatchError")
    assert (progress["good"].finished, progress["good"].error) == (True, None)
    assert are_equal(weights(runtime, "good"), expected)
    assert runtime.wanted()["nan"] == 0
    assert runtime.offer([poisoned[2]]) == [poisoned[2].item_id]


class BrokenLearner(SftLearner):
    """Raises where it is told to."""

    where = ""

    def room(self) -> int:
        if self.where == "room":
            raise KeyError("room")
        return super().room()

    def next_call(self) -> Any:
        if self.where == "next_call":
            raise KeyError("next_call")
        return super().next_call()

    def on_result(self, result: TrainingResult) -> Boundary:
        if self.where == "on_result":
            raise KeyError("on_result")
        return super().on_result(result)


@pytest.mark.parametrize("where", ["room", "next_call", "on_result"])
def test_a_broken_learner_fails_its_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr("joynexus.training.workload_run.SftLearner", BrokenLearner)
    monkeypatch.setattr(BrokenLearner, "where", where)
    runtime = start(tmp_path, sft_tenant("a"))
    monkeypatch.setattr("joynexus.training.workload_run.SftLearner", SftLearner)
    runtime.open_tenant(sft_tenant("good", num_steps=2), tmp_path / "good", None)
    runtime.start_workload("good", 0)
    finish(runtime, Lanes([*sft_items("a", 6), *sft_items("good", 2)]))
    assert runtime.progress()["a"].error == f"KeyError: '{where}'"
    assert runtime.progress()["good"].finished


def test_a_disk_that_refuses_fails_the_workload_of_its_tenant(tmp_path: Path) -> None:
    runtime = start(tmp_path, sft_tenant("a", num_steps=2), sft_tenant("good", num_steps=2))
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    (tmp_path / "a").write_text("in the way")
    finish(runtime, Lanes([*sft_items("a", 2), *sft_items("good", 2)]))
    error = runtime.progress()["a"].error
    assert error is not None
    assert error.startswith("CheckpointError")
    assert runtime.progress()["good"].finished


def test_a_store_that_is_away_gets_the_versions_later(tmp_path: Path) -> None:
    replicas = Replicas()
    replicas.is_away = True
    runtime = start(tmp_path, sft_tenant(num_steps=4, checkpoint_every=2), replicas=replicas)
    finish(runtime, Lanes(sft_items("a", 4)))
    assert runtime.progress()["a"].finished
    assert replicas.order == []
    replicas.is_away = False
    runtime.step()
    assert replicas.order == [("a", 0), ("a", 2)]  # base and newest; the one between is of use to nobody
    runtime.step()
    assert len(replicas.order) == 2
    runtime.republish()
    assert replicas.order[2:] == [("a", 0), ("a", 2)]


def test_opening_again_changes_nothing_and_closing_frees_the_name(tmp_path: Path) -> None:
    replicas = Replicas()
    runtime = start(tmp_path, sft_tenant(num_steps=4), replicas=replicas, slots=1)
    finish(runtime, Lanes(sft_items("a", 4)), steps=1)
    runtime.open_tenant(sft_tenant(num_steps=4), tmp_path / "a", None)
    assert runtime.progress()["a"].steps == 1
    with pytest.raises(TenantExistsError):
        runtime.open_tenant(sft_tenant(num_steps=4, seed=9), tmp_path / "a", None)
    runtime.close_tenant("a")
    assert (runtime.progress(), runtime.wanted()) == ({}, {})
    for ask in (
        lambda: runtime.close_tenant("a"),
        lambda: runtime.sync_weights("a"),
        lambda: runtime.start_workload("a", 0),
        lambda: runtime.submit(step_call("a", 0)),
    ):
        with pytest.raises(TenantNotFoundError):
            ask()
    item = sft_item("a", 1)
    assert runtime.offer([item]) == [item.item_id]
    runtime.open_tenant(sft_tenant("b"), tmp_path / "b", None)


# ---- low-level calls


def bare(name: str = "a") -> TenantSpec:
    return sft_tenant(name).model_copy(update={"workloads": ()})


def test_a_tenant_without_workloads_is_driven_call_by_call(tmp_path: Path) -> None:
    replicas = Replicas()
    runtime = TrainingRuntime(engine(), publish=replicas, keep_checkpoints=2)
    runtime.open_tenant(bare(), tmp_path / "a", None)
    futures = [
        runtime.submit(forward_call("a", 0, batch(2, 1))),
        runtime.submit(step_call("a", 1)),
        runtime.submit(train_call("a", 2, batch(2, 2))),
    ]
    while runtime.step().did_work:
        pass
    assert [future.result(timeout=0).sequence for future in futures] == [0, 1, 2]
    assert runtime.next_sequence("a") == 3
    assert runtime.sync_weights("a") == 1
    saved = runtime.save_state("a", "mine")
    assert saved == tmp_path / "a" / "states" / "mine"
    was = weights(runtime)
    runtime.submit(train_call("a", 3, batch(2, 3)))
    runtime.step()
    assert not are_equal(was, weights(runtime))
    runtime.load_state("a", "mine")
    assert are_equal(was, weights(runtime))
    assert runtime.next_sequence("a") == 4
    assert runtime.sync_weights("a") == 2
    assert runtime.version("a") == 2
    assert replicas.order == [("a", 0), ("a", 1), ("a", 2)]
    runtime.export("a", tmp_path / "out")
    assert are_equal(dict(read_export(tmp_path / "out").parameters), was)
    for name in ("../b", "", "a/b", ".hidden"):
        with pytest.raises(SpecError, match="not a name"):
            runtime.save_state("a", name)
    with pytest.raises(CheckpointError):
        runtime.load_state("a", "nothing")


def test_a_synced_version_survives_a_crash_and_is_never_given_twice(tmp_path: Path) -> None:
    replicas = Replicas()
    runtime = TrainingRuntime(engine(), publish=replicas, keep_checkpoints=2)
    runtime.open_tenant(bare(), tmp_path, None)
    call = train_call("a", 0, batch(2, 1))
    future = runtime.submit(call)
    runtime.step()
    runtime.sync_weights("a")
    was = weights(runtime)
    again = TrainingRuntime(engine(), publish=replicas, keep_checkpoints=2)
    again.open_tenant(bare(), tmp_path, None)
    assert replicas.order == [("a", 0), ("a", 1), ("a", 0), ("a", 1)]
    assert are_equal(weights(again), was)
    assert again.next_sequence("a") == 1
    assert again.submit(call).result(timeout=0) == future.result(timeout=0)
    again.submit(train_call("a", 1, batch(2, 2)))
    again.step()
    assert again.sync_weights("a") == 2


def test_a_running_workload_keeps_the_low_level_calls_out(tmp_path: Path) -> None:
    runtime = start(tmp_path, sft_tenant(num_steps=2))
    for ask in (
        lambda: runtime.submit(step_call("a", 0, FAST)),
        lambda: runtime.sync_weights("a"),
        lambda: runtime.load_state("a", "x"),
    ):
        with pytest.raises(SequenceConflictError, match="while workload 0 runs"):
            ask()
    finish(runtime, Lanes(sft_items("a", 2)))
    future = runtime.submit(step_call("a", runtime.next_sequence("a"), FAST))
    runtime.step()
    assert future.result(timeout=0).metrics["skipped"] == 1.0


def test_the_backbone_is_as_it_was(tmp_path: Path) -> None:
    runtime = start(tmp_path, sft_tenant("a", num_steps=2), rl_tenant("b", num_iterations=1))
    before = runtime.checksum()
    finish(runtime, Lanes([*sft_items("a", 2), *rl_items("b", 3)]))
    runtime.close_tenant("a")
    assert runtime.checksum() == before
    tensors, state = read_checkpoint(newest(tmp_path / "b"))
    assert set(tensors) == {"module", "optimizer"}
    assert state["tenant"] == "b"
