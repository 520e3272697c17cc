"""The two base classes of every spec. Pydantic only: validating a spec needs neither torch nor Ray."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$")]
"""A name that is safe in a path, an actor name and a metric label."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number in [0, 1]."""


class Spec(BaseModel):
    """A frozen description of what to build; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Component(Spec):
    """A spec that is one variant of a kind, chosen by ``type``, and that names its implementation.

    Third parties add variants through the entry-point groups of :mod:`joynexus.specs.registry`.
    """

    implementation: ClassVar[str]
    """``package.module:Class``; imported only where the component is built."""

    type: Any
    """Which variant: a string that each subclass narrows to one literal (hence ``Any`` here)."""


class Resources(Spec):
    """What one actor asks of its node."""

    num_cpus: float = Field(default=1.0, ge=0.0)
    """Logical CPUs; may be a fraction."""
    num_gpus: float = Field(default=0.0, ge=0.0)
    """Logical GPUs; may be a fraction."""
    memory_bytes: int = Field(default=0, ge=0)
    """Host memory to reserve; 0 reserves none."""
    custom: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources, such as ``{"env": 1}``."""
