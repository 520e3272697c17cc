import numpy as np
import pytest

from joynexus.envs.frames import black_cameras, check_cameras, fit, one_row, rotated_180
from joynexus.envs.libero import OTHER_STEP_LIMIT, step_limit
from joynexus.envs.rendering import choose_renderer, prepare_mujoco
from joynexus.errors import ContractError
from joynexus.types import ViewSpec

RED = np.array([255, 0, 0], dtype=np.uint8)


def test_c53_half_a_turn_is_no_vertical_flip():
    raw = np.zeros((2, 2, 3), dtype=np.uint8)
    raw[0, 0] = RED
    turned = rotated_180(raw)
    assert (turned[1, 1] == RED).all()
    assert not turned[1, 0].any()
    vertical_flip = raw[::-1]
    assert (vertical_flip[1, 0] == RED).all()
    assert not np.array_equal(vertical_flip, turned)


def test_c88_black_cameras_are_named():
    view = ViewSpec(cameras=("front", "wrist"), image_size=(4, 4))
    frames = {"front": np.ones((4, 4, 3), np.uint8), "wrist": np.zeros((4, 4, 3), np.uint8)}
    observation = one_row(view, frames, np.zeros(2, np.float32), "go")
    assert black_cameras(observation, view.cameras) == ["wrist"]


def test_cameras_come_in_the_order_of_the_view():
    view = ViewSpec(cameras=("b", "a", "c"), image_size=(4, 4))
    frames = {name: np.full((4, 4, 3), value, np.uint8) for name, value in (("a", 1), ("b", 2))}
    observation = one_row(view, frames, np.zeros(2, np.float32), "go")
    assert observation.images[0, :, 0, 0, 0].tolist() == [2, 1, 0]
    assert observation.image_mask.tolist() == [[True, True, False]]


def test_c54_a_missing_camera_is_named():
    with pytest.raises(ContractError, match=r"cameras \['wrist'\] are missing, it offers \['front'\]"):
        check_cameras(ViewSpec(cameras=("front", "wrist"), image_size=(4, 4)), ("front",), source="fake")


def test_fit_resizes_height_and_width():
    frame = np.zeros((10, 20, 3), np.uint8)
    frame[:, 10:] = 200
    small = fit(frame, (5, 8))
    assert small.shape == (5, 8, 3)
    assert small[2, 0, 0] < 10
    assert small[2, 7, 0] > 190
    assert fit(frame, (10, 20)) is frame


@pytest.mark.parametrize(
    ("suite", "limit"),
    [
        ("libero_spatial", 280),
        ("libero_object_swap", 280),
        ("libero_goal_task", 300),
        ("libero_10", 520),
        ("libero_10_lan", 520),
        ("libero_90", 400),
        ("libero_100", OTHER_STEP_LIMIT),
        ("libero_mine", OTHER_STEP_LIMIT),
    ],
)
def test_step_limits_of_libero(suite, limit):
    assert step_limit(suite) == limit


def test_c87_cuda_numbers_are_mapped_to_those_of_egl():
    reversed_order = [3, 2, 1, 0, None]
    chosen = choose_renderer(reversed_order, cuda_visible="1", explicit=None)
    assert (chosen.backend, chosen.device, chosen.warning) == ("egl", 2, None)
    assert choose_renderer(reversed_order, cuda_visible="3,0", explicit=None).device == 0


def test_c87_an_explicit_device_is_kept():
    assert choose_renderer([1, 0], cuda_visible="1", explicit="1").device == 1
    environment = {"MUJOCO_EGL_DEVICE_ID": "7", "CUDA_VISIBLE_DEVICES": "2"}
    prepare_mujoco(environment)
    assert environment == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "7"}


def test_c87_no_egl_falls_back_to_osmesa_and_says_so():
    chosen = choose_renderer([], cuda_visible="0", explicit=None)
    assert (chosen.backend, chosen.device) == ("osmesa", None)
    assert "OSMesa" in chosen.warning


def test_without_a_gpu_of_its_own_a_worker_renders_in_software():
    assert choose_renderer([0, 1, None], cuda_visible="", explicit=None).device == 2
    assert choose_renderer([0, 1], cuda_visible="", explicit=None).device == 0
    assert choose_renderer([0, None], cuda_visible=None, explicit=None).device == 0


def test_an_unknown_device_takes_a_gpu_and_says_so():
    chosen = choose_renderer([None, 0], cuda_visible="GPU-8f1c", explicit=None)
    assert chosen.device == 1
    assert "GPU-8f1c" in chosen.warning


def test_another_renderer_is_left_alone():
    environment = {"MUJOCO_GL": "osmesa", "CUDA_VISIBLE_DEVICES": ""}
    assert prepare_mujoco(environment) is None
    assert environment == {"MUJOCO_GL": "osmesa", "CUDA_VISIBLE_DEVICES": ""}
