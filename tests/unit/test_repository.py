"""Facts about the repository itself: what it names, how it is laid out, and that its documents are true."""

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from joynexus.errors import JoyNexusError
from joynexus.specs.loading import load_any, load_tenant
from joynexus.specs.registry import KINDS, Kind, component_types

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {".git", ".venv", "outputs", "demos", "build", "dist", "shared", "__pycache__"}

# Written so that this file does not hold what it looks for.
REGISTRY_HOSTS = (
    r"pypi\.org|python[h]osted|npm[j]s|download\.pytorch|deb\.debian|archive\.ubuntu|[/]simple/?\b|pkg\.dev"
)
MACHINE_PATHS = r"(?<![\w.~/{}-])/(?:work|root|home/\w+|opt/\w+|Users/\w+)/"


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file under version control; where this is no git checkout, every file that is not generated."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not GENERATED.intersection(path.relative_to(ROOT).parts)]
    return tuple(sorted(path for path in paths if path.is_file()))


def tracked(folder: str, suffix: str) -> list[Path]:
    return [path for path in tracked_files() if path.suffix == suffix and path.is_relative_to(ROOT / folder)]


def text_of(path: Path) -> str:
    """The file's text, or nothing if it is binary."""
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode()


def occurrences(pattern: str, paths: list[Path] | tuple[Path, ...]) -> list[str]:
    """Lines that match, as ``file:line: text``."""
    compiled = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if compiled.search(line)
    ]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (REGISTRY_HOSTS, "pip install -i https://" + "pypi" + ".org torch"),
        (REGISTRY_HOSTS, "index-url = https://mirror.test" + "/sim" + "ple"),
        (REGISTRY_HOSTS, "deb http://" + "deb." + "debian.org/debian bookworm main"),
        (MACHINE_PATHS, "cd " + "/wo" + "rk/main"),
        (MACHINE_PATHS, 'log = "' + "/ro" + 'ot/run.log"'),
    ],
)
def test_patterns_find_what_they_are_for(pattern: str, line: str) -> None:
    assert re.search(pattern, line)


def test_no_registry_host_is_named() -> None:
    assert not occurrences(REGISTRY_HOSTS, tracked_files())


def test_no_machine_path_is_named() -> None:
    assert not occurrences(MACHINE_PATHS, tracked_files())


def test_no_tracked_file_is_large() -> None:
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked_files()}
    golden = Path("tests/golden")  # a reference's checkpoint is one file
    assert not {str(path): size for path, size in sizes.items() if size > (3 if golden in path.parents else 2) << 20}


def test_package_files_stay_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(text_of(path).splitlines()) for path in tracked("joynexus", ".py")}
    assert lengths
    assert not {name: count for name, count in lengths.items() if count >= 400}


@pytest.mark.parametrize("folder", ["joynexus", "examples", "benchmarks", "scripts"])
def test_public_modules_say_what_they_are(folder: str) -> None:
    public = [path for path in tracked(folder, ".py") if not path.stem.startswith("_") or path.stem == "__init__"]
    silent = [str(path.relative_to(ROOT)) for path in public if not ast.get_docstring(ast.parse(text_of(path)))]
    assert not silent


def test_only_missing_hardware_skips_a_test() -> None:
    banned = r"\b(import[o]rskip|xfail|skipif|mark\.skip|pytest\.skip)\b"
    others = [path for path in tracked("tests", ".py") if path != Path(__file__)]
    assert not [line for line in occurrences(banned, others) if not re.search("cuda|gpu", line, re.IGNORECASE)]


def test_decisions_are_indexed() -> None:
    folder = ROOT / "docs" / "decisions"
    decisions = sorted(path.name for path in folder.glob("[0-9]*.md"))
    index = (folder / "README.md").read_text()
    assert decisions == re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", index)
    assert [int(name[:4]) for name in decisions] == list(range(1, len(decisions) + 1))


@pytest.mark.parametrize("section", ["Context", "Decision", "Consequences", "Status"])
def test_decisions_have_every_section(section: str) -> None:
    folder = ROOT / "docs" / "decisions"
    assert not [path.name for path in folder.glob("[0-9]*.md") if f"\n## {section}\n" not in path.read_text()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_has_its_row(kind: Kind) -> None:
    section = (ROOT / "docs" / "components.md").read_text().partition(f"(`joynexus.{kind}`)")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE)
    ours = {name: spec for name, spec in component_types(kind).items() if spec.__module__.startswith("joynexus.")}
    assert sorted(rows) == sorted((name, spec.__name__) for name, spec in ours.items())


def test_links_between_documents_lead_somewhere() -> None:
    links = [
        (path, target)
        for path in tracked_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path))
        if not re.match(r"[a-z]+:|#", target)
    ]
    assert links
    assert not [link for link in links if not (link[0].parent / link[1].partition("#")[0]).exists()]


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]


def test_lock_agrees_with_the_project() -> None:
    lines = [line for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines() if line[:1] != "#"]
    assert not [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line)]
    pins = dict(line.split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    for requirement in map(Requirement, asked):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name != project["name"]:
            assert requirement.specifier.contains(pins[name]), f"{requirement} against the lock's {pins[name]}"


def test_shell_scripts_parse() -> None:
    scripts = [ROOT / ".ci" / "run", *tracked("scripts", ".sh")]
    assert len(scripts) > 1
    for script in scripts:
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in script.read_text()
        checked = subprocess.run(["bash", "-n", str(script)], check=False, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_example_specs_are_valid() -> None:
    files = [path for suffix in (".yaml", ".yml") for path in tracked("examples", suffix)]
    assert files
    refused: list[str] = []
    for path in files:
        try:
            load_any(path)
        except JoyNexusError as error:
            refused.append(str(error))
    assert not refused


def test_readme_shows_a_valid_tenant(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "tenant.yaml").write_text(shown)
    assert [workload.type for workload in load_tenant(tmp_path / "tenant.yaml").workloads] == ["sft", "evaluation"]
