"""Camera frames on their way from a simulator into an observation."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, UInt8

from joynexus.errors import ContractError
from joynexus.types import Array, Observation, ViewSpec


def check_cameras(view: ViewSpec, offered: Sequence[str], *, source: str) -> None:
    """Refuse a view of cameras that an environment does not have.

    Raises:
        ContractError: Naming the missing cameras and those that there are.
    """
    missing = [camera for camera in view.cameras if camera not in offered]
    if missing:
        raise ContractError(
            f"{source}: cameras {missing} are missing, it offers {list(offered)}. "
            "Name cameras that it offers in policy.observation.cameras."
        )


def fit(frame: UInt8[Array, "any_h any_w 3"], image_size: tuple[int, int]) -> UInt8[Array, "h w 3"]:
    """Resize a frame to height and width ``image_size``, with antialiasing; one that fits is returned as it is."""
    if frame.shape[:2] == image_size:
        return frame
    from PIL import Image  # most simulators render at the right size and start faster without it

    height, width = image_size
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BILINEAR), dtype=np.uint8)


def rotated_180(frame: UInt8[Array, "h w 3"]) -> UInt8[Array, "h w 3"]:
    """Turn a frame by 180 degrees: both axes are reversed. A vertical flip reverses one, and is not the same."""
    return np.ascontiguousarray(frame[::-1, ::-1])


def one_row(
    view: ViewSpec,
    frames: Mapping[str, Array],
    state: Float32[Array, " s"],
    instruction: str,
) -> Observation:
    """Assemble the observation of one environment.

    Args:
        view: The cameras, in the policy's order.
        frames: Frame of each camera at the size of the view; one that is absent gave none and is masked out.
        state: The state vector.
        instruction: What the policy is told.
    """
    height, width = view.image_size
    images = np.zeros((1, len(view.cameras), height, width, 3), dtype=np.uint8)
    mask = np.zeros((1, len(view.cameras)), dtype=np.bool_)
    for index, camera in enumerate(view.cameras):
        if camera in frames:
            images[0, index] = frames[camera]
            mask[0, index] = True
    return Observation(images=images, image_mask=mask, state=state[None], instructions=(instruction,))


def black_cameras(observation: Observation, cameras: Sequence[str]) -> list[str]:
    """Name the cameras whose frames are all black in every row: a sign of a renderer that draws nothing."""
    shown = [bool(observation.images[:, index].any()) for index in range(len(cameras))]
    return [camera for camera, is_shown in zip(cameras, shown, strict=True) if not is_shown]
