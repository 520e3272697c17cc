"""The example of a whole algorithm on the low-level calls, as a user starts it: a driver of its own."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_algorithm" / "reward_weighted_regression.py"
LINE = re.compile(r"^iteration (\d+): mean return +(\S+), loss (\S+), version (\d+)$", re.MULTILINE)
NUM_UPDATES = 8
"""Optimizer steps of one iteration of the example."""


def test_reward_weighted_regression_runs_as_a_script(tmp_path: Path) -> None:
    options = ["--iterations", "2", "--episodes", "4", "--output", str(tmp_path / "runs")]
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )

    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = LINE.findall(ended.stdout)
    assert [(int(iteration), int(version)) for iteration, _, _, version in rows] == [(0, 1), (1, 2)]
    assert all(math.isfinite(float(value)) for _, mean_return, loss, _ in rows for value in (mean_return, loss))
    assert all(float(loss) > 0 for _, _, loss, _ in rows)
    returns = json.loads(ended.stdout.splitlines()[-1])["mean_returns"]
    assert [f"{each:.1f}" for each in returns] == [mean_return for _, mean_return, _, _ in rows]
    # A publication holds all updates made before it, though the driver awaited only some of them.
    saved = sorted(path.name for path in (tmp_path / "runs").glob("*/inverted-pendulum/checkpoints/*"))
    assert saved == [f"step_{NUM_UPDATES * (index + 1):08d}_v{index + 1:06d}" for index in range(2)]
