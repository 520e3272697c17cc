"""What the service's engines did and for whom, over all their restarts.

Engines count since they were built. The book keeps the last count of every process that is gone, adds those of the
living, and so never loses a device-second for which a tenant was charged. What it keeps is on disk, for the next
Master.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joynexus.actors import names
from joynexus.actors.records import write_atomically
from joynexus.actors.roles import RoleClient
from joynexus.errors import JoyNexusError, ServiceError
from joynexus.observability.group_log import GroupColumns, GroupLog
from joynexus.observability.usage_counts import as_counts, merge_usage
from joynexus.specs.service import ServiceSpec

FRESH_S = 3.0
"""How long replicas are waited for that were asked for what they did up to now; they tell it once a second."""


class UsageBook:
    """Collects the usage of all engines of a service. Thread-safe."""

    def __init__(self, spec: ServiceSpec, namespace: str, path: Path) -> None:
        """Open the book.

        Args:
            spec: The service.
            namespace: Of its roles.
            path: File for the counts of trainers that are gone; one that is there is read.
        """
        self._spec = spec
        self._namespace = namespace
        self._path = path
        self._lock = threading.Lock()
        self._past: dict[str, list[dict[str, Any]]] = {each: [] for each in spec.backbones}
        self._latest: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, list[GroupLog]] = {each: [GroupLog()] for each in spec.backbones}
        """Of each life of a backbone's trainer."""
        if path.exists():
            self._past.update(json.loads(path.read_text()))

    def observe(self, backbone: str, answer: Mapping[str, Any]) -> None:
        """Take in what a TrainingActor answers to a ping."""
        with self._lock:
            self._latest[backbone] = as_counts(answer["usage"], engine=names.trainer(backbone))
            self._groups[backbone][-1].extend(answer["groups"])

    def retire(self, backbone: str) -> None:
        """Keep the last count of a TrainingActor that was replaced."""
        with self._lock:
            last = self._latest.pop(backbone, None)
            self._groups[backbone].append(GroupLog())
            if last is not None:
                self._past[backbone] = [{**merge_usage([*self._past[backbone], last]), "engines": []}]
                write_atomically(self._path, json.dumps(self._past))

    def report(self, *, fresh: bool = False) -> dict[str, Any]:
        """Return, by backbone, the merged usage of training and of inference.

        Args:
            fresh: Ask the engines now, and use what they told last only where they do not answer.
        """
        if fresh:
            self._ask_trainers()
        replicas = self._replicas(FRESH_S if fresh else 0.0)
        with self._lock:
            training = {name: merge_usage([*past, *self._living(name)]) for name, past in self._past.items()}
        return {
            backbone: {
                "training": training[backbone],
                "inference": merge_usage([counts for name, counts in replicas if name == backbone]),
            }
            for backbone in self._spec.backbones
        }

    def groups(self) -> dict[str, dict[str, GroupColumns]]:
        """Return, by backbone, the groups of training and of inference, in order of time."""
        replicas: list[tuple[str, GroupColumns]] = self._ask_store("inference_groups") or []
        with self._lock:
            return {
                backbone: {
                    "training": GroupColumns.merge([each.since() for each in logs]),
                    "inference": GroupColumns.merge([each for name, each in replicas if name == backbone]),
                }
                for backbone, logs in self._groups.items()
            }

    def by_tenant(self) -> dict[str, float]:
        """Return the device-seconds that each tenant was charged, training and inference together."""
        seconds: dict[str, float] = {}
        for engines in self.report().values():
            for usage in engines.values():
                for tenant, amount in usage["device_seconds"].items():
                    seconds[tenant] = seconds.get(tenant, 0.0) + amount
        return seconds

    def _living(self, backbone: str) -> list[dict[str, Any]]:
        return [self._latest[backbone]] if backbone in self._latest else []

    def _ask_trainers(self) -> None:
        for backbone in self._spec.backbones:
            trainer = RoleClient(names.trainer(backbone), self._namespace)
            try:
                self.observe(backbone, trainer.call("ping", patience_s=0.0, timeout_s=10.0))
            except JoyNexusError:
                continue  # it is being made anew: its last answer is what there is

    def _replicas(self, fresh_s: float) -> list[tuple[str, dict[str, Any]]]:
        answers: dict[str, Any] = self._ask_store("inference_usage", fresh_s) or {}
        told = {name: each for name, each in answers.items() if each}
        return [
            (each["backbone"], as_counts(each["engine"], engine=f"replica {name[:6]}")) for name, each in told.items()
        ]

    def _ask_store(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Call the PolicyStore; None while it is being made anew: it then has the counts again a second later."""
        try:
            store = RoleClient(names.POLICY_STORE, self._namespace)
            return store.call(method, *arguments, patience_s=0.0, timeout_s=10.0)
        except ServiceError:
            return None
