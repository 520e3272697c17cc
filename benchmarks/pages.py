"""Results for people: a dated page with hardware, versions and every table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.environment import Environment
    from benchmarks.harness import Benchmark

Value = str | int | float | bool | None
Row = Mapping[str, Value]
"""One line of a table; all lines of a table have the same columns."""


def write_page(result: "Benchmark", page: Path, *, command: str, plot: Path | None = None) -> None:
    """Write a result as Markdown.

    Args:
        result: What was measured.
        page: The file; a page of an earlier day is replaced.
        command: What to type to get it again.
        plot: Picture to show; it should lie beside the page.
    """
    place = result.environment
    how = "Simulated" if result.name.startswith("simulation/") else "Measured"
    lines = [
        f"# {result.title}",
        "",
        f"*{how} on {result.date}* with `{command}`.",
        "",
        result.question,
        "",
        *(f"- {note}" for note in result.notes),
        "",
        *table([{"headline": name, "value": value} for name, value in result.headline.items()]),
        "",
    ]
    if plot is not None:
        lines += [f"![{result.title}]({plot.name})", ""]
    for name, rows in result.tables.items():
        lines += [f"## {name}", "", *table(rows), ""]
    lines += ["## Where", "", where(place), ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines))


def where(place: "Environment") -> str:
    """Describe hardware, versions and circumstances in one line."""
    gpu = "" if place.gpu is None else f", {place.gpu}"
    versions = ", ".join(f"{name} {each}" for name, each in place.versions.items())
    return (
        f"{place.cpu}, {place.cores} cores, {place.memory_gib} GiB{gpu}; device `{place.device}`, {place.threads} "
        f"torch thread(s); {versions}; commit `{place.commit}`; seed {place.seed}{', quick' if place.quick else ''}; "
        f"load {place.load} at the start."
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table; numbers get three significant digits, or their integer part."""
    if not rows:
        return ["(no rows)"]
    columns = list(rows[0])
    header = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return header + [f"| {' | '.join(shown(row[column]) for column in columns)} |" for row in rows]


def shown(value: Value) -> str:
    """Write a value shortly."""
    if isinstance(value, bool) or not isinstance(value, float):
        return "-" if value is None else str(value)
    if value and not 1e-3 <= abs(value) < 1e6:  # noqa: PLR2004
        return f"{value:.2g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004
