"""One small Ray and one service for all tests of a module."""

from collections.abc import Iterator

import pytest
import ray
from ray_world import SERVICE

import joynexus
from joynexus.actors import cluster
from joynexus.api import Service
from joynexus.specs.service import ServiceSpec


@pytest.fixture(scope="module")
def service_spec() -> ServiceSpec:
    """What ``service`` runs; a module may put another one in its place."""
    return SERVICE


@pytest.fixture(scope="module")
def service(service_spec: ServiceSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with one tiny backbone, on a Ray of its own."""
    cluster.start_local_ray(service=service_spec.service, num_cpus=2)
    try:
        yield joynexus.start(service_spec, root=tmp_path_factory.mktemp("root"))
    finally:
        if ray.is_initialized():
            cluster.stop_service(service_spec.service)
            ray.shutdown()
