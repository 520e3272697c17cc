"""A Ray of the benchmark's own, and tenants for a service on it."""

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray

from joynexus.actors import cluster
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec
from joynexus.types import Observation, PredictRequest

STATE_DIM = 8


@contextmanager
def local_ray(spec: ServiceSpec, *, num_cpus: int) -> Generator[ServiceSpec]:
    """Start Ray; a service that is started on it ends with it.

    Yields:
        The spec of the service, with the folder that it writes to.
    """
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        cluster.start_local_ray(service=spec.service, num_cpus=num_cpus)
        try:
            yield spec.model_copy(update={"storage": spec.storage.model_copy(update={"root": Path(folder)})})
        finally:
            ray.shutdown()


def acting_tenant(name: str, *, cameras: Sequence[str], image_size: int) -> TenantSpec:
    """Describe a tenant without workloads, with a Gaussian policy on the service's backbone ``shared``."""
    policy: dict[str, Any] = {
        "backbone": "shared",
        "observation": {
            "cameras": list(cameras),
            "image_size": [image_size, image_size],
            "state_dim": STATE_DIM,
            "max_prompt_tokens": 16,
        },
        "action": {"dim": 7, "horizon": 8, "num_action_steps": 8, "normalization": "identity"},
        "action_module": {"type": "gaussian", "hidden_dim": 128, "token_dim": 16, "max_prefix_tokens": 512},
    }
    return TenantSpec.model_validate({"tenant": name, "policy": policy})


def one_row(tenant: TenantSpec, generator: np.random.Generator) -> PredictRequest:
    """Make a request of one row with noise for frames: no two share a prefix."""
    seen = tenant.policy.observation
    height, width = seen.image_size
    observation = Observation(
        images=generator.integers(0, 256, (1, len(seen.cameras), height, width, 3), dtype=np.uint8),
        image_mask=np.ones((1, len(seen.cameras)), dtype=np.bool_),
        state=generator.standard_normal((1, STATE_DIM)).astype(np.float32),
        instructions=("pick up the cube",),
    )
    return PredictRequest(tenant=tenant.tenant, observation=observation, seeds=(int(generator.integers(2**31)),))
