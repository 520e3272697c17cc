"""Third-party components: each test writes a distribution of its own and looks at it from a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

from joynexus.specs.registry import KINDS, component_types

GOOD = '''
from typing import ClassVar, Literal
from joynexus.specs.environment import EnvironmentSpec

class LabSpec(EnvironmentSpec):
    """A robot in a lab."""
    implementation: ClassVar[str] = "lab_plugin:Lab"
    type: Literal["lab"] = "lab"
    arm: str
    """Which arm."""

class Lab:
    pass

class NotASpec:
    pass

class Renamed(LabSpec):
    type: Literal["other"] = "other"

class Thief(LabSpec):
    type: Literal["gym"] = "gym"

class Unfinished(LabSpec):
    type: Literal["unfinished"] = "unfinished"
    missing: "Nowhere"
'''

LOOK = """
import json, sys
from joynexus.errors import SpecError
from joynexus.specs.loading import parse_tenant
from joynexus.specs.registry import component_types, failed_plugins, load_implementation
found = component_types("environments")
result = {"found": sorted(found), "failed": failed_plugins("environments"), "gym": found["gym"].__module__}
if "lab" in found:
    result["implementation"] = load_implementation(found["lab"](arm="left")).__name__
policy = {
    "backbone": "lite",
    "observation": {"state_dim": 1},
    "action": {"dim": 1, "horizon": 1, "num_action_steps": 1, "normalization": "identity"},
    "action_module": {"type": "oft"},
}
for name in sys.argv[1:]:
    workload = {"type": "evaluation", "environment": {"type": name, "arm": "left"}}
    try:
        spec = parse_tenant({"tenant": "a", "policy": policy, "workloads": [workload]}, "job.yaml")
        result[name] = spec.workloads[0].environment.arm
    except SpecError as error:
        result[name] = str(error)
print(json.dumps(result))
"""


def look(folder: Path, entry_points: dict[str, str], *types: str) -> dict[str, object]:
    """Install the plugin as a distribution on the path, and report what a fresh process sees."""
    (folder / "lab_plugin.py").write_text(GOOD)
    info = folder / "lab_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-plugin\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[joynexus.environments]", *lines, ""]))
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{LOOK}"
    done = subprocess.run([sys.executable, "-c", program, *types], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_plugin_is_a_spec_class_behind_an_entry_point(tmp_path):
    seen = look(tmp_path, {"lab": "lab_plugin:LabSpec"}, "lab", "lap")
    assert seen["found"] == ["gym", "lab", "libero", "maniskill"]
    assert seen["failed"] == {}
    assert seen["implementation"] == "Lab"
    assert seen["lab"] == "left"
    assert "Did you mean 'lab'?" in str(seen["lap"])


def test_broken_plugins_stop_nobody_and_their_reasons_are_told_to_who_asks(tmp_path):
    broken = {
        "lab": "lab_plugin:LabSpec",
        "absent": "no_such_module:Spec",
        "nameless": "lab_plugin:Nothing",
        "plain": "lab_plugin:NotASpec",
        "renamed": "lab_plugin:Renamed",
        "unfinished": "lab_plugin:Unfinished",
    }
    seen = look(tmp_path, broken, "lab", "absent")
    assert seen["found"] == ["gym", "lab", "libero", "maniskill"]
    assert seen["lab"] == "left"
    failed = seen["failed"]
    assert isinstance(failed, dict)
    assert set(failed) == set(broken) - {"lab"}
    assert failed["absent"].startswith("ModuleNotFoundError: No module named 'no_such_module'")
    assert "is not a subclass of joynexus.specs.environment:EnvironmentSpec" in failed["plain"]
    assert "type is not Literal['renamed']" in failed["renamed"]
    message = str(seen["absent"])
    assert len(message.splitlines()) == 1
    assert "Plugins that failed to load: absent (ModuleNotFoundError: No module named 'no_such_module')" in message


def test_a_plugin_cannot_take_over_a_built_in_name(tmp_path):
    seen = look(tmp_path, {"gym": "lab_plugin:Thief"}, "gym")
    assert seen["gym"] != "left"  # the built-in spec has no field 'arm'
    assert "unknown key" in str(seen["gym"])
    assert seen["failed"] == {"gym (lab_plugin:Thief)": "another component already has this name"}


def test_a_checkout_that_is_not_installed_knows_what_is_built_in() -> None:
    program = "\n".join(
        [
            "import importlib.metadata as metadata",
            "metadata.entry_points = lambda **_: metadata.EntryPoints()",
            "from joynexus.specs.registry import KINDS, component_types",
            "print({kind: sorted(component_types(kind)) for kind in KINDS})",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    installed = {kind: sorted(component_types(kind)) for kind in KINDS}
    assert done.stdout.strip() == str(installed)
    assert all(installed.values())
