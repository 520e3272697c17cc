"""SFT epochs without frames: the same to the bit as with them, whatever the store can hold and whenever one crashes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_world import are_equal, backbone, batch, engine, policy, policy_stats, sft_tenant, train_call

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.producer import ProducerEngine
from joynexus.data.sampler import EpochSampler
from joynexus.errors import InvalidBatchError
from joynexus.models.policy import prefix_keys, prepare_prefix
from joynexus.specs.contract import InterfaceContract
from joynexus.specs.data import DatasetSpec
from joynexus.specs.tenant import TenantSpec
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.training.engine import TrainingEngine
from joynexus.training.light_items import LightItems
from joynexus.training.runtime import TrainingRuntime
from joynexus.training.sample_keys import KEPT_SAMPLES, SampleKeys
from joynexus.types import Array, LaneItem, PolicyStats, TrainingBatch, ViewSpec

ROWS = 12
BATCH = 2
EPOCH = ROWS // BATCH


def without_frames(full: TrainingBatch) -> TrainingBatch:
    return TrainingBatch(
        observation=full.observation.without_frames(),
        actions=full.actions,
        action_is_pad=full.action_is_pad,
        sample_ids=full.sample_ids,
    )


class MemoryDataset(EpisodeDataset):
    """A few rows in memory; frames are counted as they are read."""

    def __init__(self, seed: int = 1) -> None:
        self._all = batch(ROWS, seed)
        self.frames_read = 0

    @classmethod
    def open(cls, spec: DatasetSpec, view: ViewSpec) -> "MemoryDataset":
        raise NotImplementedError

    @property
    def contract(self) -> InterfaceContract:
        raise NotImplementedError

    @property
    def num_frames(self) -> int:
        return ROWS

    def statistics(self) -> PolicyStats:
        raise NotImplementedError

    def read(self, indices: Sequence[int] | Array, horizon: int, *, with_frames: bool = True) -> TrainingBatch:
        picked = self._all.rows(np.asarray(indices))
        self.frames_read += len(indices) if with_frames else 0
        return picked if with_frames else without_frames(picked)

    def close(self) -> None:
        pass


class World:
    """A producer, a lane without limits, and a trainer that can be made anew."""

    def __init__(
        self,
        folder: Path,
        spec: TenantSpec,
        *,
        light: bool,
        seed: int = 1,
        stats: PolicyStats | None = None,
        **changes: Any,
    ) -> None:
        self.spec, self.stats = spec, stats
        self.dataset = MemoryDataset(seed)
        self.producer = ProducerEngine(
            self.dataset,
            EpochSampler(ROWS, BATCH, seed=spec.seed),
            tenant=spec.tenant,
            workload=0,
            horizon=4,
            num_items=1000,
            frame_bytes=16 * 16 * 3,
            light_epochs=light,
        )
        self.fetched: list[int] = []
        self.slow: list[LaneItem] = []
        """Full items on their way; they come one step late."""
        self._folder, self._changes = folder, changes
        self.begin()

    def begin(self, *, stored_from: int | None = None) -> None:
        """Make the trainer anew, and let the producer go on from its checkpoint."""
        self.trainer: TrainingEngine = engine(**self._changes)
        self.runtime = TrainingRuntime(self.trainer, publish=lambda _: None, keep_checkpoints=2)
        self.runtime.open_tenant(self.spec, self._folder, self.stats)
        first = self.runtime.start_workload(self.spec.tenant, 0).next_ordinal
        self.producer.begin(first, stored_from=first if stored_from is None else stored_from)
        self.next = first
        self.slow = []

    def step(self) -> None:
        for _ in range(self.runtime.wanted()[self.spec.tenant]):
            assert self.runtime.offer([self.producer.next_item(self.next)]) == []
            self.next += 1
        arrived, self.slow = self.slow, []
        for incomplete in self.runtime.take_incomplete():
            self.fetched.append(incomplete.ordinal)
            self.slow.append(self.producer.full_item(incomplete.ordinal))
        assert self.runtime.offer(arrived) == []
        self.runtime.step()

    def run(self, steps: int | None = None) -> dict[str, Array]:
        for _ in range(1000 if steps is None else steps):
            progress = self.runtime.progress()[self.spec.tenant]
            assert progress.error is None
            if progress.finished:
                break
            self.step()
        else:
            assert steps is not None, "no end"
        return dict(self.trainer.snapshot(self.spec.tenant).parameters)


def spec(**changes: Any) -> TenantSpec:
    return sft_tenant(**{"num_steps": 4 * EPOCH, "checkpoint_every": 1000, **changes})


def row_bytes() -> int:
    """Bytes of one row in the prefix store."""
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    trainer.submit(train_call("a", 0, batch(1, 3)))
    trainer.step()
    return trainer._store.nbytes


def store(rows: int) -> dict[str, Any]:
    return {"prefix_store": {"device_bytes": rows * row_bytes(), "host_bytes": 0}}


@pytest.mark.parametrize("module", ["oft", "flow_matching"])
def test_light_epochs_learn_the_same_to_the_bit(tmp_path: Path, module: str) -> None:
    full = World(tmp_path / "full", spec(module=module), light=False)
    light = World(tmp_path / "light", spec(module=module), light=True)
    assert are_equal(full.run(), light.run())
    assert light.fetched == []
    assert light.dataset.frames_read == ROWS
    assert full.dataset.frames_read >= 4 * ROWS
    found, expected = light.trainer.usage(), full.trainer.usage()
    assert (found.encoded, found.reused) == (expected.encoded, expected.reused) == (ROWS, 3 * ROWS)
    first, second = (world.runtime.progress()["a"] for world in (full, light))
    assert (first.loss_first, first.loss_last) == (second.loss_first, second.loss_last)
    assert second.metrics["light_items"] == 3 * EPOCH
    assert second.metrics["fetched_items"] == 0
    assert second.metrics["saved_bytes"] == 3 * ROWS * 16 * 16 * 3
    assert "light_items" not in first.metrics


@pytest.mark.parametrize(("rows", "accumulation"), [(0, 1), (5, 1), (ROWS - 1, 1), (5, 3)])
def test_what_the_store_lost_is_fetched_and_nothing_changes(tmp_path: Path, rows: int, accumulation: int) -> None:
    tenant = spec(gradient_accumulation=accumulation, num_steps=6 * EPOCH // accumulation)
    full = World(tmp_path / "full", tenant, light=False, **store(rows))
    light = World(tmp_path / "light", tenant, light=True, **store(rows))
    assert are_equal(full.run(), light.run())
    assert light.fetched
    progress = light.runtime.progress()["a"]
    assert progress.metrics["fetched_items"] == len(light.fetched) == len(set(light.fetched))
    # The producer gives up on light items where they are asked for again: most went in full.
    assert len(light.fetched) < 4 * EPOCH


@pytest.mark.parametrize(("steps", "trusts"), [(3, True), (EPOCH + 1, False), (2 * EPOCH + 3, False), (15, True)])
def test_after_a_crash_light_items_come_in_full(tmp_path: Path, steps: int, trusts: bool) -> None:
    expected = World(tmp_path / "full", spec(), light=False).run()
    world = World(tmp_path / "light", spec(checkpoint_every=2), light=True)
    world.run(steps)
    world.begin(stored_from=0 if trusts else None)  # the trainer's store is empty now, whatever the producer believes
    assert are_equal(world.run(), expected)
    assert bool(world.fetched) == trusts


def test_an_item_that_follows_its_rows_closely_waits_for_them(tmp_path: Path) -> None:
    """The second epoch is in the trainer's hands before the first one is trained on."""
    world = World(tmp_path, spec(gradient_accumulation=2 * EPOCH, num_steps=2), light=True)
    world.run(1)
    assert world.next > EPOCH
    world.run()
    assert world.fetched == []
    assert world.runtime.progress()["a"].finished


