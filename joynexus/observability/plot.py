"""A run in one picture: losses, returns and success, and who shared which batch over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

Records = Sequence[Mapping[str, Any]]
"""A tenant's metrics, as :func:`joynexus.observability.sinks.read_metrics` gives them."""

LOSS = ("training/loss",)
OUTCOME = ("rollout/return_mean", "rollout/success_once", "evaluation/success_once")
GROUP_TENANTS = "training/group_tenants"
MAX_COLORS = 8
"""Groups of more tenants share the last colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMark:
    """One group batch, or one tenant's part of it."""

    time_s: float
    """Unix time at its end."""
    num_tenants: int
    num_samples: int


def plot_run(
    path: Path,
    tenants: Mapping[str, Records],
    groups: Mapping[str, Sequence[GroupMark]] | None = None,
    seconds: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Draw a run into a PNG file.

    Args:
        path: The file.
        tenants: Metrics of each tenant; the timeline has a row for each that trained.
        groups: Group batches of the service by kind (``training``, ``inference``); their sizes are drawn beneath.
        seconds: Device-seconds of each tenant by what the device did; drawn as bars at the bottom.
    """
    figure_class = import_module("matplotlib.figure").Figure
    marks = {tenant: group_marks(records) for tenant, records in tenants.items()}
    heights = [3, 3, 1.2 + 0.35 * len(tenants), 2.2, *([0.8 + 0.35 * len(seconds)] if seconds else [])]
    figure = figure_class(figsize=(12, 1.2 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_curves(axes[0], tenants, LOSS, title="loss", log_scale=True)
    _draw_curves(axes[1], tenants, OUTCOME, title="return and success", log_scale=False)
    times = [mark.time_s for each in (*marks.values(), *(groups or {}).values()) for mark in each]
    start_s = min(times, default=0.0)
    _draw_timeline(figure, axes[2], marks, start_s)
    _draw_groups(axes[3], groups or {}, start_s)
    if seconds:
        _draw_seconds(axes[4], seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def group_marks(records: Records) -> list[GroupMark]:
    """Take out of a tenant's metrics the group batches that it was part of."""
    return [
        GroupMark(
            time_s=float(record["time_s"]),
            num_tenants=int(record[GROUP_TENANTS]),
            num_samples=int(record.get("training/group_samples") or 0),
        )
        for record in records
        if record.get(GROUP_TENANTS)
    ]


def _draw_curves(
    axis: Any,  # noqa: ANN401  # matplotlib's axes, imported late
    tenants: Mapping[str, Records],
    names: Sequence[str],
    *,
    title: str,
    log_scale: bool,
) -> None:
    drawn: list[float] = []
    for index, (tenant, records) in enumerate(tenants.items()):
        for line, name in enumerate(names):
            points = [(each["step"], each[name]) for each in records if each.get(name) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                drawn += values
                label = tenant if len(names) == 1 else f"{tenant} {name}"
                style = {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[line % 3]}
                axis.plot(steps, values, label=label, linewidth=1.2, marker="." if len(points) < 30 else None, **style)  # noqa: PLR2004
    if log_scale and drawn and min(drawn) > 0:
        axis.set_yscale("log")
    _finish(axis, title, "optimizer step", has_legend=bool(drawn))


def _draw_timeline(figure: Any, axis: Any, marks: Mapping[str, Sequence[GroupMark]], start_s: float) -> None:  # noqa: ANN401
    """One row per tenant, one mark per group; the colour tells how many tenants shared it."""
    most = max((mark.num_tenants for each in marks.values() for mark in each), default=0)
    shades = max(2, min(most, MAX_COLORS))
    colors = import_module("matplotlib").colormaps["viridis"].resampled(shades)
    drawn = None
    for row, each in enumerate(marks.values()):
        times = [mark.time_s - start_s for mark in each]
        shared = [min(mark.num_tenants, shades) for mark in each]
        drawn = axis.scatter(
            times, [row] * len(times), c=shared, cmap=colors, vmin=0.5, vmax=shades + 0.5, marker="|", s=120
        )
    axis.set_yticks(range(len(marks)), list(marks))
    axis.set_ylim(len(marks) - 0.5, -0.5) if marks else None
    _finish(axis, "who shared which training batch", "seconds", has_legend=False)
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=axis, ticks=range(1, shades + 1))
        bar.set_label(
            "tenants in the batch" if most <= MAX_COLORS else f"tenants in the batch, at most {MAX_COLORS} told apart"
        )


def _draw_groups(axis: Any, groups: Mapping[str, Sequence[GroupMark]], start_s: float) -> None:  # noqa: ANN401
    for kind, each in groups.items():
        times = [mark.time_s - start_s for mark in each]
        mean = sum(mark.num_tenants for mark in each) / max(1, len(each))
        samples = [mark.num_samples for mark in each]
        axis.scatter(times, samples, s=6, label=f"{kind}: {len(each)} batches of {mean:.1f} tenants")
    _finish(axis, "samples per group batch", "seconds", has_legend=any(groups.values()))


def _draw_seconds(axis: Any, seconds: Mapping[str, Mapping[str, float]]) -> None:  # noqa: ANN401
    """One bar per tenant, a piece for each kind of work."""
    ends = dict.fromkeys(seconds, 0.0)
    for kind in dict.fromkeys(chain(*seconds.values())):
        widths = [each.get(kind, 0.0) for each in seconds.values()]
        axis.barh(list(seconds), widths, left=list(ends.values()), label=kind.replace("_", " "), height=0.6)
        ends = {tenant: ends[tenant] + width for tenant, width in zip(ends, widths, strict=True)}
    axis.invert_yaxis()
    _finish(axis, "device-seconds by tenant and kind", "device-seconds", has_legend=True)


def _finish(axis: Any, title: str, x_label: str, *, has_legend: bool) -> None:  # noqa: ANN401
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(x_label)
    axis.grid(visible=True, alpha=0.3)
    if has_legend:
        axis.legend(fontsize=8, loc="best")
