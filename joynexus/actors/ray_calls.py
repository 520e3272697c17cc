"""The few calls of Ray whose types Ray itself does not tell, told once.

A handle is ``Any`` on purpose: Ray makes its methods from the class while the program runs.
"""

from typing import Any, cast

import ray
from ray.util.placement_group import placement_group_table  # pyright: ignore[reportUnknownVariableType]

_table = cast("Any", placement_group_table)


def actor(name: str, namespace: str) -> Any:  # noqa: ANN401
    """Return the handle of a living named actor.

    Raises:
        ValueError: If there is none.
    """
    return cast("Any", ray.get_actor(name, namespace=namespace))


def is_ready(reference: Any) -> bool:  # noqa: ANN401
    """Whether an answer is there."""
    ready = cast("list[Any]", cast("Any", ray).wait([reference], timeout=0)[0])
    return bool(ready)


def pending(references: list[Any], timeout_s: float) -> list[Any]:
    """Wait until every answer is there, or for the given time; return the references of those that are not."""
    if not references:
        return []
    return list(cast("Any", ray).wait(references, num_returns=len(references), timeout=timeout_s)[1])


def named_actors() -> list[tuple[str, str]]:
    """Namespace and name of every living named actor of the cluster."""
    found = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
    return [(each["namespace"], each["name"]) for each in found]


def group_states() -> dict[str, str]:
    """State of every placement group that is not removed, by name."""
    table = cast("dict[str, dict[str, Any]]", _table())
    return {str(each["name"]): str(each["state"]) for each in table.values() if each["state"] != "REMOVED"}


def scheduling_state(group: Any) -> str:  # noqa: ANN401
    """Why a placement group is not ready: ``INFEASIBLE``, ``NO_RESOURCES``, ..."""
    return str(_table(group)["stats"]["scheduling_state"])


def living_nodes() -> list[tuple[str, dict[str, float]]]:
    """Address and total resources of every living node."""
    nodes = cast("list[dict[str, Any]]", cast("Any", ray).nodes())
    return [(str(each["NodeManagerAddress"]), dict(each["Resources"])) for each in nodes if each["Alive"]]
