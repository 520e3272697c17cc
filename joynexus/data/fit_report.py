"""How new data fits the statistics that a policy brings: what part of it lies outside, where, and how far.

A policy that goes on training keeps its statistics, since its module was trained on what they normalise. Data outside
of them reaches the module as numbers that it has never seen, and actions beyond them may be out of its reach. Nobody
sees that in a loss curve, so it is counted before the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.normalization import stats_digest
from joynexus.specs.contract import NormalizationMode, StateField
from joynexus.specs.tenant import PolicySpec
from joynexus.types import Array, NormalizationStats, PolicyStats

CHUNK = 8192
"""Frames that are read at a time."""
NUM_WORST = 3
"""Dimensions that are named."""
EXPECTED_BEYOND_QUANTILES = 0.02
"""Of each dimension, where the data is like that of the statistics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorFit:
    """How states, or actions, fit."""

    name: str
    """``state`` or ``action``."""
    mode: NormalizationMode
    """How the policy normalises them."""
    labels: tuple[str, ...]
    """One per dimension, such as ``qpos[3]``."""
    beyond_range: tuple[float, ...]
    """Part of the frames beyond the statistics' [min, max], per dimension."""
    beyond_quantiles: tuple[float, ...]
    """Part of the frames beyond [q01, q99], per dimension; about 0.02 of data like that of the statistics."""
    reach: tuple[float, ...]
    """Furthest number of each dimension, from the middle of [min, max], in halves of that range: 1 is its end. A
    dimension that was constant reaches infinity as soon as it moves."""
    any_beyond_range: float
    """Part of the frames with any dimension beyond [min, max]."""
    any_beyond_quantiles: float
    """Part of the frames with any dimension beyond [q01, q99]."""

    def worst(self) -> tuple[int, ...]:
        """Return the dimensions with most outside [min, max], then outside the quantiles; the worst first."""
        order = sorted(
            range(len(self.labels)),
            key=lambda dim: (-self.beyond_range[dim], -self.beyond_quantiles[dim], dim),
        )
        is_outside = [each > 0 or more > EXPECTED_BEYOND_QUANTILES for each, more in self._shares()]
        return tuple(dim for dim in order if is_outside[dim])[:NUM_WORST]

    def line(self) -> str:
        """Say it in a line."""
        text = (
            f"{self.name} ({self.mode}): {self.any_beyond_range:.1%} of frames beyond [min, max], "
            f"{self.any_beyond_quantiles:.1%} beyond [q01, q99], in any of {len(self.labels)} dimensions"
        )
        named = [
            f"{self.labels[dim]} {self.beyond_range[dim]:.1%} and {self.beyond_quantiles[dim]:.1%}, reaching "
            f"{self.reach[dim]:.3g} times the range"
            for dim in self.worst()
        ]
        return f"{text}; worst: {'; '.join(named)}" if named else text

    def to_json(self) -> dict[str, Any]:
        """Write all fields, and the worst dimensions by name."""
        return {
            "mode": self.mode,
            "any_beyond_range": self.any_beyond_range,
            "any_beyond_quantiles": self.any_beyond_quantiles,
            "beyond_range": dict(zip(self.labels, self.beyond_range, strict=True)),
            "beyond_quantiles": dict(zip(self.labels, self.beyond_quantiles, strict=True)),
            "reach": {
                label: each if np.isfinite(each) else None for label, each in zip(self.labels, self.reach, strict=True)
            },
            "worst": [self.labels[dim] for dim in self.worst()],
        }

    def _shares(self) -> list[tuple[float, float]]:
        return list(zip(self.beyond_range, self.beyond_quantiles, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """How a dataset fits a policy's statistics."""

    dataset: str
    """What the dataset calls itself."""
    statistics: str
    """Where the statistics were computed."""
    num_frames: int
    parts: tuple[VectorFit, ...]
    """State and action, as far as the policy has statistics of them."""

    def lines(self) -> list[str]:
        """Say it in lines, for people."""
        head = f"{self.dataset}: {self.num_frames} frames against the statistics of {self.statistics}"
        return [head, *(f"  {each.line()}" for each in self.parts)]

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values, as ``summary.json`` holds it."""
        parts = {each.name: each.to_json() for each in self.parts}
        names = {"dataset": self.dataset, "statistics": self.statistics, "num_frames": self.num_frames}
        return {**names, "lines": self.lines(), **parts}


def measure_fit(dataset: EpisodeDataset, stats: PolicyStats, policy: PolicySpec) -> FitReport | None:
    """Compare all frames of a dataset with a policy's statistics. Images are not read.

    Args:
        dataset: Open, and of the policy's widths.
        stats: The policy's.
        policy: Gives the modes.

    Returns:
        The report; None where the statistics are the dataset's own.
    """
    if stats_digest(dataset.statistics()) == stats_digest(stats):
        return None
    contract = dataset.contract
    counts: list[_Counts] = []
    if stats.state is not None and policy.observation.state_dim:
        counts.append(_Counts("state", policy.state_normalization, _labels(contract.state), stats.state))
    if stats.action is not None:
        names = [f"action[{dim}]" for dim in range(policy.action.dim)]
        counts.append(_Counts("action", policy.action.normalization, names, stats.action))
    for first in range(0, dataset.num_frames, CHUNK):
        rows = range(first, min(first + CHUNK, dataset.num_frames))
        batch = dataset.read(rows, 1, with_frames=False)
        vectors: Mapping[str, Array] = {"state": batch.observation.state, "action": batch.actions[:, 0]}
        for each in counts:
            each.add(vectors[each.name])
    return FitReport(
        dataset=contract.source,
        statistics=stats.source or "the policy",
        num_frames=dataset.num_frames,
        parts=tuple(each.result() for each in counts),
    )


def _labels(fields: Sequence[StateField]) -> list[str]:
    return [f"{each.name}[{dim}]" if each.dim > 1 else each.name for each in fields for dim in range(each.dim)]


class _Counts:
    """Counts over all frames of one vector."""

    def __init__(self, name: str, mode: NormalizationMode, labels: Sequence[str], stats: NormalizationStats) -> None:
        self.name = name
        self._mode: NormalizationMode = mode
        self._labels = tuple(labels)
        self._bounds = ((stats.minimum, stats.maximum), (stats.q01, stats.q99))
        width = len(self._labels)
        self._frames = 0
        self._beyond: list[Int64[Array, " d"]] = [np.zeros(width, dtype=np.int64) for _ in self._bounds]
        self._any = [0, 0]
        self._lowest: Float64[Array, " d"] = np.full(width, np.inf)
        self._highest: Float64[Array, " d"] = np.full(width, -np.inf)

    def add(self, frames: Float32[Array, "n d"]) -> None:
        """Count some frames."""
        self._frames += len(frames)
        for index, (low, high) in enumerate(self._bounds):
            outside = (frames < low) | (frames > high)
            self._beyond[index] += outside.sum(axis=0)
            self._any[index] += int(outside.any(axis=1).sum())
        self._lowest = np.minimum(self._lowest, frames.min(axis=0))
        self._highest = np.maximum(self._highest, frames.max(axis=0))

    def result(self) -> VectorFit:
        """Return the shares."""
        low, high = (each.astype(np.float64) for each in self._bounds[0])
        middle, half = (high + low) / 2, (high - low) / 2
        furthest = np.maximum(self._highest - middle, middle - self._lowest)
        still = furthest <= half  # a dimension that was constant, and is the same constant here
        reach = np.where(still & (half == 0), 0.0, furthest / np.where(half == 0, np.nan, half))
        reach = np.where(np.isnan(reach), np.inf, reach)
        shares = [tuple(float(each) for each in counted / self._frames) for counted in self._beyond]
        return VectorFit(
            name=self.name,
            mode=self._mode,
            labels=self._labels,
            beyond_range=shares[0],
            beyond_quantiles=shares[1],
            reach=tuple(float(each) for each in reach),
            any_beyond_range=self._any[0] / self._frames,
            any_beyond_quantiles=self._any[1] / self._frames,
        )
