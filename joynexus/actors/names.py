"""What the service's actors, placement groups and Serve applications are called.

Every role is a detached, named actor in one Ray namespace per service, so that any process finds it again after the
one that made it is gone.
"""

MASTER = "master"
POLICY_STORE = "policy-store"


def namespace(service: str) -> str:
    """Ray namespace of a service."""
    return f"joynexus-{service}"


def trainer(backbone: str) -> str:
    """TrainingActor of a backbone."""
    return f"trainer:{backbone}"


def queue(backbone: str) -> str:
    """Training queue of a backbone."""
    return f"queue:{backbone}"


def producer(tenant: str) -> str:
    """DataProducer of a tenant."""
    return f"producer:{tenant}"


def environment(tenant: str, index: int) -> str:
    """EnvironmentActor ``index`` of a tenant."""
    return f"environment:{tenant}:{index}"


def api_lane(tenant: str) -> str:
    """Lane of what a tenant's own driver puts, apart from the lane that its workloads learn from."""
    return f"{tenant}:api"


def application(service: str, backbone: str) -> str:
    """Serve application that holds a backbone's replicas."""
    return f"joynexus-{service}-{backbone}"


def service_group(service: str, backbone: str) -> str:
    """Placement group of a backbone's trainer and queue."""
    return f"joynexus-{service}:{backbone}"


def tenant_group(service: str, tenant: str) -> str:
    """Placement group of a tenant's producer and environments."""
    return f"joynexus-{service}:tenant:{tenant}"


LOGS = "logs"
"""Folder below the service's root that all its processes log into."""
DEPLOYMENT = "inference"
"""Name of the Serve deployment in its application."""
