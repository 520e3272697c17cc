"""Known components: built-in and third-party spec classes, found through entry points.

An entry point names a *spec* class; the spec names its implementation by import path. A plugin that fails to
import does not stop the others: its name is kept with the reason, and given when somebody asks for it.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from joynexus.errors import UnknownComponentError
from joynexus.specs.base import Component

Kind = Literal["backbones", "action_modules", "algorithms", "environments", "datasets"]
KINDS: tuple[Kind, ...] = ("backbones", "action_modules", "algorithms", "environments", "datasets")


@cache
def _load(kind: Kind) -> tuple[dict[str, type[Component]], dict[str, str]]:
    """Load the spec classes of one kind: those found, and the reasons of those that failed."""
    found: dict[str, type[Component]] = {}
    failed: dict[str, str] = {}
    for point in sorted(entry_points(group=f"joynexus.{kind}"), key=lambda each: each.name):
        try:
            spec = point.load()
        except Exception as error:  # noqa: BLE001  # a third party's import may raise anything
            failed[point.name] = f"{type(error).__name__}: {error}"
            continue
        if not (isinstance(spec, type) and issubclass(spec, Component)):
            failed[point.name] = f"{point.value} is not a Component spec class"
            continue
        found[point.name] = spec
    return found, failed


def component_types(kind: Kind) -> dict[str, type[Component]]:
    """Return the spec classes of one kind by their ``type``."""
    return dict(_load(kind)[0])


def failed_plugins(kind: Kind) -> dict[str, str]:
    """Return the plugins of one kind that could not be imported, with the reason."""
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
        """Build the discriminated union of what is installed."""
        classes = tuple(component_types(self.kind).values())
        if len(classes) == 1:
            return handler.generate_schema(classes[0])
        return handler.generate_schema(Annotated[Union[classes], Field(discriminator="type")])  # noqa: UP007
