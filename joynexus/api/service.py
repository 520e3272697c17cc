"""A running service, seen from a driver in the cluster."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray

from joynexus.actors import cluster, names
from joynexus.actors.roles import RoleClient
from joynexus.api.tenant import Run, Tenant
from joynexus.observability.group_log import GroupColumns
from joynexus.specs.loading import load_service, load_tenant
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec


def connect(service: str | None = None, *, address: str | None = None) -> "Service":
    """Connect to the running service.

    Args:
        service: Its name; None takes the only one.
        address: Ray's address; None takes ``RAY_ADDRESS`` or the cluster of this machine.

    Raises:
        ServiceError: If no cluster or no service runs, or several services do and none was named.
    """
    if not cluster.connect_ray(service=service or "client", address=address):
        raise cluster.ServiceError("no Ray cluster runs here. Start one with 'joynexus up', or set RAY_ADDRESS.")
    return Service(cluster.find_service(service))


def start(spec: ServiceSpec | str | Path, *, root: str | Path | None = None, num_cpus: int | None = None) -> "Service":
    """Start a service on the running Ray cluster, or on a local one of this process's own.

    Args:
        spec: A service, or the file that describes it.
        root: Folder of its state and runs; None takes the spec's ``storage.root``.
        num_cpus: Logical CPUs of a local Ray; None takes the machine's.

    Returns:
        The service, up.

    Raises:
        JoyNexusError: Why it can't be brought up.
    """
    loaded = spec if isinstance(spec, ServiceSpec) else load_service(Path(spec))
    found = "RAY_ADDRESS" in os.environ or ray.is_initialized()
    if not (found and cluster.connect_ray(service=loaded.service)):
        cluster.start_local_ray(service=loaded.service, num_cpus=num_cpus)
    cluster.start_service(loaded, Path(root or loaded.storage.root).resolve())
    return Service(loaded.service)


class Service:
    """A handle on a running service; cheap, and safe to make again anywhere in the cluster."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.namespace = names.namespace(name)
        self.master = RoleClient(names.MASTER, self.namespace)
        self.spec = ServiceSpec.model_validate_json(self.master.call("wait_ready", 600.0, timeout_s=630.0))
        self.root = Path(self.master.call("ping")["root"])

    def submit(
        self, spec: TenantSpec | str | Path, *, folder: str | Path | None = None, lifeline: str | None = None
    ) -> Run:
        """Submit a tenant.

        Args:
            spec: A tenant, or the file that describes it.
            folder: Where everything of it is written; None makes one under the service's root.
            lifeline: Stop it when the driver that holds this lifeline (:mod:`joynexus.actors.lifeline`) is gone.

        Returns:
            The tenant's run; without a lifeline it goes on whether anybody waits or not.

        Raises:
            SpecError: If the spec is wrong.
            AdmissionError: If the service can't hold the tenant.
        """
        loaded = spec if isinstance(spec, TenantSpec) else load_tenant(Path(spec))
        where = Path(folder or self.root / _run_name() / loaded.tenant).resolve()
        self.master.call("submit", loaded.model_dump_json(), str(where), lifeline, timeout_s=660.0)
        return Run(self, loaded.tenant)

    def open(
        self, spec: TenantSpec | str | Path, *, folder: str | Path | None = None, timeout_s: float = 600.0
    ) -> Tenant:
        """Submit a tenant without workloads, and wait until its slot is open and its version 0 is served.

        Raises:
            JoyNexusError: Why it can't be opened.
        """
        run = self.submit(spec, folder=folder)
        run.wait_until_running(timeout_s)
        return run.tenant

    def tenant(self, name: str) -> Tenant:
        """A living tenant by name."""
        return Tenant(self, TenantSpec.model_validate_json(self.master.call("spec_of", name)))

    def run(self, name: str) -> Run:
        """A tenant's run by name."""
        return Run(self, name)

    def status(self) -> dict[str, dict[str, Any]]:
        """Every tenant's state, progress and charge."""
        return self.master.call("status")

    def usage(self, *, fresh: bool = False) -> dict[str, Any]:
        """What the engines did and for whom, by backbone, and then for ``training`` and ``inference``.

        Args:
            fresh: Up to this moment, in place of up to some seconds ago; takes up to some seconds.
        """
        return self.master.call("usage", fresh=fresh)

    def groups(self) -> dict[str, dict[str, GroupColumns]]:
        """The groups that went through the engines together; keys as in :meth:`usage`."""
        return self.master.call("groups")

    def stop(self, tenant: str) -> str:
        """Stop a tenant, wait until nothing of it is left, and return its final status."""
        return self.master.call("stop", tenant, timeout_s=180.0)

    def request_stop(self, tenant: str) -> None:
        """Ask a tenant to stop, and do not wait for it."""
        self.master.call("request_stop", tenant, timeout_s=30.0)

    def shut_down(self) -> None:
        """Stop every tenant and end the service."""
        cluster.stop_service(self.name)


def _run_name() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
