"""From a plan to placement groups, with a clear refusal in place of a hang."""

from collections.abc import Sequence

import ray
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from joynexus.actors import ray_calls
from joynexus.errors import PlacementError
from joynexus.scheduling.placement import NodeResources, check_bundles, service_bundles
from joynexus.specs.base import Resources
from joynexus.specs.service import ServiceSpec


def create_group(
    name: str, bundles: Sequence[Resources], *, timeout_s: float, owner: str, strategy: str = "PACK"
) -> PlacementGroup:
    """Reserve bundles under a name, or find the group that has it.

    Args:
        name: Name of the group, unique in the namespace.
        bundles: What to reserve.
        timeout_s: How long the group may stay pending.
        owner: Who asks, for messages.
        strategy: Ray's placement strategy.

    Returns:
        The ready group; detached, so that it outlives the Master.

    Raises:
        PlacementError: If it can't be placed, naming what is needed and what is free. Nothing stays reserved.
    """
    found = find_group(name)
    if found is not None:
        return found
    check_bundles(list(bundles), cluster_nodes(), owner=owner)
    group = placement_group([as_bundle(each) for each in bundles], strategy=strategy, name=name, lifetime="detached")
    if group.wait(timeout_s):
        return group
    state = ray_calls.scheduling_state(group)
    remove_placement_group(group)
    needed = {key: sum(as_bundle(each).get(key, 0.0) for each in bundles) for key in ("CPU", "GPU")}
    free = {key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")}
    raise PlacementError(
        f"{owner}: placement group not ready after {timeout_s:.0f} s ({state}). Needed: {needed}, free: {free}. "
        "Resubmit when a tenant leaves, or add nodes."
    )


def check_service_fits(service: ServiceSpec) -> None:
    """Refuse a service whose own roles can never be placed on this cluster.

    Raises:
        PlacementError: Naming what is needed and what there is.
    """
    check_bundles(service_bundles(service), cluster_nodes(), owner=f"service {service.service!r}")


def find_group(name: str) -> PlacementGroup | None:
    """Return a living group by name."""
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def remove_group(name: str) -> bool:
    """Free a group by name; its actors have to be gone already. Returns whether there was one."""
    group = find_group(name)
    if group is None:
        return False
    remove_placement_group(group)
    return True


def as_bundle(resources: Resources) -> dict[str, float]:
    """Write resources as a Ray bundle; an empty one asks for a sliver of CPU, since Ray refuses empty bundles."""
    bundle: dict[str, float] = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    bundle["memory"] = float(resources.memory_bytes)
    kept = {key: amount for key, amount in bundle.items() if amount > 0}
    return kept or {"CPU": 0.001}


def cluster_nodes() -> list[NodeResources]:
    """Total resources of each living node."""
    return [NodeResources(name=name, total=total) for name, total in ray_calls.living_nodes()]
