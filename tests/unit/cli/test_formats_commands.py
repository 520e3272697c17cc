"""``import`` and ``export`` of folders, as a user types them."""

import filecmp
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from joynexus.cli import app
from joynexus.training.export import read_export, write_export

GOLDEN = Path(__file__).parents[2] / "golden"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "pi05"
    done = run("import", "lerobot", GOLDEN / "pi05", "--out", folder, "--name", "mine", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert rows["family"] == "pi05"
    assert rows["tensors"] == {"backbone": 77, "policy": 54, "kept": 2}
    assert any("empty_camera_0" in each for each in rows["check"])
    return folder


def test_what_import_writes_is_valid_and_has_room(imported):
    for command in ("validate", "plan"):
        done = run(command, imported / "tenant.yaml", "--service", imported / "service.yaml", "--json")
        assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["tenants"]
    assert row["admitted"]


def test_a_folder_goes_back_without_a_service(imported, tmp_path):
    done = run("export", imported, tmp_path / "back", "--format", "lerobot")
    assert done.exit_code == 0, done.output
    assert "version 0 written to" in done.stdout
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", GOLDEN / "pi05" / "model.safetensors", shallow=False)
    done = run("export", imported / "policy", tmp_path / "own")
    assert done.exit_code == 0, done.output
    assert filecmp.cmp(tmp_path / "own" / "module.safetensors", imported / "policy" / "module.safetensors")
    assert run("export", imported, tmp_path / "own").exit_code == 1  # exists


def test_a_starvla_run_comes_and_goes(tmp_path):
    options = ("--out", tmp_path / "in", "--cameras", "top,wrist", "--normalization", "quantile")
    done = run("import", "starvla", GOLDEN / "starvla_oft", *options)
    assert done.exit_code == 0, done.output
    assert "QwenOFT: 319.9 k parameters frozen" in done.stdout
    assert "check: policy.action.normalization" in done.stdout
    assert read_export(tmp_path / "in" / "policy").policy.observation.cameras == ("top", "wrist")
    done = run("export", tmp_path / "in", tmp_path / "back", "--format", "starvla")
    assert done.exit_code == 0, done.output
    weights = Path("checkpoints") / "steps_1_model.safetensors"
    assert filecmp.cmp(tmp_path / "back" / weights, GOLDEN / "starvla_oft" / weights, shallow=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("import", "lerobot", "no-such-folder", "--out", "OUT"), 2, "no such folder"),
        (("import", "lerobot", GOLDEN / "starvla_oft", "--out", "OUT"), 2, "config.json: cannot be read"),
        (("import", "starvla", GOLDEN / "pi0", "--out", "OUT"), 2, "no checkpoints/*.safetensors"),
        (("import", "lerobot", GOLDEN / "pi0", "--out", "HERE"), 1, "exists already"),
        (("export", "./nowhere", "OUT"), 1, "is no export"),
        (("export", "IMPORTED", "OUT", "--format", "starvla"), 1, "Export it with --format lerobot"),
        (("export", "IMPORTED", "OUT", "--format", "peft"), 2, "Name its service: --service"),
        (("export", "IMPORTED", "OUT", "--format", "peft", "--service", "SERVICE"), 2, "its policy has no adapter"),
    ],
)
def test_what_is_wrong_is_one_line_and_leaves_nothing(arguments, code, message, imported, tmp_path):
    known = {
        "OUT": tmp_path / "out",
        "HERE": tmp_path,
        "IMPORTED": imported,
        "SERVICE": imported / "service.yaml",
    }
    done = run(*(known.get(each, each) if isinstance(each, str) else each for each in arguments))
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_start_that_is_gone_is_told_before_anything_runs(imported, tmp_path):
    shutil.copy(imported / "tenant.yaml", tmp_path)
    for command in ("validate", "plan"):
        done = run(command, tmp_path / "tenant.yaml", "--service", imported / "service.yaml")
        assert done.exit_code == 2
        assert f"policy.init_from '{tmp_path / 'policy'}': no policy.json can be read there" in done.stderr


def test_a_trained_policy_finds_its_import_by_itself(imported, tmp_path):
    was = read_export(imported / "policy")
    spec = was.policy.model_copy(update={"init_from": str(imported / "policy")})
    write_export(tmp_path / "e", type(was)(**{**_fields(was), "policy": spec, "version": 4}), signature="s")
    done = run("export", tmp_path / "e", tmp_path / "back", "--format", "lerobot")
    assert done.exit_code == 0, done.output
    assert "version 4" in done.stdout
    moved = tmp_path / "moved"
    os.symlink(imported, moved)
    done = run("export", tmp_path / "e", tmp_path / "again", "--format", "lerobot", "--import", moved)
    assert done.exit_code == 0, done.output


def _fields(snapshot):
    names = ("tenant", "version", "policy", "parameters", "stats", "seed")
    return {name: getattr(snapshot, name) for name in names}
