"""Who used how much of the device: the ledger that tenants are charged from.

Engines count device-seconds since they were built. The ledger takes such readings from any number of processes and
notices when one started anew, so that a restart neither loses a second nor charges one twice.
"""

from collections.abc import Mapping
from typing import Any


class UsageLedger:
    """Device-seconds by tenant and kind (``training``, ``inference``), over all processes and restarts."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, float]] = {}
        self._readings: dict[str, dict[str, float]] = {}
        """By source and kind: the last reading of each tenant."""

    def charge(self, tenant: str, kind: str, device_seconds: float) -> None:
        """Add to a tenant's account.

        Raises:
            ValueError: If the amount is negative or not a number.
        """
        if not device_seconds >= 0:
            raise ValueError(f"tenant {tenant!r}: charge of {device_seconds} s. Give an amount of at least 0.")
        kinds = self._totals.setdefault(tenant, {})
        kinds[kind] = kinds.get(kind, 0.0) + device_seconds

    def observe(self, source: str, kind: str, readings: Mapping[str, float]) -> None:
        """Take a reading of a process' counters, and charge what was added since its last one.

        Args:
            source: The process, by the name of its role; its counters start at 0 whenever it is made anew. Where
                readings are so rare that a new process can overtake the old one's last, add its id.
            kind: What the device did.
            readings: Device-seconds by tenant since the process was started. A tenant that is gone may be missing.
        """
        last = self._readings.setdefault(f"{source} {kind}", {})
        # A counter never falls: one that did belongs to a new process, and so do all the others of this reading.
        is_new = any(value < last.get(tenant, 0.0) for tenant, value in readings.items())
        for tenant, value in readings.items():
            self.charge(tenant, kind, value if is_new else value - last.get(tenant, 0.0))
        if is_new:
            last.clear()
        last.update(readings)

    def device_seconds(self, tenant: str) -> float:
        """Return all that a tenant was charged; 0 for an unknown one."""
        return sum(self._totals.get(tenant, {}).values(), start=0.0)

    def by_tenant(self) -> dict[str, dict[str, float]]:
        """Return the accounts: by tenant, then by kind."""
        return {tenant: dict(kinds) for tenant, kinds in sorted(self._totals.items())}

    def to_json(self) -> dict[str, Any]:
        """Write accounts and last readings, so that a new Master goes on where the old one was."""
        return {"totals": self.by_tenant(), "readings": {name: dict(each) for name, each in self._readings.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "UsageLedger":
        """Read what ``to_json`` wrote."""
        ledger = cls()
        ledger._totals = {tenant: dict(kinds) for tenant, kinds in values["totals"].items()}
        ledger._readings = {name: dict(each) for name, each in values["readings"].items()}
        return ledger
