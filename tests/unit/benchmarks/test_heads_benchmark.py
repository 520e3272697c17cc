"""The benchmark of action modules: every number is there, and both sides act alike."""

import pytest

from benchmarks.core import heads, world
from benchmarks.harness import Options
from benchmarks.timing import Paired, measure_paired


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(sides: dict[str, object], clock: object, **_: object) -> Paired:
        return measure_paired(sides, clock, rounds=1)  # type: ignore[arg-type]

    monkeypatch.setattr(heads, "measure_paired", once)


def test_rows_are_whole() -> None:
    backbone = world.load("qwen3vl-tiny", world.SHORT, device="cpu", seed=0)
    acting = heads._act("gaussian, small", 3, backbone, Options(quick=True))
    assert (acting["same"], acting["difference"]) == ("True", 0.0)  # ``auto`` stacks only where this holds
    training = heads._train("oft, small", 2, 3, backbone, Options(quick=True))
    assert all(each is not None for row in (acting, training) for each in row.values())
