"""What holds for every test: one thread, no network, no telemetry, and cheap tests first.

The environment is set before torch, Ray and transformers are imported, which read it once, and simulator and Ray
processes inherit it. Only numpy is loaded earlier, by a plugin of pytest's.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    {
        # One thread each: exact equality of sums needs a fixed order, and parallel workers must not contend.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "LP_NUM_THREADS": "1",
        # Nothing is downloaded or reported.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
    }
)
# Ray would otherwise write a token into the home folder. Tests of authentication set their own mode.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests without Ray or a simulator first, those with a simulator last."""
    items.sort(key=lambda item: 2 * bool(item.get_closest_marker("sim")) + bool(item.get_closest_marker("ray")))


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A temporary folder with a short path: Ray's sockets live below it, and their paths are limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="jx-", dir="/tmp"))  # TMPDIR may be long
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
