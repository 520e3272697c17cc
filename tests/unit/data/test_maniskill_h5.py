import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from joynexus.data import maniskill_h5
from joynexus.data.maniskill_h5 import ManiSkillH5Dataset
from joynexus.data.normalization import compute_stats
from joynexus.errors import ContractError, DatasetError
from joynexus.specs.contract import PolicyInterface, check_policy
from joynexus.specs.data import ManiSkillH5Spec
from joynexus.types import ViewSpec

Writer = Callable[..., Path]
VIEW = ViewSpec(cameras=("hand_camera", "base_camera"), image_size=(16, 24))


def _open(path: Path, view: ViewSpec = VIEW, **options: Any) -> ManiSkillH5Dataset:
    return ManiSkillH5Dataset.open(ManiSkillH5Spec(path=path, **options), view)


def _edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(path, "r+") as file:
        change(file)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    beside = path.with_suffix(".json")
    info = json.loads(beside.read_text())
    change(info)
    beside.write_text(json.dumps(info))


def _replace(place: str, values: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[place]
        file[place] = values

    return change


# --- What the file declares ---


def test_the_contract_tells_what_the_files_tell(write_file: Writer):
    contract = _open(write_file()).contract
    assert contract.cameras == ("base_camera", "hand_camera")
    assert contract.image_size == (16, 24)
    layout = [(field.name, field.dim) for field in contract.state]
    assert layout == [("qpos", 9), ("goal_pos", 3), ("is_grasped", 1), ("tcp_pose", 7)]
    assert (contract.action_dim, contract.control_mode, contract.gripper) == (7, "pd_ee_delta_pose", "open_positive")


def test_nested_parts_of_the_state_are_flattened_and_named_by_their_path(write_file: Writer):
    path = write_file(lengths=(4,))
    _edit(path, lambda file: file["traj_0/obs/extra"].create_dataset("left/goal", data=np.full((5, 2), 8.0, "f4")))
    dataset = _open(path)
    assert [field.name for field in dataset.contract.state][1:] == ["goal_pos", "is_grasped", "left.goal", "tcp_pose"]
    assert dataset.read([1], 1).observation.state[0, 13:].tolist() == [8.0] * 2 + [1.0] * 7


def test_a_robot_without_gripper_declares_none(write_file: Writer):
    path = write_file(env_kwargs={"robot_uids": "panda_stick"})
    assert _open(path).contract.gripper == "none"


@pytest.mark.parametrize("robot", ["fetch", ["panda", "panda"]])
def test_a_gripper_sign_is_never_guessed(write_file: Writer, robot: object):
    with pytest.raises(DatasetError, match="robot"):
        _open(write_file(env_kwargs={"robot_uids": robot}))


def test_a_missing_camera_is_refused_by_name_when_the_policy_is_checked(write_file: Writer):
    dataset = _open(write_file(cameras=["base_camera"]))
    policy = PolicyInterface(cameras=VIEW.cameras, image_size=VIEW.image_size, state_dim=20, action_dim=7)
    with pytest.raises(ContractError, match=r"\['hand_camera'\] are missing"):
        check_policy(policy, dataset.contract, owner="tenant")


def test_another_image_size_is_refused_when_the_policy_is_checked(write_file: Writer):
    dataset = _open(write_file(size=(8, 8)))
    policy = PolicyInterface(cameras=VIEW.cameras, image_size=VIEW.image_size, state_dim=20, action_dim=7)
    with pytest.raises(ContractError, match=r"image_size is \[8, 8\]"):
        check_policy(policy, dataset.contract, owner="tenant")


# --- What a sample is ---


def test_samples_hold_the_frame_the_state_and_the_actions_of_one_moment(write_file: Writer):
    dataset = _open(write_file(lengths=(4, 6)))
    assert dataset.num_frames == 10
    batch = dataset.read([7], 3)
    assert batch.sample_ids == ("traj_1/3",)
    assert batch.observation.images[0, :, 0, 0].tolist() == [[1, 3, 1], [1, 3, 0]]  # hand, then base, as in the view
    state = batch.observation.state[0]
    assert state[:9].tolist() == [1.0] * 8 + [3.0]
    assert state[9:].tolist() == [5.0] * 3 + [1.0] + [3.0] * 7
    np.testing.assert_allclose(batch.actions[0, :, 0], [103, 104, 105])
    assert batch.observation.instructions == ("pick up the red cube and move it to the goal",)
    assert batch.observation.image_mask.all()


def test_a_chunk_past_the_end_repeats_the_last_action_and_says_so(write_file: Writer):
    batch = _open(write_file(lengths=(4, 6))).read([2, 3, 4], 4)
    np.testing.assert_allclose(batch.actions[:, :, 0], [[2, 3, 3, 3], [3, 3, 3, 3], [100, 101, 102, 103]])
    assert batch.action_is_pad.tolist() == [[False] * 2 + [True] * 2, [False] + [True] * 3, [False] * 4]


def test_c66_an_episode_filter_never_pads(write_file: Writer):
    dataset = _open(write_file(lengths=(10, 10, 10)), max_episodes=1)
    assert dataset.num_frames == 10
    batch = dataset.read(range(10), 1)
    assert not batch.action_is_pad.any()
    assert batch.sample_ids == tuple(f"traj_0/{step}" for step in range(10))
    assert dataset.read(range(10), 2).action_is_pad.sum() == 1


def test_a_policy_without_vision_reads_no_image(write_file: Writer):
    dataset = _open(write_file(), ViewSpec(cameras=(), image_size=(64, 64)))
    assert dataset.read([0, 1], 2).observation.images.shape[:2] == (2, 0)


def test_an_instruction_of_the_spec_replaces_the_tasks(write_file: Writer):
    assert _open(write_file(), instruction="grasp it").read([0], 1).observation.instructions == ("grasp it",)


def test_statistics_cover_every_sample_and_no_final_observation(write_file: Writer):
    stats = _open(write_file(lengths=(4, 6))).statistics()
    assert stats.state is not None
    assert stats.action is not None
    assert stats.state.count == stats.action.count == 10
    assert stats.state.maximum[8] == 5.0  # the step: 6 is the final observation
    assert stats.action.mean[0] == pytest.approx(np.mean([0, 1, 2, 3, 100, 101, 102, 103, 104, 105]))


def test_c59_statistics_are_those_of_all_samples_whatever_the_batches(write_file: Writer):
    dataset = _open(write_file(lengths=(5, 3)))  # 8 samples, read in batches of 4
    batches = [dataset.read(range(first, first + 4), 1, with_frames=False) for first in (0, 4)]
    told, read = dataset.statistics(), [np.concatenate([each.observation.state for each in batches])]
    read.append(np.concatenate([each.actions[:, 0] for each in batches]))
    for stats, frames in zip((told.state, told.action), read, strict=True):
        assert stats is not None
        expected = compute_stats(frames)
        assert np.array_equal(stats.mean, expected.mean)
        assert np.array_equal(stats.std, expected.std)
        assert (stats.count, expected.count) == (8, 8)


@pytest.mark.parametrize(("indices", "horizon"), [([30], 1), ([-1], 1), ([], 1), ([0], 0)])
def test_reads_out_of_range_are_refused(write_file: Writer, indices: list[int], horizon: int):
    with pytest.raises(DatasetError, match=r"\[0, 30\)"):
        _open(write_file()).read(indices, horizon)


@pytest.mark.parametrize("budget", [0, 16 * 24 * 3 * 10, 1 << 30])
def test_frames_are_the_same_however_few_fit_in_memory(
    write_file: Writer, monkeypatch: pytest.MonkeyPatch, budget: int
):
    path = write_file()
    expected = _open(path).read(range(30), 1).observation.images
    monkeypatch.setattr(maniskill_h5, "FRAME_CACHE_BYTES", budget)
    dataset = _open(path)
    for _ in range(2):
        np.testing.assert_array_equal(dataset.read(range(30), 1).observation.images, expected)
    assert dataset._frames.used_bytes <= budget


def test_a_dataset_travels_to_another_process_without_its_open_file(write_file: Writer):
    dataset = _open(write_file())
    before = dataset.read([3, 25], 2)
    shipped = pickle.dumps(dataset)
    assert len(shipped) < 20_000
    after = pickle.loads(shipped).read([3, 25], 2)
    np.testing.assert_array_equal(after.observation.images, before.observation.images)
    assert after.sample_ids == before.sample_ids


def test_a_closed_dataset_is_not_read(write_file: Writer):
    dataset = _open(write_file())
    dataset.close()
    dataset.close()
    with pytest.raises(DatasetError, match="closed"):
        dataset.read([0], 1)


def test_a_file_that_was_replaced_after_verification_is_not_read(write_file: Writer):
    dataset = _open(write_file())
    write_file(lengths=(3, 3))
    with pytest.raises(DatasetError, match="changed"):
        dataset.read([0], 1)


# --- Which file ---


def test_a_folder_with_one_file_stands_for_it(write_file: Writer):
    assert _open(write_file("one/traj.h5").parent).num_frames == 30


def test_a_folder_with_several_files_is_refused(write_file: Writer):
    write_file("a.h5")
    with pytest.raises(DatasetError, match=r"2 \.h5 files \['a.h5', 'b.h5'\]"):
        _open(write_file("b.h5").parent)


def test_missing_files_and_other_formats_are_refused(write_file: Writer, tmp_path: Path):
    path = write_file()
    with pytest.raises(DatasetError, match="no such file"):
        _open(tmp_path / "absent.h5")
    with pytest.raises(DatasetError, match=r"ends in \.h5"):
        _open(path.with_suffix(".json"))
    path.with_suffix(".json").unlink()
    with pytest.raises(DatasetError, match=r"PickCube-v1\.json is missing"):
        _open(path)


# --- Damage ---


def test_c69_a_truncated_file_is_refused_by_name_and_the_others_load(write_file: Writer):
    paths = [write_file(f"tenant{index}.h5") for index in range(5)]
    data = paths[2].read_bytes()
    paths[2].write_bytes(data[: len(data) // 2])
    with pytest.raises(DatasetError, match=r"tenant2\.h5: damaged or truncated.*Copy or record it again"):
        _open(paths[2])
    others = [_open(path).num_frames for index, path in enumerate(paths) if index != 2]
    assert others == [30] * 4


def _damage_chunk(path: Path, step: int) -> None:
    """Overwrite the compressed bytes of one frame, without touching the file's structure."""
    with h5py.File(path, "r+") as file:
        place = "traj_0/obs/sensor_data/base_camera/rgb"
        frames = file[place][:]
        del file[place]
        data = file.create_dataset(place, data=frames, chunks=(1, *frames.shape[1:]), compression="gzip")
        chunk = data.id.get_chunk_info(step)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_c73_a_frame_that_cannot_be_decoded_is_an_error_and_no_end(
    write_file: Writer, monkeypatch: pytest.MonkeyPatch, budget: int
):
    monkeypatch.setattr(maniskill_h5, "FRAME_CACHE_BYTES", budget)
    path = write_file(lengths=(20,))
    _damage_chunk(path, step=5)
    dataset = _open(path)
    assert dataset.num_frames == 20
    with pytest.raises(DatasetError, match="traj_0/obs/sensor_data/base_camera/rgb can't be decoded"):
        _ = [dataset.read([index], 1) for index in range(20)]


@pytest.mark.parametrize("step", [0, 20])
def test_the_first_and_last_frame_are_decoded_when_a_file_is_opened(write_file: Writer, step: int):
    path = write_file(lengths=(20,))
    _damage_chunk(path, step=step)
    with pytest.raises(DatasetError, match="can't be decoded"):
        _open(path)


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        ("traj_1/actions", np.zeros((9, 7), np.float32), "9 actions, the .json says 10"),
        ("traj_1/actions", np.zeros((10, 6), np.float32), "actions are 7 in traj_0 and 6 in traj_1"),
        ("traj_1/actions", np.full((10, 7), np.nan, np.float32), "traj_1/actions holds NaN"),
        ("traj_1/actions", np.zeros((0, 7), np.float32), "no table of actions"),
        ("traj_1/obs/agent/qpos", np.zeros((10, 9), np.float32), "qpos has 10 entries for 10 actions, not 11"),
        ("traj_1/obs/agent/qpos", np.full((11, 9), np.inf, np.float32), "qpos holds NaN or infinity at step 0"),
        ("traj_1/obs/extra/goal_pos", np.zeros((11, 2), np.float32), "state are 20 in traj_0 and 19 in traj_1"),
        ("traj_1/success", np.zeros(3, np.bool_), "success has 3 entries"),
        ("traj_1/obs/sensor_data/base_camera/rgb", np.zeros((10, 16, 24, 3), np.uint8), "10 frames for 10 actions"),
        ("traj_1/obs/sensor_data/base_camera/rgb", np.zeros((11, 16, 24, 3), np.float32), "not uint8"),
        ("traj_1/obs/sensor_data/base_camera/rgb", np.zeros((11, 8, 8, 3), np.uint8), "cameras are"),
    ],
)
def test_episodes_that_contradict_themselves_are_refused(write_file: Writer, place: str, values: Any, message: str):
    path = write_file()
    _edit(path, _replace(place, values))
    with pytest.raises(DatasetError, match=message):
        _open(path)


def test_an_h5_and_a_json_that_do_not_belong_together_are_refused(write_file: Writer):
    path = write_file()
    _edit(path, lambda file: file.move("traj_2", "traj_7"))
    with pytest.raises(DatasetError, match=r"missing \['traj_2'\], unlisted \['traj_7'\]"):
        _open(path)


def test_two_halves_of_different_recordings_are_refused(write_file: Writer):
    path = write_file()
    _edit_json(path, lambda info: info.update(recipe_digest="new"))
    with pytest.raises(DatasetError, match="recipe digest None differs from 'new'"):
        _open(path)


def test_files_without_observations_say_how_to_add_them(write_file: Writer):
    path = write_file()
    _edit(path, lambda file: file.pop("traj_0/obs"))
    with pytest.raises(DatasetError, match=r"no obs/agent.*replay_trajectory.*-o rgb"):
        _open(path)


def test_two_control_modes_in_one_file_are_refused(write_file: Writer):
    path = write_file()
    _edit_json(path, lambda info: info["episodes"][1].update(control_mode="pd_joint_pos"))
    with pytest.raises(DatasetError, match=r"control_mode is \['pd_ee_delta_pose', 'pd_joint_pos'\]"):
        _open(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"episodes": []}', '{"env_info": {"env_id": "X"}, "episodes": []}'])
def test_a_json_that_describes_nothing_is_refused(write_file: Writer, text: str):
    path = write_file()
    path.with_suffix(".json").write_text(text)
    with pytest.raises(DatasetError, match=r"PickCube-v1\.json"):
        _open(path)