def test_a_tenant_beside_it_changes_nothing(tmp_path: Path) -> None:
    """Another tenant with the same sample ids and other frames: ids are each workload's own."""
    alone = World(tmp_path / "alone", spec(), light=True, seed=1).run()
    world = World(tmp_path / "a", spec(), light=True, seed=1)
    other = World(tmp_path / "unused", spec(name="b"), light=True, seed=2)
    ids = world.dataset.read([0], 4).sample_ids
    assert ids != other.dataset.read([0], 4).sample_ids
    other.dataset._all = TrainingBatch(
        observation=other.dataset._all.observation,
        actions=other.dataset._all.actions,
        action_is_pad=other.dataset._all.action_is_pad,
        sample_ids=world.dataset._all.sample_ids,
    )
    expected = World(tmp_path / "other", spec(name="b"), light=False, seed=2).run()
    other.trainer, other.runtime = world.trainer, world.runtime
    other.runtime.open_tenant(other.spec, tmp_path / "b", None)
    other.runtime.start_workload("b", 0)
    for _ in range(200):
        for each in (world, other):
            if not each.runtime.progress()[each.spec.tenant].finished:
                each.step()
    assert are_equal(dict(world.trainer.snapshot("a").parameters), alone)
    assert are_equal(dict(world.trainer.snapshot("b").parameters), expected)


