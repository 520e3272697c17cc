from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def tenant_data() -> Callable[..., dict[str, Any]]:
    """A valid tenant with one workload of each type, as plain values; keyword arguments replace top-level keys."""

    def make(**changes: Any) -> dict[str, Any]:
        data: dict[str, Any] = {
            "tenant": "pick-cube",
            "policy": {
                "backbone": "lite",
                "observation": {"cameras": ["base", "wrist"], "image_size": [128, 128], "state_dim": 8},
                "action": {"dim": 7, "horizon": 8, "num_action_steps": 4, "normalization": "quantile"},
                "action_module": {"type": "gaussian", "hidden_dim": 64},
            },
            "workloads": [
                {
                    "type": "sft",
                    "dataset": {"type": "maniskill_h5", "path": "demos/pick.h5"},
                    "num_steps": 5,
                    "batch_size": 4,
                },
                {
                    "type": "rl",
                    "algorithm": {"type": "ppo"},
                    "environment": {"type": "maniskill", "task": "PickCube-v1"},
                    "num_iterations": 2,
                },
                {"type": "evaluation", "environment": {"type": "maniskill", "task": "PickCube-v1"}},
            ],
        }
        return {**data, **changes}

    return make
