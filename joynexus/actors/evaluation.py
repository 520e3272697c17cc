"""How an evaluation is spread over workers and put together again from what they wrote."""

from pathlib import Path
from typing import Any

from joynexus.actors.environment import read_reports
from joynexus.actors.roles import RoleClient
from joynexus.rollout.assignment import assign_episodes
from joynexus.rollout.report import summarize
from joynexus.specs.tenant import EvaluationSpec
from joynexus.types import EpisodeReport

OPEN_S = 600.0
"""How long opening a simulator may take."""


class EvaluationWatch:
    """One evaluation workload: with ``baseline``, the untrained version 0 is run on the same episodes first."""

    def __init__(self, spec: EvaluationSpec, index: int, tenant_folder: Path) -> None:
        self._spec = spec
        root = tenant_folder / f"evaluation_{index}"
        self._passes: list[tuple[str, Path, int | None]] = [("newest", root, None)]
        if spec.baseline:
            self._passes.insert(0, ("baseline", root / "baseline", 0))

    def start_worker(self, worker: int, client: RoleClient) -> None:
        """Give a worker its episodes; those whose reports are on disk are not run again."""
        episodes = assign_episodes(self._spec.num_episodes, self._spec.num_workers)[worker]
        passes = [(str(folder), version) for _, folder, version in self._passes]
        client.call("start_evaluation", self._spec, episodes, passes, timeout_s=OPEN_S)

    def count(self) -> int:
        """Episodes that have a report."""
        return sum(len(read_reports(folder)) for _, folder, _ in self._passes)

    def finished(self) -> bool:
        """Whether every episode of every pass has a report."""
        return self.count() >= self._spec.num_episodes * len(self._passes)

    def results(self) -> dict[str, Any]:
        """Success rates and counts; the baseline's stand beside them under ``baseline``."""
        found = {name: self._summary(folder) for name, folder, _ in self._passes}
        results = dict(found["newest"])
        if "baseline" in found:
            results["baseline"] = found["baseline"]
        return results

    def _summary(self, folder: Path) -> dict[str, Any]:
        reports = [EpisodeReport(**each) for each in read_reports(folder)]
        return dict(summarize(reports, expected=self._spec.num_episodes))
