"""Reaching a Ray cluster, or starting one for this process alone."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray import serve

from joynexus.actors import names, ray_calls
from joynexus.actors.master import Master
from joynexus.actors.roles import Role, RoleClient, end_role, first_line, start_role
from joynexus.errors import ServiceError
from joynexus.specs.service import ServiceSpec

NAMESPACE_PREFIX = names.namespace("")
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # where Ray itself writes it
"""Address of the cluster that ``ray start`` last started on this machine."""
BRING_UP_S = 600.0
"""How long a service may take to come up: loading a backbone may be slow."""


def prepare_environment() -> None:
    """Choose what Ray would otherwise choose by itself, before it is started.

    A local Ray would switch its token authentication on and write a token into the home folder. The operator's own
    choice (``RAY_AUTH_MODE``) is left as it is.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def connect_ray(*, service: str, address: str | None = None) -> bool:
    """Connect to a running Ray cluster.

    Args:
        service: Whose namespace to enter.
        address: Ray's address; None takes that of :func:`find_cluster`.

    Returns:
        False if there is none.
    """
    prepare_environment()
    if ray.is_initialized():
        return True
    found = address or find_cluster()
    if found is None:
        return False
    try:
        ray.init(address=found, namespace=names.namespace(service), **_quiet())
    except ConnectionError:
        return False
    return True


def find_cluster() -> str | None:
    """Return the address of the cluster to use: ``RAY_ADDRESS``, or what ``ray start`` last started on this machine.

    A Ray that another program started for itself alone is never taken, although Ray's own ``auto`` would.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    try:
        address = CURRENT_CLUSTER.read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2.0):
            return address
    except (OSError, ValueError):
        return None


def start_local_ray(*, service: str, num_cpus: int | None = None) -> None:
    """Start a Ray of this process's own, that ends with the process.

    Raises:
        ServiceError: If Ray does not start; it gives its own processes half a minute.
    """
    prepare_environment()
    try:
        ray.init(
            address="local",
            namespace=names.namespace(service),
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=512 << 20,
            _node_ip_address="127.0.0.1",
            **_quiet(),
        )
    except Exception as error:  # Ray raises the bare class
        raise ServiceError(
            f"a local Ray did not start: {first_line(error)} Is this machine overloaded? Try again."
        ) from error


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR}


def start_service(spec: ServiceSpec, root: Path, *, lifeline: str | None = None) -> RoleClient:
    """Start a service on the connected cluster, or find it, and wait until it is up.

    Args:
        spec: The service.
        root: Folder of its state and, by default, its runs.
        lifeline: Of the driver that it belongs to; None lets it outlive this process.

    Returns:
        The Master.

    Raises:
        JoyNexusError: Why it can't be brought up; what was started is taken down again.
    """
    spec = spec.model_copy(update={"storage": spec.storage.model_copy(update={"root": root})})
    namespace = names.namespace(spec.service)
    arguments = (spec.model_dump_json(), str(root), lifeline)
    role = Role(name=names.MASTER, actor_class=Master, arguments=arguments, max_restarts=-1)
    start_role(role, namespace)
    master = RoleClient(names.MASTER, namespace)
    try:
        master.call("wait_ready", BRING_UP_S, timeout_s=BRING_UP_S + 30)
    except BaseException:
        stop_service(spec.service)
        raise
    _find_serve()
    return master


def _find_serve() -> None:
    """Let this process forget the Serve of a Ray that it was connected to before; Serve itself does not notice."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it would say that it found what it was asked to find
    serve.start(proxy_location="Disabled")


def find_service(service: str | None = None, *, is_shared: bool = False) -> str:
    """Return the name of the running service.

    Args:
        service: The name, if it is known; None takes the only one, or the only one that no run started for itself.
        is_shared: Pass over services that a run has started for itself alone, and that end with it.

    Raises:
        ServiceError: If none runs, or several do and none was named.
    """
    running = sorted(
        namespace.removeprefix(NAMESPACE_PREFIX)
        for namespace, name in ray_calls.named_actors()
        if name == names.MASTER and namespace.startswith(NAMESPACE_PREFIX)
    )
    if is_shared or (service is None and len(running) > 1):
        shared = [each for each in running if _is_shared(each)]
        running = shared if is_shared else shared or running
    if service in running or (service is None and len(running) == 1):
        return service or running[0]
    if not running:
        raise ServiceError("no joynexus service runs on this cluster. Start one with 'joynexus up'.")
    wanted = "several services run" if service is None else f"service {service!r} does not run"
    raise ServiceError(f"{wanted}: running are {running}. Name one of them.")


def _is_shared(service: str) -> bool:
    try:
        master = RoleClient(names.MASTER, names.namespace(service))
        return master.call("ping", patience_s=0.0, timeout_s=10.0)["lifeline"] is None
    except ServiceError:
        return False  # it has just ended


def stop_service(service: str) -> None:
    """Stop a service: its tenants, its roles, and the Master at last."""
    namespace = names.namespace(service)
    master = RoleClient(names.MASTER, namespace)
    try:
        master.call("shut_down", patience_s=5.0, timeout_s=180.0)
    except ServiceError:
        logging.getLogger(__name__).warning("the Master did not shut down by itself")
    end_role(names.MASTER, namespace)
