"""Known components: built-in and third-party spec classes, found through entry points.

An entry point names a *spec* class; the spec names its implementation by import path. A plugin that fails to
import, or whose spec class cannot be used, does not stop the others: its name is kept with the reason, and given
when somebody asks for it.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from joynexus.errors import UnknownComponentError
from joynexus.specs.base import Component

Kind = Literal["backbones", "action_modules", "algorithms", "environments", "datasets"]
KINDS: tuple[Kind, ...] = ("backbones", "action_modules", "algorithms", "environments", "datasets")

_BASES: dict[Kind, str] = {
    "backbones": "joynexus.specs.backbone:BackboneSpec",
    "action_modules": "joynexus.specs.action_module:ActionModuleSpec",
    "algorithms": "joynexus.specs.algorithm:AlgorithmSpec",
    "environments": "joynexus.specs.environment:EnvironmentSpec",
    "datasets": "joynexus.specs.data:DatasetSpec",
}
"""By import path, because the modules of the bases import this one."""


@cache
def _load(kind: Kind) -> tuple[dict[str, type[Component]], dict[str, str]]:
    """Load the spec classes of one kind: those found, and the reasons of those that failed."""
    found: dict[str, type[Component]] = {}
    failed: dict[str, str] = {}
    for point in _ordered(kind):
        try:
            spec = _checked(point.load(), point.name, kind)
        except Exception as error:  # noqa: BLE001  # a third party's import may raise anything
            failed[point.name] = f"{type(error).__name__}: {error}"
            continue
        if point.name in found:
            failed[f"{point.name} ({point.value})"] = "another component already has this name"
            continue
        found[point.name] = spec
    return found, failed


def _ordered(kind: Kind) -> Iterator[EntryPoint]:
    """Yield joynexus' own entry points first, so that a plugin can't take over a built-in name."""
    points = [*entry_points(group=f"joynexus.{kind}")]
    if not any(point.value.startswith("joynexus.") for point in points):
        points += _of_checkout(kind)
    yield from sorted(points, key=lambda each: (not each.value.startswith("joynexus."), each.name, each.value))


def _of_checkout(kind: Kind) -> list[EntryPoint]:
    """Read the built-in entry points where the package is used from a checkout that is not installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if not project.is_file():
        return []
    groups = tomllib.loads(project.read_text()).get("project", {}).get("entry-points", {})
    group = f"joynexus.{kind}"
    return [EntryPoint(name=name, value=value, group=group) for name, value in groups.get(group, {}).items()]


def _checked(spec: object, name: str, kind: Kind) -> type[Component]:
    module, _, base_name = _BASES[kind].partition(":")
    base = getattr(import_module(module), base_name)
    if not (isinstance(spec, type) and issubclass(spec, Component) and issubclass(spec, base)):
        raise TypeError(f"{spec!r} is not a subclass of {_BASES[kind]}")
    if get_args(spec.model_fields["type"].annotation) != (name,):
        raise TypeError(f"{spec.__name__}.type is not Literal[{name!r}], the entry point's name")
    spec.model_rebuild()  # raises here, not in the middle of the union, where the class is incomplete
    return spec


def component_types(kind: Kind) -> dict[str, type[Component]]:
    """Return the spec classes of one kind by their ``type``."""
    return dict(_load(kind)[0])


def failed_plugins(kind: Kind) -> dict[str, str]:
    """Return the plugins of one kind that could not be used, with the reason."""
    return dict(_load(kind)[1])


def load_implementation(spec: Component) -> Any:  # noqa: ANN401  # whatever the import path names
    """Import what a spec describes.

    Args:
        spec: Any component spec.

    Returns:
        The class or function that ``spec.implementation`` names.

    Raises:
        UnknownComponentError: If the module or the name in it can't be imported.
    """
    module_name, _, attribute = type(spec).implementation.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        message = (
            f"{spec.type}: cannot import {type(spec).implementation!r}: {error}. "
            "Install the extra that provides it, such as joynexus[all]."
        )
        raise UnknownComponentError(message) from error


@dataclass(frozen=True)
class OneOf:
    """Annotation marker: a field that takes any registered spec of a kind, told apart by ``type``."""

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Build the discriminated union of what is installed; ``type`` is required even where there is one choice."""
        choices = {name: handler.generate_schema(spec) for name, spec in component_types(self.kind).items()}
        if not choices:
            raise UnknownComponentError(
                f"joynexus.{self.kind}: no component is registered. Install the package: entry points name them."
            )
        return core_schema.tagged_union_schema(choices, discriminator="type")
