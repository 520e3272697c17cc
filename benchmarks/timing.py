"""Time that a busy neighbour can't blur: CPU seconds of this process, or seconds between two CUDA events.

What is compared is measured in turn, round after round, each round in another order, and a ratio is the median of the
rounds' ratios: a slow spell of the machine then hits all sides alike.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

Work = Callable[[], object]
Clock = Callable[[Work], float]
"""Runs work and returns the seconds that it took."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times longer one side took than the other."""

    median: float
    low: float
    """First quartile of the rounds."""
    high: float
    """Third quartile of the rounds."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What every side took in every round."""

    seconds: Mapping[str, list[float]]
    """By side; index i is round i."""

    def typical(self, side: str) -> float:
        """Return a side's median seconds."""
        return median(self.seconds[side])

    def ratio(self, over: str, under: str) -> Ratio:
        """Return how many times longer ``over`` took than ``under``, by the rounds."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        ratios = [mine / other for mine, other in pairs]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        return Ratio(median=median(ratios), low=low, high=high)


def cpu_clock(work: Work) -> float:
    """Time work by the CPU seconds of this process, its threads added up."""
    began = time.process_time()
    work()
    return time.process_time() - began


def cuda_clock(work: Work) -> float:
    """Time work by CUDA events around it: kernels and the gaps between them, in which nobody else can use the GPU."""
    import torch  # noqa: PLC0415  # a simulation needs no torch

    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000


def clock_for(device: str) -> Clock:
    """Return the clock of a device: ``cpu`` or ``cuda``."""
    return cuda_clock if device == "cuda" else cpu_clock


def measure_paired(
    sides: Mapping[str, Work],
    clock: Clock,
    *,
    rounds: int,
    warmups: int = 1,
    min_seconds: float = 0.0,
    prepare: Work | None = None,
) -> Paired:
    """Measure several ways to do the same, interleaved.

    Args:
        sides: What to run, by name.
        clock: Of the device.
        rounds: How often each side is measured; odd numbers give a median that was really seen.
        warmups: Runs of each side that are thrown away.
        min_seconds: A side that takes less is run several times within a measurement.
        prepare: Called before every run, outside the time; a side is then run once per measurement.

    Returns:
        Seconds of one run, per side and round.
    """
    names = list(sides)
    repeats = dict.fromkeys(names, 1)
    for name in names:
        spent = [_run(sides[name], clock, 1, prepare) for _ in range(max(warmups, 1))][-1]
        if prepare is None and spent < min_seconds:
            repeats[name] = min(int(min_seconds / max(spent, 1e-6)) + 1, 1000)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name].append(_run(sides[name], clock, repeats[name], prepare) / repeats[name])
    finally:
        if was_collecting:
            gc.enable()
    return Paired(seconds=seconds)


def _run(work: Work, clock: Clock, repeats: int, prepare: Work | None) -> float:
    if prepare is not None:
        prepare()

    def often() -> None:
        for _ in range(repeats):
            work()

    return clock(often)
