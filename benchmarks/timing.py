"""Time that a busy neighbour can't blur: CPU seconds of this process, or seconds between two CUDA events.

What is compared is measured in turn, round after round, each round in another order, and a ratio is the median of the
rounds' ratios: a slow spell of the machine then hits all sides alike.
"""

import gc
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

LEAST_ROUNDS = 5
"""Fewer would let one slow spell of the machine decide the median."""
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
    budget_s: float | None = None,
    prepare: Callable[[str], object] | None = None,
) -> Paired:
    """Measure several ways to do the same, interleaved.

    Args:
        sides: What to run, by name.
        clock: Of the device.
        rounds: How often each side is measured; odd numbers give a median that was really seen.
        warmups: Runs of each side that are thrown away; the last one tells how often it has to be repeated.
        min_seconds: A side that takes less is run several times within a measurement.
        budget_s: Stop early, but not before :data:`LEAST_ROUNDS`, once this much was measured.
        prepare: Called with the name of a side before each of its runs, outside the time; a side is then run once per
            measurement.

    Returns:
        Seconds of one run, per side and round.
    """

    def run(name: str, times: int) -> float:
        if prepare is not None:
            prepare(name)
        return clock(lambda: [sides[name]() for _ in range(times)])

    repeats = dict.fromkeys(sides, 1)
    for name in sides:
        spent = [run(name, 1) for _ in range(warmups)]
        if prepare is None and spent and spent[-1] < min_seconds:
            repeats[name] = min(int(min_seconds / max(spent[-1], 1e-6)) + 1, 1000)
    with _no_collection():
        return Paired(seconds=_rounds(run, repeats, rounds, budget_s))


def _rounds(
    run: Callable[[str, int], float], repeats: Mapping[str, int], rounds: int, budget_s: float | None
) -> dict[str, list[float]]:
    """Measure all sides round after round, each round beginning with another one."""
    names, measured_s = list(repeats), 0.0
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            spent = run(name, repeats[name])
            measured_s += spent
            seconds[name].append(spent / repeats[name])
        if budget_s is not None and index + 1 >= LEAST_ROUNDS and measured_s > budget_s:
            break
    return seconds


@contextmanager
def _no_collection() -> Generator[None]:
    """Keep Python's garbage collector out of the time."""
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
