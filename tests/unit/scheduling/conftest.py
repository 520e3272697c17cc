from collections.abc import Callable
from typing import Any

import pytest

from joynexus.specs.loading import parse_service, parse_tenant
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec

ENVIRONMENT = {"type": "maniskill", "task": "PickCube-v1"}


@pytest.fixture
def make_tenant() -> Callable[..., TenantSpec]:
    """A tenant by name, with its workloads; keyword arguments change its observation or its policy."""

    def make(
        name: str = "alice", *workloads: dict[str, Any], policy: dict[str, Any] | None = None, **observation: Any
    ) -> TenantSpec:
        data = {
            "tenant": name,
            "policy": {
                "backbone": "lite",
                "observation": {"cameras": ["base"], "image_size": [64, 64], "state_dim": 8, **observation},
                "action": {"dim": 7, "horizon": 8, "num_action_steps": 4, "normalization": "identity"},
                "action_module": {"type": "gaussian", "hidden_dim": 64},
                **(policy or {}),
            },
            "workloads": list(workloads),
        }
        return parse_tenant(data, "test")

    return make


@pytest.fixture
def make_service() -> Callable[..., ServiceSpec]:
    """A service with the backbone 'lite'; keyword arguments replace top-level keys."""

    def make(**changes: Any) -> ServiceSpec:
        return parse_service({"backbones": {"lite": {"type": "lite"}}, **changes}, "test")

    return make


@pytest.fixture
def sft() -> Callable[..., dict[str, Any]]:
    def make(**changes: Any) -> dict[str, Any]:
        dataset = {"type": "maniskill_h5", "path": "a.h5"}
        return {"type": "sft", "dataset": dataset, "num_steps": 1, "batch_size": 4, **changes}

    return make


@pytest.fixture
def rl() -> Callable[..., dict[str, Any]]:
    def make(minimum: int = 1, maximum: int = 1, **resources: Any) -> dict[str, Any]:
        return {
            "type": "rl",
            "algorithm": {"type": "ppo"},
            "environment": {**ENVIRONMENT, "resources": resources},
            "rollout": {"min_workers": minimum, "max_workers": maximum},
            "num_iterations": 1,
        }

    return make


@pytest.fixture
def evaluation() -> Callable[..., dict[str, Any]]:
    def make(workers: int = 1, **resources: Any) -> dict[str, Any]:
        return {"type": "evaluation", "environment": {**ENVIRONMENT, "resources": resources}, "num_workers": workers}

    return make
