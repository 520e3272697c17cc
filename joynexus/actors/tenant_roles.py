"""A tenant's own actors: where they are placed, that they are watched, and that nothing of them is left.

What the tenant's workloads declare is reserved as one placement group before anything starts (all or nothing). A role
that comes later, for a workload appended through the API, gets a group of its own. Every group's name starts with the
tenant's, so that releasing needs no list that could be lost.
"""

import logging
from collections.abc import Callable
from typing import Any

from joynexus.actors import names, ray_calls
from joynexus.actors.environment import EnvironmentActor
from joynexus.actors.health import HealthManager
from joynexus.actors.placement import create_group, remove_group
from joynexus.actors.producer import DataProducer
from joynexus.actors.roles import Role, RoleClient, end_role
from joynexus.errors import JoyNexusError
from joynexus.scheduling.plan import TenantPlan
from joynexus.specs.base import Resources
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec

log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long a worker may take to end its simulators before it is killed with them."""


class TenantRoles:
    """Starts, watches and ends the actors of one tenant."""

    def __init__(
        self, spec: TenantSpec, plan: TenantPlan, service: ServiceSpec, namespace: str, health: HealthManager
    ) -> None:
        self._spec = spec
        self._service = service
        self._namespace = namespace
        self._health = health
        self._group = names.tenant_group(service.service, spec.tenant)
        self._bundles = {each.role: each.resources for each in plan.bundles}
        self._elastic = {each.role: each.resources for each in plan.elastic}

    def reserve(self) -> None:
        """Reserve all that the declared workloads need.

        Raises:
            PlacementError: If it does not fit; nothing stays reserved.
        """
        if self._bundles:
            self._create(self._group, list(self._bundles.values()))

    def _create(self, name: str, bundles: list[Resources]) -> Any:  # noqa: ANN401
        timeout_s = self._service.placement_timeout_s
        return create_group(name, bundles, timeout_s=timeout_s, owner=self._spec.tenant)

    def producer(self, restore: Callable[[RoleClient], None]) -> RoleClient:
        """Start the DataProducer, or find it."""
        return self._start(names.producer(self._spec.tenant), DataProducer, Resources(num_cpus=0.2), restore)

    def worker(self, index: int, restore: Callable[[RoleClient], None]) -> RoleClient:
        """Start EnvironmentActor ``index``, or find it."""
        name = names.environment(self._spec.tenant, index)
        return self._start(name, EnvironmentActor, Resources(num_cpus=0.2), restore, index)

    def _start(
        self,
        name: str,
        actor_class: type,
        default: Resources,
        restore: Callable[[RoleClient], None],
        *arguments: Any,  # noqa: ANN401
    ) -> RoleClient:
        if name in self._bundles:
            group, bundle = self._create(self._group, list(self._bundles.values())), list(self._bundles).index(name)
            resources = self._bundles[name]
        else:
            resources = self._elastic.get(name, default)
            group, bundle = self._create(f"{self._group}:{name}", [resources]), 0
        role = Role(
            name=name,
            actor_class=actor_class,
            arguments=(self._service.model_dump_json(), self._spec.model_dump_json(), *arguments),
            resources=resources,
            group=group,
            bundle=bundle,
            tenant=self._spec.tenant,
        )
        client = RoleClient(name, self._namespace)
        self._health.watch(role, lambda: restore(client))
        return client

    def release(self) -> None:
        """End every actor and free every group of the tenant; actors first, or their group would never go."""
        for name in self._living():
            self._health.unwatch(name, end=False)
            if not name.startswith(names.producer("")):
                self._close(name)
            end_role(name, self._namespace)
        for name in ray_calls.group_states():
            if name == self._group or name.startswith(f"{self._group}:"):
                remove_group(name)

    def _living(self) -> list[str]:
        prefixes = (names.producer(self._spec.tenant), f"{names.environment(self._spec.tenant, 0)[:-1]}")
        mine = [name for namespace, name in ray_calls.named_actors() if namespace == self._namespace]
        return [name for name in mine if name == prefixes[0] or name.startswith(prefixes[1])]

    def _close(self, name: str) -> None:
        """Let a worker end its simulators; one that is dead or hung takes them with it when it is killed."""
        try:
            RoleClient(name, self._namespace).call("close", patience_s=0.0, timeout_s=CLOSE_S)
        except JoyNexusError as error:
            log.info("%s did not close: %s", name, error)
