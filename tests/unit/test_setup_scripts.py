"""scripts/setup.sh and scripts/system_packages.sh against fake interpreters and a fake apt, in a copy of the repo.

The fakes are shell scripts that write down how they were called. Nothing is installed and nothing is asked of the
machine, whoever runs the tests.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Acts as an interpreter of version $FAKE_VERSION: `-m venv` copies it to where it is asked, `-m pip` fails where
# FAKE_PIP_FAILS says so. The environment's own interpreter keeps the version that it was made with.
PYTHON = r"""#!/usr/bin/env bash
home=$(dirname "$0")
version=$(cat "$home/version" 2>/dev/null || echo "${FAKE_VERSION:-3.11}")
case "$1 $2" in
  "-c import ensurepip") exit "${FAKE_NO_ENSUREPIP:-0}" ;;
  -c*) echo "$version" ;;
  "-m venv")
    echo "venv" >> "$CALLS"
    rm -rf "$4"
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    echo "$version" > "$4/bin/version"
    echo "#!$4/bin/python" > "$4/bin/pip"
    ;;
  "-m pip")
    echo "${*:2}" >> "$CALLS"
    sleep "${FAKE_PIP_SECONDS:-0}"
    [[ "$*" != *"${FAKE_PIP_FAILS:-nothing fails}"* ]] || { echo "no matching distribution" >&2; exit 1; }
    ;;
esac
"""

# Knows the packages of $INSTALLED as `name=version` words.
DPKG_QUERY = r"""#!/usr/bin/env bash
for word in $INSTALLED; do
  [[ ${word%%=*} == "$4" ]] || continue
  if [[ $3 == *Status* ]]; then echo installed; else echo "${word#*=}"; fi
  exit 0
