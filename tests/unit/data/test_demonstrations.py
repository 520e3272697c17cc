"""How a recording is started, followed and finished, with a recorder that needs no simulator."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from joynexus.data import demonstrations
from joynexus.data.demonstrations import DemonstrationRecipe, generate_demonstrations
from joynexus.errors import AssetsMissingError, DatasetError, SimulatorError, SpecError
from joynexus.types import ViewSpec

Writer = Callable[..., Path]
Recorder = Callable[[str], None]

VIEW = ViewSpec(cameras=("base_camera",), image_size=(16, 24))
GOOD = """
say(kept=1, tried=1)
say(kept=2, tried=3)
copy(recipe)
say(finished=True)
"""
HEADER = """
import json, os, shutil, sys, time
from pathlib import Path
import h5py

recipe, folder = json.loads(sys.argv[1]), Path(sys.argv[2])

def say(**message):
    print(json.dumps(message), flush=True)

def copy(recipe):
    from joynexus.data.demonstrations import DemonstrationRecipe
    digest = DemonstrationRecipe.model_validate(recipe).digest
    target = folder / f"{recipe['task']}.h5"
    shutil.copy(SOURCE, target)
    with h5py.File(target, "r+") as file:
        file.attrs["recipe_digest"] = digest
    info = json.loads(Path(SOURCE).with_suffix(".json").read_text())
    target.with_suffix(".json").write_text(json.dumps(info | {"recipe_digest": digest}))
"""


@pytest.fixture
def recorder(tmp_path: Path, write_file: Writer, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return a function that puts a script in the recorder's place."""
    source = write_file("source/any.h5", lengths=(3, 4))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(demonstrations, "RECORDER", "fake_recorder")

    def install(script: str) -> None:
        text = HEADER.replace("SOURCE", repr(str(source))) + textwrap.dedent(script)
        (tmp_path / "fake_recorder.py").write_text(text)

    return install


def _generate(folder: Path, task: str = "PickCube-v1", **options: object) -> Path:
    arguments: dict[str, object] = {"num_episodes": 2, "view": VIEW} | options
    return generate_demonstrations(task, folder, **arguments)


def test_a_finished_recording_appears_whole_under_its_name(recorder: Recorder, tmp_path: Path):
    recorder(GOOD)
    seen: list[tuple[int, int]] = []
    path = _generate(tmp_path / "demos", progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 1), (2, 3)]
    assert path == tmp_path / "demos" / "PickCube-v1.h5"
    assert sorted(each.name for each in path.parent.iterdir()) == ["PickCube-v1.h5", "PickCube-v1.json"]


def test_the_same_recipe_is_not_recorded_twice(recorder: Recorder, tmp_path: Path):
    recorder(GOOD)
    path = _generate(tmp_path / "demos")
    recorder("raise SystemExit(3)")
    assert _generate(tmp_path / "demos") == path


def test_a_recording_by_another_recipe_is_only_replaced_when_asked(recorder: Recorder, tmp_path: Path):
    recorder(GOOD)
    path = _generate(tmp_path / "demos")
    with pytest.raises(DatasetError, match="another recipe"):
        _generate(tmp_path / "demos", seed=1)
    _generate(tmp_path / "demos", seed=1, overwrite=True)
    wanted = DemonstrationRecipe(
        task="PickCube-v1",
        num_episodes=2,
        cameras=VIEW.cameras,
        image_size=VIEW.image_size,
        control_mode="pd_ee_delta_pose",
        shader="minimal",
        robot=None,
        seed=1,
    )
    assert json.loads(path.with_suffix(".json").read_text())["recipe_digest"] == wanted.digest


def test_a_damaged_recording_is_not_taken_for_finished(recorder: Recorder, tmp_path: Path):
    recorder(GOOD)
    path = _generate(tmp_path / "demos")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DatasetError, match="a damaged one"):
        _generate(tmp_path / "demos")


@pytest.mark.parametrize("script", ["copy(recipe)\nos.abort()", "copy(recipe)", "say(finished=True)"])
def test_an_interrupted_recording_leaves_nothing(recorder: Recorder, tmp_path: Path, script: str):
    recorder(script)
    with pytest.raises((SimulatorError, DatasetError)):
        _generate(tmp_path / "demos")
    assert list((tmp_path / "demos").iterdir()) == []


def test_a_recorder_that_dies_is_reported_with_its_last_words(recorder: Recorder, tmp_path: Path):
    recorder("sys.stderr.write('vkCreateInstance failed'); sys.stderr.flush(); os.abort()")
    with pytest.raises(SimulatorError, match=r"(?s)exit status -6.*Vulkan.*vkCreateInstance failed"):
        _generate(tmp_path / "demos")


def test_a_recorder_that_hangs_is_killed(recorder: Recorder, tmp_path: Path):
    recorder("say(kept=1, tried=1)\ntime.sleep(50)")
    with pytest.raises(SimulatorError, match="no episode within 1"):
        _generate(tmp_path / "demos", stall_timeout_s=1.0)


def test_a_recorders_error_keeps_its_class(recorder: Recorder, tmp_path: Path):
    recorder("say(error='AssetsMissingError', message='it needs assets')\nraise SystemExit(1)")
    with pytest.raises(AssetsMissingError, match="it needs assets"):
        _generate(tmp_path / "demos")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control_mode": "pd_ee_delta"}, "control_mode"),
        ({"num_episodes": 0}, "num_episodes"),
        ({"view": ViewSpec(cameras=(), image_size=(8, 8))}, "cameras"),
    ],
)
def test_an_impossible_recipe_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, object], message: str
):
    with pytest.raises(SpecError, match=f"demonstrations of PickCube-v1: .*{message}"):
        _generate(tmp_path / "demos", **options)
    assert not (tmp_path / "demos").exists()


def test_the_command_prints_its_result_as_json(recorder: Recorder, tmp_path: Path):
    recorder(GOOD)
    app = demonstrations.typer.Typer()
    app.command()(demonstrations.main)
    arguments = ["--task", "PickCube-v1", "--num-episodes", "2", "--out", str(tmp_path / "demos"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["episodes"], result["frames"], result["longest_episode"]) == (2, 7, 4)
    failed = CliRunner().invoke(app, [*arguments, "--seed", "-4"])
    assert failed.exit_code == 1
    assert "seed" in failed.stderr
