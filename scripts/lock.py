"""Write requirements/lock.txt: the exact versions, in this environment, of all that the project needs.

Run it with the project's interpreter (``make lock``) after a deliberate upgrade. It follows the requirements of
``joynexus[dev]``, extras and markers included, so that what else happens to be installed is left out. A local version
label (``+cpu``) is dropped: which build of torch is taken is for the machine's own pip configuration to say.
"""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
HEADER = """\
# Exact versions of all that joynexus[dev] needs, for Python 3.11 on Linux. Written by scripts/lock.py (`make lock`).
# Install it in one pip command: torch has to be resolved together with what depends on it.
"""


def canonical(name: str) -> str:
    """Return a distribution's normalised name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_requirements(extra: str) -> list[Requirement]:
    """Read what the project itself needs with one of its extras, nested extras (``joynexus[...]``) resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(each) for each in project["dependencies"]]
    pending, seen = [extra], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in map(Requirement, project["optional-dependencies"][name]):
            if requirement.name == project["name"]:
                pending.extend(requirement.extras)
            else:
                found.append(requirement)
    return found


def dependencies(name: str, extra: str) -> Iterator[Requirement]:
    """Yield what an installed distribution needs on this platform, with one of its extras ("" for none)."""
    environment = {**default_environment(), "extra": extra}
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def closure(roots: list[Requirement]) -> dict[str, str]:
    """Follow requirements through what is installed.

    Args:
        roots: Where to start.

    Returns:
        Version without local label, by normalised name.

    Raises:
        SystemExit: If a required distribution is not installed.
    """
    versions: dict[str, str] = {}
    pending = list(roots)
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = canonical(requirement.name)
        try:
            versions[name] = distribution(name).version.partition("+")[0]
        except PackageNotFoundError:
            raise SystemExit(f"lock.py: {requirement} is not installed. Run `make setup` first.") from None
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending.extend(dependencies(name, extra))
    return versions


def main() -> None:
    """Write the lock file, sorted by name."""
    pins = sorted(closure(project_requirements("dev")).items())
    LOCK.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in pins))


if __name__ == "__main__":
    main()
