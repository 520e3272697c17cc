"""Which policy versions are resident: each tenant's base and its newest one.

A publication builds its module in the publisher's thread and outside any lock, and then replaces one entry of the
table. Readers take what the table holds at that moment and keep it for the whole request; so nobody waits for a
publication, and a request is served wholly by one version.
"""

import threading
from dataclasses import dataclass, replace

import torch

from joynexus.errors import CheckpointError, SpecError, StalePolicyError, TenantNotFoundError
from joynexus.models.backbone import Backbone
from joynexus.models.normalizer import PolicyNormalizer
from joynexus.models.policy import build_policy
from joynexus.models.policy_parts import PolicyParts
from joynexus.specs.tenant import PolicySpec
from joynexus.types import PolicySnapshot


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedPolicy:
    """One version, ready to act; nothing in it ever changes."""

    tenant: str
    version: int
    policy: PolicySpec
    parts: PolicyParts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Resident:
    """The versions of one tenant."""

    newest: ServedPolicy
    base: ServedPolicy | None
    """Version 0; None if it was not published here yet."""


class PolicyTable:
    """The resident policies of all tenants of one backbone. Thread-safe; reading never waits."""

    def __init__(self, backbone: Backbone, backbone_name: str) -> None:
        """Start empty.

        Args:
            backbone: What the policies are built beside.
            backbone_name: Its name in the service; policies for another one are refused.
        """
        self._backbone = backbone
        self._backbone_name = backbone_name
        self._writing = threading.Lock()
        self._resident: dict[str, _Resident] = {}  # replaced whole, never changed: readers need no lock

    def versions(self) -> dict[str, int]:
        """Return each tenant's newest version."""
        return {tenant: each.newest.version for tenant, each in self._resident.items()}

    def find(self, tenant: str, version: int | None = None) -> ServedPolicy:
        """Return a resident version.

        Args:
            tenant: Whose policy.
            version: Which one; None takes the newest.

        Raises:
            TenantNotFoundError: If the tenant has none here.
            StalePolicyError: If this version is not resident.
        """
        resident = self._resident.get(tenant)
        if resident is None:
            raise TenantNotFoundError(
                f"tenant {tenant!r}: has no policy on backbone {self._backbone_name!r}. Publish one first."
            )
        if version is None:
            return resident.newest
        for served in (resident.newest, resident.base):
            if served is not None and served.version == version:
                return served
        held = sorted({each.version for each in (resident.base, resident.newest) if each is not None})
        raise StalePolicyError(
            f"tenant {tenant!r}: version {version} is not resident, {held} are. Ask for one of them."
        )

    def publish(self, snapshot: PolicySnapshot) -> bool:
        """Take a version over.

        Args:
            snapshot: Immutable; a version that is resident, or older than the newest, is ignored, but for a base
                that is missing.

        Returns:
            Whether it is served from now on.

        Raises:
            SpecError: If the policy is not for this backbone, or can't be built beside it.
            CheckpointError: If the parameters do not fit the policy.
        """
        if not self._lacks(snapshot):
            return False
        if snapshot.policy.backbone != self._backbone_name:
            raise SpecError(
                f"tenant {snapshot.tenant!r}: its policy is for backbone {snapshot.policy.backbone!r}, this engine has "
                f"{self._backbone_name!r}. Publish it to the replicas of its own."
            )
        served = self._build(snapshot)
        with self._writing:
            if not self._lacks(snapshot):  # a newer one was faster
                return False
            self._resident = {**self._resident, snapshot.tenant: self._with(served)}
        return True

    def remove(self, tenant: str) -> None:
        """Forget a tenant; requests that run are finished. Unknown ones are ignored."""
        with self._writing:
            self._resident = {name: each for name, each in self._resident.items() if name != tenant}

    def _lacks(self, snapshot: PolicySnapshot) -> bool:
        resident = self._resident.get(snapshot.tenant)
        if resident is None or snapshot.version > resident.newest.version:
            return True
        return snapshot.version == 0 and resident.base is None

    def _with(self, served: ServedPolicy) -> _Resident:
        resident = self._resident.get(served.tenant)
        base = served if served.version == 0 else (resident.base if resident else None)
        newest = resident.newest if resident and resident.newest.version > served.version else served
        return _Resident(newest=newest, base=base)

    def _build(self, snapshot: PolicySnapshot) -> ServedPolicy:
        resident = self._resident.get(snapshot.tenant)
        if resident is not None and resident.newest.policy == snapshot.policy:
            # Copying the module that is there saves drawing initial parameters that are overwritten at once.
            known = resident.newest.parts
            normalizer = PolicyNormalizer.of_policy(snapshot.policy, snapshot.stats, self._backbone.device)
            parts = replace(known.copied(), normalizer=normalizer)
        else:
            parts = build_policy(snapshot.policy, self._backbone, seed=snapshot.seed, stats=snapshot.stats)
        _load(parts, snapshot)
        return ServedPolicy(tenant=snapshot.tenant, version=snapshot.version, policy=snapshot.policy, parts=parts)


def _load(parts: PolicyParts, snapshot: PolicySnapshot) -> None:
    try:
        parts.load({name: torch.tensor(each) for name, each in snapshot.parameters.items()})
    except RuntimeError as error:
        raise CheckpointError(
            f"tenant {snapshot.tenant!r}, version {snapshot.version}: the parameters do not fit the action module "
            f"{snapshot.policy.action_module.type!r}: {error}. Publish what this policy trained."
        ) from error
    parts.freeze()
