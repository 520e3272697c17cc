"""joynexus: multi-tenant post-training of Vision-Language-Action policies on Ray."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joynexus.api import Future, Run, Service, Tenant, connect, start

__all__ = ["Future", "Run", "Service", "Tenant", "connect", "start"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Load the API when it is first used: validating a spec must need neither torch nor Ray."""
    if name in __all__:
        from joynexus import api  # noqa: PLC0415

        return getattr(api, name)
    raise AttributeError(f"module 'joynexus' has no attribute {name!r}")
