"""The harness of the benchmarks: options, paired measurement, and what is written."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import Benchmark, Measured, Options, Study, measure_paired
from benchmarks.timing import Paired, cpu_clock


def study(**changes: object) -> Study:
    def measure(options: Options) -> Measured:
        return Measured(
            headline={"twice": 2.0 + options.seed},
            tables={"All": [{"side": "a", "seconds": 0.25, "known": None}]},
            notes=["a note"],
        )

    return Study(name="core/fake", title="Fake", question="Is it?", measure=measure, **changes)  # type: ignore[arg-type]


def test_writes_json_plot_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draw(result: Benchmark, figure: object) -> None:
        figure.subplots().bar(list(result.headline), list(result.headline.values()))  # type: ignore[attr-defined]

    out, page = tmp_path / "deep" / "out.json", tmp_path / "core-fake.md"
    code = study(draw=draw).main(["--quick", "--seed", "1", "--json", str(out), "--page", str(page)])
    assert code == 0
    written = json.loads(out.read_text())
    assert written["name"] == "core/fake"
    assert written["headline"] == {"twice": 3.0}
    assert written["tables"]["All"] == [{"side": "a", "seconds": 0.25, "known": None}]
    place = written["environment"]
    assert place["seed"] == 1
    assert place["quick"] is True
    assert {"cpu", "cores", "gpu", "versions", "commit", "threads", "load"} <= place.keys()
    assert {"python", "torch"} <= place["versions"].keys()
    assert (tmp_path / "core-fake.png").stat().st_size > 1000
    text = page.read_text()
    assert f"*Measured on {written['date']}* with `python -m benchmarks.core.fake --quick --seed 1`" in text
    assert "![Fake](core-fake.png)" in text
    assert "| a | 0.25 | - |" in text
    assert "core/fake: twice = 3" in capsys.readouterr().out


def test_own_options_arrive() -> None:
    own = study(add_options=lambda parser: parser.add_argument("--tenants", type=int, default=4))
    assert own.parse(["--tenants", "7"]).extra == {"tenants": 7}
    assert own.parse([]).extra == {"tenants": 4}


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="Take 'cpu' or 'cuda'"):
        Options(device="tpu")
    with pytest.raises(SystemExit):
        study(devices=("cpu",)).parse(["--device", "cuda"])


def test_sides_take_turns_in_rotating_order() -> None:
    ran: list[str] = []
    ticks = iter(range(10_000))

    def clock(work: object) -> float:
        begin = next(ticks)
        work()  # type: ignore[operator]
        return float(next(ticks) - begin)

    paired = measure_paired({name: lambda name=name: ran.append(name) for name in "ab"}, clock, rounds=3)
    assert "".join(ran[2:]) == "abbaab"
    assert paired.seconds == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_short_work_is_repeated_but_never_where_it_is_prepared() -> None:
    counts = {"work": 0, "prepare": 0}

    def work() -> None:
        counts["work"] += 1

    def prepare(side: str) -> None:
        assert side == "a"
        counts["prepare"] += 1

    paired = measure_paired({"a": work}, lambda each: (each(), 0.01)[1], rounds=2, min_seconds=0.05)
    assert counts["work"] == 1 + 2 * 6
    assert paired.typical("a") == pytest.approx(0.01 / 6)
    counts["work"] = 0
    measure_paired({"a": work}, cpu_clock, rounds=2, min_seconds=0.05, prepare=prepare)
    assert counts == {"work": 3, "prepare": 3}


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    paired = Paired(seconds={"alone": [2.0, 9.0, 4.0, 8.0], "shared": [1.0, 3.0, 2.0, 1.0]})
    ratio = paired.ratio("alone", "shared")
    assert ratio.median == 2.5
    assert ratio.low <= ratio.median <= ratio.high
    assert Paired(seconds={"a": [3.0], "b": [1.0]}).ratio("a", "b").low == 3.0