done
exit 1
"""
DPKG = r"""#!/usr/bin/env bash
[[ -n $2 ]] && [[ ${2%%.*} -ge $4 ]]
"""
APT_CACHE = r"""#!/usr/bin/env bash
echo "  Candidate: ${MESA_CANDIDATE-22.3.6-1}"
"""
RECORDER = r"""#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
"""
ID = '#!/usr/bin/env bash\necho "${FAKE_UID:-0}"\n'
SUDO = '#!/usr/bin/env bash\n[[ -n ${FAKE_SUDO-} && $1 == -n ]] && "${@:2}"\n'

LIBRARIES = "libx11-6=1 libgl1=1 libglib2.0-0=1 libegl1=1"
COMPLETE = f"{LIBRARIES} mesa-vulkan-drivers=25.0.7"
FIRST_INSTALL = [
    "venv",
    "pip --no-input install --progress-bar off -r requirements/lock.txt",
    "pip --no-input install --progress-bar off --no-deps -e .",
    "pip --no-input check",
]


class Checkout:
    """A copy of what the scripts read, with the fakes first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repo"
        self.calls = folder / "calls"
        self.etc = folder / "etc"
        fakes = folder / "bin"
        for name in ("scripts", "requirements"):
            shutil.copytree(ROOT / name, self.root / name)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        (self.etc / "apt" / "sources.list.d").mkdir(parents=True)
        (self.etc / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
        self.write_mirror("URIs: http://mirror.test/debian\nSuites: bookworm\nComponents: main\n")
        fakes.mkdir()
        scripts = {"python3.11": PYTHON, "python3": PYTHON, "dpkg-query": DPKG_QUERY, "dpkg": DPKG, "id": ID}
        for name, text in {**scripts, "apt-cache": APT_CACHE, "apt-get": RECORDER, "sudo": SUDO}.items():
            (fakes / name).write_text(text)
            (fakes / name).chmod(0o755)
        self.environment = {
            "PATH": f"{fakes}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SYSTEM_ETC": str(self.etc),
            "INSTALLED": COMPLETE,
        }

    def write_mirror(self, text: str) -> None:
        (self.etc / "apt" / "sources.list.d" / "debian.sources").write_text(text)

    def start(self, script: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        values: Mapping[str, str] = {**self.environment, **environment}
        command = ["bash", str(self.root / "scripts" / script), *arguments]
        return subprocess.Popen(command, env=values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run a script to its end: exit code and all that it printed."""
        process = self.start(script, *arguments, **environment)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def take_calls(self) -> list[str]:
        """What the fakes were asked since the last time."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.write_text("")
        return calls

    @property
    def backports(self) -> str:
        """The package list that the script added, if any."""
        added = self.etc / "apt" / "sources.list.d" / "backports.list"
        return added.read_text() if added.exists() else ""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_installs_once(checkout: Checkout) -> None:
    assert checkout.run("setup.sh")[0] == 0
    assert checkout.take_calls() == FIRST_INSTALL
    started = time.monotonic()
    assert checkout.run("setup.sh") == (0, "")
    assert time.monotonic() - started < 5
    assert checkout.take_calls() == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements/lock.txt"])
def test_setup_brings_a_changed_project_up_to_date(checkout: Checkout, changed: str) -> None:
    checkout.run("setup.sh")
    checkout.take_calls()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    assert checkout.run("setup.sh")[0] == 0
    assert checkout.take_calls() == FIRST_INSTALL[1:]


@pytest.mark.parametrize("step", ["install --progress-bar off -r", "--no-deps", "check"])
def test_failed_install_is_tried_again(checkout: Checkout, step: str) -> None:
    code, output = checkout.run("setup.sh", FAKE_PIP_FAILS=step)
    assert code == 1
    assert "no matching distribution" in output
    assert ".venv/setup.log" in output
    checkout.take_calls()
    assert checkout.run("setup.sh")[0] == 0
    assert checkout.take_calls() == FIRST_INSTALL[1:]


def test_failed_update_leaves_no_valid_stamp(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    lock = checkout.root / "requirements" / "lock.txt"
    before = lock.read_text()
    lock.write_text(f"{before}# changed\n")
    assert checkout.run("setup.sh", FAKE_PIP_FAILS="-r")[0] == 1
    lock.write_text(before)
    checkout.take_calls()
    checkout.run("setup.sh")
    assert checkout.take_calls() == FIRST_INSTALL[1:]


def test_two_setups_at_once_install_once(checkout: Checkout) -> None:
    both = [checkout.start("setup.sh", FAKE_PIP_SECONDS="0.3") for _ in range(2)]
    for process in both:
        process.communicate(timeout=30)
    assert [process.returncode for process in both] == [0, 0]
    assert checkout.take_calls() == FIRST_INSTALL


def test_moved_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    checkout.take_calls()
    checkout.root = checkout.root.rename(checkout.root.parent / "moved")
    assert checkout.run("setup.sh")[0] == 0
    assert checkout.take_calls() == FIRST_INSTALL


def test_setup_refuses_other_pythons(checkout: Checkout) -> None:
    code, output = checkout.run("setup.sh", FAKE_VERSION="3.9")
    assert code == 3
    assert "Python 3.11 is needed" in output
    assert "python3 is 3.9." in output
    assert checkout.take_calls() == []


def test_python_can_be_chosen(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    checkout.take_calls()
    code, output = checkout.run("setup.sh", PYTHON="python3", FAKE_VERSION="3.12")
    assert code == 0
    assert "is Python 3.12; requirements/lock.txt is for 3.11" in output
    assert checkout.take_calls() == FIRST_INSTALL
    assert checkout.run("setup.sh") == (0, "")


@pytest.mark.parametrize(("version", "message"), [("3.10", "needs 3.11 or newer"), ("", "does not run")])
def test_chosen_python_must_fit(checkout: Checkout, version: str, message: str) -> None:
    program = "python3" if version else "no-such-python"
    code, output = checkout.run("setup.sh", PYTHON=program, FAKE_VERSION=version)
    assert code == 1
    assert message in output
    assert checkout.take_calls() == []


def test_debian_python_without_venv_gets_it(checkout: Checkout) -> None:
    assert checkout.run("setup.sh", FAKE_NO_ENSUREPIP="1")[0] == 0
    calls = checkout.take_calls()
    assert any("install" in call and "python3.11-venv" in call for call in calls)
    assert calls[-len(FIRST_INSTALL) :] == FIRST_INSTALL


def test_missing_packages_are_named_to_a_user_without_rights(checkout: Checkout) -> None:
    code, output = checkout.run("setup.sh", FAKE_UID="1000", INSTALLED="libx11-6=1 libgl1=1 libegl1=1")
    assert code == 3
    assert "missing: libglib2.0-0 mesa-vulkan-drivers>=25 (installed: none)" in output
    assert "sudo scripts/system_packages.sh simulators" in output
    assert checkout.take_calls() == []


def test_python_alone_needs_no_system_packages(checkout: Checkout) -> None:
    assert checkout.run("setup.sh", "--python-only", FAKE_UID="1000", INSTALLED="")[0] == 0
    assert checkout.take_calls() == FIRST_INSTALL


@pytest.mark.parametrize("environment", [{"FAKE_UID": "0"}, {"FAKE_UID": "1000", "FAKE_SUDO": "yes"}])
def test_old_mesa_is_replaced_from_backports(checkout: Checkout, environment: dict[str, str]) -> None:
    installed = f"{LIBRARIES} mesa-vulkan-drivers=22.3.6"
    assert checkout.run("system_packages.sh", "simulators", INSTALLED=installed, **environment)[0] == 0
    assert checkout.backports.endswith(".gpg] http://mirror.test/debian bookworm-backports main\n")
    calls = checkout.take_calls()
    assert calls[-1].endswith("install -y --no-install-recommends -t bookworm-backports mesa-vulkan-drivers")
    assert not any("libgl1" in call for call in calls)


def test_backports_are_added_once(checkout: Checkout) -> None:
    checkout.write_mirror("URIs: http://mirror.test/debian\nSuites: bookworm bookworm-backports\nComponents: main\n")
    assert checkout.run("system_packages.sh", "simulators", INSTALLED=LIBRARIES)[0] == 0
    assert checkout.backports == ""
    assert "-t bookworm-backports" in checkout.take_calls()[-1]


def test_new_release_needs_no_backports(checkout: Checkout) -> None:
    installed = LIBRARIES.replace("libglib2.0-0", "libglib2.0-0t64")
    code, _ = checkout.run("system_packages.sh", "simulators", INSTALLED=installed, MESA_CANDIDATE="25.0.7-2")
    assert code == 0
    assert checkout.backports == ""
    calls = checkout.take_calls()
    assert calls[-1].endswith("install -y --no-install-recommends mesa-vulkan-drivers")
    assert not any("libglib" in call for call in calls)


def test_unknown_mirror_is_an_error(checkout: Checkout) -> None:
    checkout.write_mirror("")
    code, output = checkout.run("system_packages.sh", "simulators", INSTALLED=LIBRARIES)
    assert code == 1
    assert "Set DEBIAN_MIRROR" in output


def test_check_installs_nothing(checkout: Checkout) -> None:
    code, output = checkout.run("system_packages.sh", "--check", "simulators", INSTALLED=LIBRARIES)
    assert code == 3
    assert "mesa-vulkan-drivers" in output
    assert checkout.take_calls() == []
    assert checkout.run("system_packages.sh", "--check", "simulators") == (0, "")
