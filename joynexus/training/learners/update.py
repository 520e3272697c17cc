"""One PPO iteration: its minibatches in their order, and the means of their metrics."""

from collections import deque

from joynexus.specs.algorithm import PpoSpec
from joynexus.training.learners.experience import Decisions, epoch_order
from joynexus.types import Array, TrainingResult

AVERAGED = ("loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")
"""Metrics of an iteration that are means over its minibatches, by rows."""


class Update:
    """One iteration's minibatches and their metrics."""

    def __init__(self, decisions: Decisions, spec: PpoSpec, *, seed: int, workload: int, iteration: int) -> None:
        self.decisions = decisions
        count = len(decisions.batch)
        self._minibatches: deque[Array] = deque()
        for epoch in range(spec.num_epochs):
            order = epoch_order(count, seed=seed, workload=workload, iteration=iteration, epoch=epoch)
            self._minibatches.extend(
                order[start : start + spec.minibatch_size] for start in range(0, count, spec.minibatch_size)
            )
        self.num_steps = len(self._minibatches)
        """Optimizer steps of the whole iteration."""
        self._sums: dict[str, float] = {}
        self._rows = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether every minibatch was handed out."""
        return not self._minibatches

    def next_rows(self) -> Array:
        """Return the rows of the next minibatch."""
        return self._minibatches.popleft()

    def note(self, result: TrainingResult) -> None:
        """Add a minibatch's metrics."""
        rows = result.metrics.get("rows", 0.0)
        self._rows += rows
        for name in AVERAGED:
            self._sums[name] = self._sums.get(name, 0.0) + rows * result.metrics.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return the means over all minibatches, and what was known before the first."""
        means = {name: total / max(self._rows, 1.0) for name, total in self._sums.items()}
        count = float(len(self.decisions.batch))
        return means | {"explained_variance": self.decisions.explained_variance, "decisions": count}
