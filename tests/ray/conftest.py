"""One small Ray and one service for all tests of a module."""

from collections.abc import Iterator

import pytest
import ray
from ray_world import SERVICE

import joynexus
from joynexus.actors import cluster
from joynexus.api import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with one tiny backbone, on a Ray of its own."""
    cluster.start_local_ray(service=SERVICE.service, num_cpus=2)
    try:
        yield joynexus.start(SERVICE, root=tmp_path_factory.mktemp("root"))
    finally:
        if ray.is_initialized():
            cluster.stop_service(SERVICE.service)
            ray.shutdown()
