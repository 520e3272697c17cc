"""Starting, finding and ending the detached actors that a service is made of.

A role outlives whoever started it. It is never restarted by Ray (``max_restarts=0``), because a fresh process has to
be told what to do: the health manager makes it anew under the same name and repeats its assignment.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from joynexus.actors import ray_calls
from joynexus.errors import JoyNexusError, ServiceError
from joynexus.specs.base import Resources

log = logging.getLogger(__name__)

GONE = (ActorDiedError, ActorUnavailableError, RayActorError)
"""What a call to a dead or dying actor raises."""
NAME_FREE_S = 15.0
"""How long a killed actor's name may stay taken."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """One actor of the service: what to start, and where."""

    name: str
    actor_class: type
    arguments: tuple[Any, ...] = ()
    resources: Resources = field(default_factory=lambda: Resources(num_cpus=0.0))
    group: PlacementGroup | None = None
    bundle: int = -1
    tenant: str | None = None
    """The tenant that fails when this role fails for good; None for the service's own roles."""
    max_restarts: int = 0
    """Only the Master lets Ray restart it: nobody else watches it."""


def start_role(role: Role, namespace: str) -> Any:  # noqa: ANN401  # Ray's handle of an unknown class
    """Start a role, or find it where it runs already.

    Args:
        role: What to start.
        namespace: Ray namespace of the service.

    Returns:
        The actor's handle; the actor may still be starting.

    Raises:
        ServiceError: If the name stays taken by a dying actor.
    """
    options: dict[str, Any] = {
        "name": role.name,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": role.resources.num_cpus,
        "num_gpus": role.resources.num_gpus,
        "max_restarts": role.max_restarts,
    }
    if role.resources.memory_bytes:
        options["memory"] = role.resources.memory_bytes
    if role.resources.custom:
        options["resources"] = role.resources.custom
    if role.group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=role.group, placement_group_bundle_index=role.bundle
        )
    deadline = time.monotonic() + NAME_FREE_S
    while True:
        try:
            return cast("Any", ray.remote(role.actor_class)).options(**options).remote(*role.arguments)
        except ValueError as error:  # the name of an actor that was just killed frees after about half a second
            if time.monotonic() > deadline:
                raise ServiceError(f"{role.name}: cannot be started: {error}. Run 'joynexus down' first.") from error
            time.sleep(0.2)


def find_role(name: str, namespace: str) -> Any:  # noqa: ANN401
    """Return the handle of a living role.

    Raises:
        ServiceError: If there is none.
    """
    try:
        return ray_calls.actor(name, namespace)
    except ValueError as error:
        raise ServiceError(f"{name}: not running in {namespace!r}. See 'joynexus status'.") from error


def end_role(name: str, namespace: str) -> bool:
    """Kill a role for good.

    Returns:
        Whether there was one.
    """
    try:
        ray.kill(ray_calls.actor(name, namespace), no_restart=True)
    except ValueError:
        return False
    return True


def unwrap(error: RayTaskError) -> Exception:
    """Return the exception that a remote method raised, as its own class where that is one of ours."""
    cause = cast("Any", error.cause)
    while isinstance(cause, RayTaskError):  # the error of a call whose answer was an argument of this one
        cause = cast("Any", cause.cause)
    return cause if isinstance(cause, JoyNexusError) else error


def first_line(error: BaseException) -> str:
    """Return an error's first line: Ray's own messages go on for many."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class RoleClient:
    """Calls a role by name, across its restarts.

    Only for methods that may be repeated: a call whose answer was lost with the actor is made again.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._namespace = namespace
        self._handle: Any = None

    def call(
        self,
        method: str,
        *arguments: Any,  # noqa: ANN401
        patience_s: float = 60.0,
        timeout_s: float = 120.0,
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call a method and wait for its answer.

        Args:
            method: Name of the method.
            arguments: Its arguments.
            patience_s: How long a dead role may take to come back.
            timeout_s: How long one call may take.
            named: Its keyword arguments.

        Returns:
            What the method returns.

        Raises:
            JoyNexusError: What the method raised, as its own class.
            ServiceError: If the role stayed away, or did not answer in time.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                handle = self._handle or find_role(self.name, self._namespace)
                self._handle = handle
                return ray.get(getattr(handle, method).remote(*arguments, **named), timeout=timeout_s)
            except RayTaskError as error:
                raise unwrap(error) from error
            except GetTimeoutError as error:
                raise ServiceError(f"{self.name}: {method} did not answer within {timeout_s:.0f} s.") from error
            except (*GONE, ServiceError) as error:
                self._handle = None
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"{self.name}: gone for {patience_s:.0f} s during {method}: {first_line(error)}"
                    ) from error
                time.sleep(0.25)
