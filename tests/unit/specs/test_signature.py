import subprocess
import sys

import pytest

from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.signature import canonical_json, layout_differences, prefix_layout
from joynexus.specs.tenant import ObservationSpec
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec

PINNED = "7a4d2bcee4fe9a7b45acbeedbde94b62f575190089e7443d98b25e2a0eed4dd1"
"""Changes only on purpose: with it, features and checkpoints of older versions no longer fit."""

OBSERVATION = ObservationSpec(cameras=("base", "wrist"), image_size=(128, 128), state_dim=8)
PROGRAM = """
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.signature import prefix_layout
from joynexus.specs.tenant import ObservationSpec
observation = ObservationSpec(cameras=("base", "wrist"), image_size=(128, 128), state_dim=8)
print(prefix_layout(LiteBackboneSpec(), observation).signature, end="")
"""


class StateReader(LiteBackboneSpec):
    """A backbone whose prefix holds the robot's state."""

    state_in_prefix = True


def signature(backbone=None, **changes):
    return prefix_layout(backbone or LiteBackboneSpec(), OBSERVATION.model_copy(update=changes)).signature


def test_the_signature_is_pinned():
    assert signature() == PINNED


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_every_process_computes_the_same(hash_seed):
    environment = {"PYTHONHASHSEED": hash_seed, "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == PINNED


@pytest.mark.parametrize(
    "changes",
    [
        {"cameras": ("base",)},
        {"image_size": (128, 96)},
        {"max_prompt_tokens": 33},
        {"prompt_template": "task: {instruction}"},
        {"backbone": LiteBackboneSpec(dtype="bfloat16")},
        {"backbone": LiteBackboneSpec(chunk_size=3)},
        {"backbone": LiteBackboneSpec(projection_seed=1)},
        {"backbone": SmolVlmBackboneSpec(path="some/model")},
        {"backbone": SmolVlmBackboneSpec(path="some/model", revision="abc")},
    ],
)
def test_whatever_changes_the_prefix_changes_it(changes):
    assert signature(**changes) != PINNED


@pytest.mark.parametrize("changes", [{"cameras": ("front", "hand")}, {"state_dim": 9}])
def test_whatever_does_not_change_the_prefix_leaves_it(changes):
    assert signature(**changes) == PINNED


def test_the_state_counts_where_it_enters_the_prefix():
    assert signature(StateReader()) != signature(StateReader(), state_dim=9)


def test_without_cameras_the_image_size_does_not_count():
    assert signature(cameras=(), image_size=(64, 64)) == signature(cameras=())


def test_the_processors_revision_counts():
    class Revised(LiteBackboneSpec):
        processor_revision = "2"

    assert signature(Revised()) != PINNED


def test_differences_are_named_by_path():
    first = prefix_layout(LiteBackboneSpec(), OBSERVATION)
    second = prefix_layout(
        LiteBackboneSpec(width=64), OBSERVATION.model_copy(update={"image_size": (64, 64), "cameras": ("base",)})
    )
    assert layout_differences(first, second) == {
        "backbone.width": (192, 64),
        "image_size": ([128, 128], [64, 64]),
        "num_cameras": (2, 1),
    }
    assert layout_differences(first, first) == {}


def test_canonical_json_has_one_form():
    assert canonical_json({"b": [1.0, "ü"], "a": None}) == '{"a":null,"b":[1.0,"\\u00fc"]}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"a": float("nan")})
