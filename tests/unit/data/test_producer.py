import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from joynexus.data.producer import LightCounts, ProducerEngine
from joynexus.data.sampler import EpochSampler
from joynexus.errors import ContractError, DatasetError, SpecError
from joynexus.specs.action_module import OftModuleSpec
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.data import ManiSkillH5Spec
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec, SftSpec, TenantSpec
from joynexus.types import NEVER_STALE, TrainingBatch

Writer = Callable[..., Path]


def _tenant(path: Path, **observed: object) -> tuple[TenantSpec, SftSpec]:
    seen = {"cameras": ("base_camera",), "image_size": (16, 24), "state_dim": 20} | observed
    policy = PolicySpec(
        backbone="lite",
        observation=ObservationSpec.model_validate(seen),
        action=ActionSpec(dim=7, horizon=4, num_action_steps=2, normalization="quantile"),
        action_module=OftModuleSpec(),
    )
    sft = SftSpec(dataset=ManiSkillH5Spec(path=path), num_steps=6, batch_size=8, gradient_accumulation=2)
    return TenantSpec(tenant="pick-cube", seed=3, policy=policy, workloads=(sft,)), sft


def _batch(engine: ProducerEngine, ordinal: int) -> TrainingBatch:
    payload = engine.item(ordinal).payload
    assert isinstance(payload, TrainingBatch)
    return payload


def test_items_are_numbered_and_named_for_their_workload(write_file: Writer):
    engine = ProducerEngine.open(*_with_index(write_file(), 2))
    item = engine.item(5)
    assert (item.item_id, item.tenant, item.workload, item.ordinal) == ("pick-cube/w2/b5", "pick-cube", 2, 5)
    assert item.policy_version == NEVER_STALE
    assert item.cost == 8
    assert item.payload.actions.shape == (8, 4, 7)


def _with_index(path: Path, workload: int) -> tuple[TenantSpec, int, SftSpec]:
    tenant, sft = _tenant(path)
    return tenant, workload, sft


def test_a_workload_ends_after_all_its_micro_batches(write_file: Writer):
    engine = ProducerEngine.open(*_with_index(write_file(), 0))
    assert engine.num_items == 12  # 6 steps of 2 micro-batches
    assert [item.ordinal for item in engine.items(9)] == [9, 10, 11]


def test_a_new_producer_goes_on_exactly(write_file: Writer):
    path = write_file()
    first = ProducerEngine.open(*_with_index(path, 0))
    whole = [_batch(first, ordinal) for ordinal in range(12)]
    second = ProducerEngine.open(*_with_index(path, 0))
    for ordinal in (7, 3, 11):
        again = _batch(second, ordinal)
        assert again.sample_ids == whole[ordinal].sample_ids
        np.testing.assert_array_equal(again.observation.images, whole[ordinal].observation.images)


def test_an_epoch_holds_every_sample_once(write_file: Writer):
    engine = ProducerEngine.open(*_with_index(write_file(lengths=(6, 10)), 0))
    seen = [each for ordinal in range(2) for each in _batch(engine, ordinal).sample_ids]
    assert sorted(seen) == sorted([f"traj_0/{step}" for step in range(6)] + [f"traj_1/{step}" for step in range(10)])


def test_a_policy_that_does_not_fit_the_dataset_is_refused(write_file: Writer):
    tenant, sft = _tenant(write_file(), state_dim=8)
    with pytest.raises(ContractError, match=r"pick-cube.*state_dim is 20"):
        ProducerEngine.open(tenant, 0, sft)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="no such file"):
        ProducerEngine.open(*_with_index(tmp_path / "absent.h5", 0))


def test_a_sampler_of_another_dataset_is_refused(write_file: Writer):
    tenant, sft = _tenant(write_file())
    dataset = ProducerEngine.open(tenant, 0, sft)._dataset
    with pytest.raises(SpecError, match="draws from 29 samples, the dataset has 30"):
        ProducerEngine(dataset, EpochSampler(29, 8, seed=0), tenant="t", workload=0, horizon=4, num_items=1)


