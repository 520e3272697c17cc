"""What the service's engines did and for whom, over all their restarts.

Engines count since they were built. The book keeps the last count of every process that is gone, adds those of the
living, and so never loses a device-second for which a tenant was charged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from joynexus.actors import names
from joynexus.actors.health import HealthManager
from joynexus.actors.roles import RoleClient
from joynexus.errors import ServiceError

SUMMED = ("busy_seconds", "encoded", "reused", "num_groups")
AVERAGED = ("mean_tenants", "mean_samples")


def merge_usage(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the counts of several engines.

    Args:
        counts: Of engines, as mappings.

    Returns:
        Sums; means weighted by the number of groups; device-seconds by tenant; all groups in order of time.
    """
    total: dict[str, Any] = {key: sum(each[key] for each in counts) for key in SUMMED}
    for key in AVERAGED:
        weighted = sum(each[key] * each["num_groups"] for each in counts)
        total[key] = weighted / max(total["num_groups"], 1)
    seconds: dict[str, float] = {}
    for each in counts:
        for tenant, amount in each["device_seconds"].items():
            seconds[tenant] = seconds.get(tenant, 0.0) + amount
    total["device_seconds"] = seconds
    total["groups"] = sorted((group for each in counts for group in each["groups"]), key=lambda group: group["time_s"])
    return total


def as_mapping(usage: Any) -> dict[str, Any]:  # noqa: ANN401  # the usage of either engine
    """Turn an engine's usage into plain values."""
    groups = [{"time_s": each.time_s, "tenants": each.tenants, "samples": each.samples} for each in usage.groups]
    counts = {key: getattr(usage, key) for key in (*SUMMED, *AVERAGED)}
    return {**counts, "device_seconds": dict(usage.device_seconds), "groups": groups}


class UsageBook:
    """Collects the usage of all engines of a service."""

    def __init__(self, health: HealthManager, backbones: Sequence[str], namespace: str) -> None:
        self._health = health
        self._backbones = list(backbones)
        self._store = RoleClient(names.POLICY_STORE, namespace)
        self._past: dict[str, list[dict[str, Any]]] = {each: [] for each in backbones}

    def retire(self, backbone: str) -> None:
        """Keep the last count of a TrainingActor that was replaced."""
        answer = self._health.answer(names.trainer(backbone))
        if answer is not None:
            self._past[backbone].append(as_mapping(answer["usage"]))

    def report(self) -> dict[str, Any]:
        """Return, by backbone, the merged usage of training and of inference."""
        replicas = self._replicas()
        found: dict[str, Any] = {}
        for backbone in self._backbones:
            answer = self._health.answer(names.trainer(backbone))
            living = [] if answer is None else [as_mapping(answer["usage"])]
            inference = [as_mapping(each["engine"]) for each in replicas if each.get("backbone") == backbone]
            found[backbone] = {
                "training": merge_usage([*self._past[backbone], *living]),
                "inference": merge_usage(inference),
            }
        return found

    def _replicas(self) -> list[Mapping[str, Any]]:
        try:
            answers = self._store.call("inference_usage", patience_s=0.0, timeout_s=10.0)
        except ServiceError:
            return []  # the store is being made anew; the next report has the counts again
        return [each for each in answers.values() if each]

    def by_tenant(self) -> dict[str, float]:
        """Return the device-seconds that each tenant was charged, training and inference together."""
        seconds: dict[str, float] = {}
        for engines in self.report().values():
            for usage in engines.values():
                for tenant, amount in usage["device_seconds"].items():
                    seconds[tenant] = seconds.get(tenant, 0.0) + amount
        return seconds
