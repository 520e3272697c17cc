"""Specs of small tenants and of their service, and what the tests of a live one ask again and again."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from joynexus.specs.algorithm import PpoSpec
from joynexus.specs.base import Resources
from joynexus.specs.environment import GymSpec
from joynexus.specs.service import HealthSpec, InferenceSpec, ServiceSpec, TrainingSpec
from joynexus.specs.tenant import EvaluationSpec, RlSpec, RolloutSpec, TenantSpec
from joynexus.testing.fakes import COUNTER
from joynexus.testing.tiny import TINY_SMOLVLM

SLIVER = Resources(num_cpus=0.1)
SERVICE = ServiceSpec(
    service="test",
    backbones={"tiny": TINY_SMOLVLM},
    training=TrainingSpec(resources=SLIVER, slots=4),
    inference=InferenceSpec(resources=SLIVER),
    health=HealthSpec(period_s=0.3, timeout_s=10.0, stall_s=60.0),
)


def counter(*, num_envs: int = 1, **kwargs: Any) -> GymSpec:
    """A counting environment that ends with success after 12 steps, unless told otherwise."""
    return GymSpec(type="gym", id=COUNTER, num_envs=num_envs, resources=SLIVER, kwargs={"terminate_at": 12, **kwargs})


def rl_workload(*, iterations: int = 3, episodes: int = 4, environment: GymSpec | None = None) -> RlSpec:
    """A few PPO updates on the counting environment."""
    return RlSpec(
        algorithm=PpoSpec(type="ppo", num_epochs=2, minibatch_size=8),
        environment=environment or counter(num_envs=2),
        rollout=RolloutSpec(episodes_per_iteration=episodes),
        num_iterations=iterations,
    )


def evaluation_workload(*, episodes: int = 4, environment: GymSpec | None = None, **fields: Any) -> EvaluationSpec:
    """A few episodes of the counting environment."""
    return EvaluationSpec(environment=environment or counter(num_envs=2), num_episodes=episodes, **fields)


def tenant_spec(name: str, *workloads: Any, **changes: Any) -> TenantSpec:
    """A tenant with a Gaussian policy on the tiny backbone."""
    policy = {
        "backbone": "tiny",
        "observation": {"cameras": [], "state_dim": 4, "max_prompt_tokens": 32},
        "action": {"dim": 1, "horizon": 4, "num_action_steps": 4, "normalization": "identity"},
        "action_module": {"type": "gaussian", "hidden_dim": 16, "token_dim": 4},
    }
    for path, value in changes.pop("policy", {}).items():
        policy[path] = {**policy.get(path, {}), **value} if isinstance(value, dict) else value
    loads = [each.model_dump(mode="json") for each in workloads]
    return TenantSpec.model_validate({"tenant": name, "policy": policy, "workloads": loads, **changes})


def wait_until(reached: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
    """Wait for something to become true, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = reached()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def leftovers(tenant: str) -> list[str]:
    """Living actors and placement groups that bear a tenant's name."""
    actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    groups = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
    return [name for name in [*actors, *groups] if f":{tenant}:" in f":{name}:"]