def state_in_prompt(name: str = "a") -> TenantSpec:
    """A tenant whose prompt holds the state."""
    tenant = spec(name=name, module="flow_matching")
    seen = {"prompt_template": "{instruction}: {state}", "state_bins": 16, "max_prompt_tokens": 24}
    changed = {
        "observation": tenant.policy.observation.model_copy(update=seen),
        "action": tenant.policy.action.model_copy(update={"normalization": "min_max"}),
    }
    return tenant.model_copy(update={"policy": tenant.policy.model_copy(update=changed)})


def test_light_epochs_hold_where_the_prompt_has_the_state(tmp_path: Path) -> None:
    """Two tenants with the same frames, sample ids and prompts, but for the statistics behind the state's bins."""
    first, second = policy_stats(), policy_stats(shift=1.0)
    second = replace(second, state=replace(first.state, maximum=first.state.maximum + 5.0))
    full, world = (
        World(tmp_path / f"light-{light}", state_in_prompt(), light=light, stats=first) for light in (False, True)
    )
    alone = full.run()
    expected = World(tmp_path / "other", state_in_prompt("b"), light=True, stats=second).run()
    other = World(tmp_path / "unused", state_in_prompt("b"), light=True, stats=second)
    other.trainer, other.runtime = world.trainer, world.runtime
    other.runtime.open_tenant(other.spec, tmp_path / "b", second)
    other.runtime.start_workload("b", 0)
    for _ in range(200):
        for each in (world, other):
            if not each.runtime.progress()[each.spec.tenant].finished:
                each.step()
    assert are_equal(dict(world.trainer.snapshot("a").parameters), alone)
    assert are_equal(dict(world.trainer.snapshot("b").parameters), expected)
    assert world.fetched == []
    assert world.dataset.frames_read == ROWS
    assert world.trainer.usage().encoded > ROWS, "other statistics are other tokens, which need rows of their own"


# ---- the parts


def keyed(full: TrainingBatch) -> list[bytes]:
    prefix = prepare_prefix(backbone(), policy(), full.observation, UNCHANGED)
    return prefix_keys(prefix, "s")


def test_a_note_forgets_what_the_store_has_lost() -> None:
    trainer = engine()
    known, keys = SampleKeys(), keyed(batch(1, 5))
    known.learn(["first"], keys, trainer._store)
    for index in range(KEPT_SAMPLES):
        known.learn([str(index)], keys, trainer._store)
    assert len(known) == 0
    known.learn(["second"], keys, trainer._store)
    assert known.find(["first", "second"]) == {"second": keys[0]}


def item(ordinal: int, payload: TrainingBatch) -> LaneItem:
    return LaneItem(
        item_id=f"a/{ordinal}", tenant="a", workload=0, ordinal=ordinal, policy_version=2**63 - 1, payload=payload
    )


def test_rows_of_a_later_item_are_not_waited_for() -> None:
    """They will not be trained on before this one."""
    light = LightItems(lambda keys: [None for _ in keys])
    full = batch(2, 5)
    light.take(item(3, full))
    light.take(item(1, without_frames(full)))
    assert [each.ordinal for each in light.take_incomplete()] == [1]
    assert light.take_incomplete() == []
    light.take(item(4, without_frames(full)))  # 1 and 3 bring its rows
    assert light.take_incomplete() == []
    light.done("a/3")
    assert light.take_incomplete() == []
    assert light.ready("a/1") is None
    assert not light.complete(item(1, without_frames(full)))
    assert light.complete(item(1, full))
    assert not light.complete(item(1, full))
    ready = light.ready("a/1")
    assert ready is not None
    assert ready == (full, None)
    light.done("a/1")
    assert [each.ordinal for each in light.take_incomplete()] == [4]


def test_features_of_other_rows_are_refused() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    full = batch(2, 5)
    known = SampleKeys()
    trainer.submit(train_call("a", 0, full), is_repeatable=False, sample_keys=known)
    trainer.step()
    rows = [each for each in trainer.hold(list(known.find(full.sample_ids).values())) if each is not None]
    with pytest.raises(InvalidBatchError, match="1 rows of features for 2 rows"):
        trainer.submit(train_call("a", 1, without_frames(full)), features=rows[:1])
    with pytest.raises(InvalidBatchError, match="frames were left out"):
        trainer.submit(train_call("a", 1, without_frames(full)))
    future = trainer.submit(train_call("a", 1, without_frames(full)), features=rows)
    trainer.step()
    assert (future.result().encoded, future.result().reused) == (0, 2)
