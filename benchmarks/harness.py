"""What every benchmark shares: its options, its typed result, and how that becomes JSON, a plot and a page.

A benchmark is a :class:`Study`; its module ends with ``if __name__ == "__main__": sys.exit(STUDY.main())``.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import Environment, capture
from benchmarks.pages import Row, shown, table, write_page
from benchmarks.timing import Clock, Paired, Ratio, clock_for, measure_paired

__all__ = [
    "Benchmark",
    "Clock",
    "Environment",
    "Measured",
    "Options",
    "Paired",
    "Ratio",
    "Row",
    "Study",
    "capture",
    "clock_for",
    "measure_paired",
    "table",
    "write_page",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    quick: bool = False
    """Fewer points and rounds: under 60 s on two quiet cores."""
    seed: int = 0
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    threads: int = 1
    """Of torch."""
    json: Path | None = None
    plot: Path | None = None
    page: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """A benchmark's own options, by name."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}. Take 'cpu' or 'cuda'.")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a benchmark's own code answers."""

    headline: Mapping[str, float]
    """The few numbers that stand for all, by name."""
    tables: Mapping[str, Sequence[Row]]
    notes: Sequence[str] = ()
    """What a reader has to know: what was compared, what was checked."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What other programs need of the run; it stands in the JSON beside the rest."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A result, whole."""

    name: str
    """Module and name: ``core/group_forward``."""
    title: str
    question: str
    headline: Mapping[str, float]
    tables: Mapping[str, Sequence[Row]]
    notes: Sequence[str]
    environment: Environment
    date: str
    """Day of the measurement: ``2026-01-31``."""
    wall_s: float
    """Of the whole run."""
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One benchmark: what it asks, measures and draws."""

    name: str
    title: str
    question: str
    """A few sentences: what is compared with what."""
    measure: Callable[[Options], Measured]
    draw: Callable[[Benchmark, Any], None] | None = None
    """Draws into a matplotlib ``Figure``."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds the benchmark's own options; their values arrive in ``Options.extra``."""

    def run(self, options: Options) -> Benchmark:
        """Measure, without writing anything."""
        place = capture(seed=options.seed, quick=options.quick, device=options.device, threads=options.threads)
        began = time.monotonic()
        measured = self.measure(options)
        return Benchmark(
            name=self.name,
            title=self.title,
            question=self.question,
            headline=dict(measured.headline),
            tables={name: list(rows) for name, rows in measured.tables.items()},
            notes=list(measured.notes),
            environment=place,
            date=time.strftime("%Y-%m-%d"),
            wall_s=round(time.monotonic() - began, 1),
            data=dict(measured.data),
        )

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run from the command line: measure, print, and write what was asked for."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = self.parse(given)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        result = self.run(options)
        for line in summary(result):
            print(line)
        if options.json is not None:
            write_json(result, options.json)
        plot = options.plot if options.plot is not None or options.page is None else options.page.with_suffix(".png")
        if plot is not None and self.draw is not None:
            save_plot(result, plot, self.draw)
        if options.page is not None:
            drawn = plot if self.draw is not None else None
            write_page(result, options.page, command=self._command(options), plot=drawn)
        return 0

    def parse(self, arguments: Sequence[str]) -> Options:
        """Read a command line; a wrong one ends the process, as argparse does."""
        parser = argparse.ArgumentParser(prog=f"python -m {self._module}", description=self.question)
        parser.add_argument("--json", type=Path, metavar="OUT", help="write the whole result")
        parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it; beside the page if left out")
        parser.add_argument("--page", type=Path, metavar="MD", help="write a results page")
        parser.add_argument("--quick", action="store_true", help="under 60 s on two quiet cores")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--device", choices=self.devices, default=self.devices[0])
        parser.add_argument("--threads", type=int, default=1, help="torch threads")
        if self.add_options is not None:
            self.add_options(parser)
        values = vars(parser.parse_args(list(arguments)))
        known = {each.name for each in dataclasses.fields(Options)}
        extra = {name: value for name, value in values.items() if name not in known}
        return Options(**{name: value for name, value in values.items() if name in known}, extra=extra)

    @property
    def _module(self) -> str:
        return "benchmarks." + self.name.replace("/", ".")

    def _command(self, options: Options) -> str:
        """Return what to type, without the places where results are written."""
        words = [f"python -m {self._module}", f"--device {options.device}" if options.device != "cpu" else ""]
        words += ["--quick" if options.quick else "", f"--seed {options.seed}" if options.seed else ""]
        words += [f"--threads {options.threads}" if options.threads != 1 else ""]
        return " ".join(word for word in words if word)


def summary(result: Benchmark) -> list[str]:
    """Return what is printed: tables, then headline."""
    lines: list[str] = []
    for name, rows in result.tables.items():
        lines += [name, *table(rows), ""]
    lines += [f"{result.name}: {name} = {shown(value)}" for name, value in result.headline.items()]
    return [*lines, *result.notes, f"{result.wall_s} s, commit {result.environment.commit}"]


def write_json(result: Benchmark, path: Path) -> None:
    """Write a result as JSON: ``name``, ``headline``, ``tables``, ``environment``, ``date`` and more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = dataclasses.asdict(result)
    path.write_text(json.dumps({**fields.pop("data"), **fields}, indent=1) + "\n")


def save_plot(result: Benchmark, path: Path, draw: Callable[[Benchmark, Any], None]) -> None:
    """Draw a result into a PNG file."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # only where a picture is asked for

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    draw(result, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