def test_contract_and_statistics_are_the_datasets(write_file: Writer):
    engine = ProducerEngine.open(*_with_index(write_file(), 0))
    action = engine.statistics().action
    assert action is not None
    assert action.count == 30
    assert engine.contract.control_mode == "pd_ee_delta_pose"
    engine.close()


def test_a_batch_is_cheap_once_its_episodes_are_decoded(write_file: Writer):
    path = write_file(lengths=(20,) * 4, cameras=("base_camera",), size=(128, 128))
    tenant, sft = _tenant(path, image_size=(128, 128))
    engine = ProducerEngine.open(tenant, 0, sft.model_copy(update={"batch_size": 32}))
    for ordinal in range(8):
        engine.item(ordinal)
    begin = time.thread_time()
    for ordinal in range(8, 16):
        engine.item(ordinal)
    assert (time.thread_time() - begin) / 8 < 0.02


def _light_engine(path: Path) -> ProducerEngine:
    engine = ProducerEngine.open(*_with_index(path, 0), light_epochs=True)
    engine.begin(0, stored_from=0)
    return engine


def test_later_epochs_go_without_frames(write_file: Writer):
    path = write_file(lengths=(6, 10))
    engine, full = _light_engine(path), ProducerEngine.open(*_with_index(path, 0))
    items = [engine.next_item(ordinal) for ordinal in range(6)]
    assert [each.payload.observation.has_frames for each in items] == [True] * 2 + [False] * 4
    for ordinal, item in enumerate(items):
        expected = full.item(ordinal)
        assert item.item_id == expected.item_id
        assert isinstance(item.payload, TrainingBatch)
        assert isinstance(expected.payload, TrainingBatch)
        assert item.payload.sample_ids == expected.payload.sample_ids
        assert item.payload.observation.instructions == expected.payload.observation.instructions
        np.testing.assert_array_equal(item.payload.observation.image_mask, expected.payload.observation.image_mask)
        np.testing.assert_array_equal(item.payload.observation.state, expected.payload.observation.state)
        np.testing.assert_array_equal(item.payload.actions, expected.payload.actions)
    row_bytes = 16 * 24 * 3
    assert full.item(3).nbytes - items[3].nbytes == 8 * row_bytes
    assert engine.light_counts == LightCounts(light_items=4, saved_bytes=4 * 8 * row_bytes)
    assert engine.full_item(3).payload.observation.has_frames
    assert engine.light_counts == LightCounts(light_items=4, fetched_items=1, saved_bytes=3 * 8 * row_bytes)


def test_a_light_item_opens_no_frame(write_file: Writer, monkeypatch: pytest.MonkeyPatch):
    engine = _light_engine(write_file(lengths=(6, 10)))
    for ordinal in range(2):
        engine.next_item(ordinal)
    monkeypatch.setattr(engine._dataset, "_frames", None)
    assert not engine.next_item(2).payload.observation.has_frames


def test_without_cameras_or_when_switched_off_nothing_is_light(write_file: Writer):
    path = write_file(lengths=(6, 10))
    off = ProducerEngine.open(*_with_index(path, 0))
    tenant, sft = _tenant(path, cameras=())
    blind = ProducerEngine.open(tenant, 0, sft, light_epochs=True)
    for engine in (off, blind):
        for ordinal in range(6):
            engine.next_item(ordinal)
        assert engine.light_counts == LightCounts()


@pytest.mark.parametrize("change", [{"adapter": AdapterSpec()}, {"reuse_prefixes": False}])
def test_where_the_trainer_keeps_no_features_nothing_is_light(change: dict[str, object], write_file: Writer):
    tenant, sft = _tenant(write_file(lengths=(6, 10)))
    tenant = tenant.model_copy(update={"policy": tenant.policy.model_copy(update=change)})
    engine = ProducerEngine.open(tenant, 0, sft, light_epochs=True)
    engine.begin(0, stored_from=0)
    assert all(engine.next_item(ordinal).payload.observation.has_frames for ordinal in range(6))
