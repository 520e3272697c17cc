"""What runs on a laptop: specs, scheduling and the light commands, with nothing heavy installed."""

import subprocess
import sys

import pytest

BLOCKER = """
import sys

class Blocker:
    blocked = {"torch", "ray", "numpy", "gymnasium", "transformers", "matplotlib", "tensorboard"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

MODULES = [
    "joynexus.errors",
    "joynexus.specs.contract",
    "joynexus.specs.loading",
    "joynexus.specs.service",
    "joynexus.specs.signature",
    "joynexus.specs.tenant",
    "joynexus.scheduling.admission",
    "joynexus.scheduling.health",
    "joynexus.scheduling.placement",
    "joynexus.scheduling.plan",
    "joynexus.scheduling.scaling",
    "joynexus.scheduling.sharing",
    "joynexus.cli",
    "joynexus.observability.logs",
    "joynexus.observability.metrics",
    "joynexus.observability.plot",
    "joynexus.observability.report",
    "joynexus.observability.sinks",
    "joynexus.observability.summary",
    "joynexus.observability.usage",
]


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKER + program], capture_output=True, text=True, check=False)


def test_light_modules_need_neither_torch_nor_ray_nor_numpy():
    done = run("\n".join(f"import {module}" for module in MODULES))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["torch", "ray", "numpy"])
def test_the_blocker_blocks(module):
    assert run(f"import {module}").returncode == 1
