"""Pydantic's validation errors as lines that a user can act on.

``file: policy.observation.camras: unknown key. Did you mean 'cameras'?``: the path is the one that the user wrote
(pydantic's own also holds the tags of unions), the found value is shown, and each line ends with what to do.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from joynexus.specs.base import Spec
from joynexus.specs.registry import Kind, OneOf, component_types, failed_plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecProblems:
    """What is wrong with one document."""

    lines: tuple[str, ...]
    """One per problem, without the name of the file."""
    has_unknown_component: bool
    """Whether a ``type`` is not registered."""


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``; None where none is like it."""
    names, given = sorted(known), str(name)
    matches = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if not matches and len(given) >= 3:  # noqa: PLR2004  # shorter beginnings fit too much
        matches = [each for each in names if each.startswith(given)]
    return matches[0] if matches else None


def suggest(name: object, known: Iterable[str]) -> str:
    """Return ``Did you mean 'x'?``, or the known names where none is like ``name``."""
    names = sorted(known)
    match = nearest(name, names)
    return f"Did you mean {match!r}?" if match else f"Known: {', '.join(names)}."


def describe_errors(error: ValidationError, root: type[Spec]) -> SpecProblems:
    """Rewrite the errors of one document.

    Args:
        error: What pydantic raised.
        root: The spec class that was validated.

    Returns:
        One line per problem, in pydantic's order.
    """
    found = [(_locate(root, each["loc"]), each) for each in error.errors(include_url=False)]
    misspelt = {
        f"{place.parent}.{match}"
        for place, each in found
        if each["type"] == "extra_forbidden" and (match := nearest(each["loc"][-1], place.siblings))
    }
    lines: list[str] = []
    for place, each in found:
        # A misspelt required key is one mistake: the line about the unknown key says it.
        if each["type"] == "missing" and f"{place.parent}.{each['loc'][-1]}" in misspelt:
            continue
        path = f"{place.path}.type" if each["type"].startswith("union_tag") else place.path
        text = _TEXTS.get(each["type"], _other)(place, each)
        lines.append(f"{path}: {text}" if path else text)
    unknown = any(each["type"] == "union_tag_invalid" and place.variants.kind for place, each in found)
    return SpecProblems(lines=tuple(lines), has_unknown_component=unknown)


@dataclass(frozen=True, slots=True)
class _Variants:
    """The choices of a union on ``type``."""

    classes: Mapping[str, type[Spec]]
    kind: Kind | None = None
    """Set where plugins can add to it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an error is, in the words of the document."""

    path: str
    parent: str
    """Path of the mapping that holds it."""
    field: FieldInfo | None
    """The field itself, where it exists."""
    siblings: tuple[str, ...]
    """Keys that the mapping may have."""
    variants: _Variants


def _locate(root: type[Spec], location: Sequence[int | str]) -> _Place:
    """Follow an error's location through the spec classes, leaving out the tags of unions."""
    kind_of: Any = root
    variants, field = _Variants({}), None
    path, parent, siblings = "", "", ()
    for part in location:
        if variants.classes:  # the part is a tag: it chooses the class and is no key
            kind_of, variants = variants.classes.get(str(part)), _Variants({})
            continue
        parent, field, siblings = path, None, ()
        path = f"{path}[{part}]" if isinstance(part, int) else f"{path}.{part}".removeprefix(".")
        if isinstance(kind_of, type) and issubclass(kind_of, Spec):
            siblings = tuple(kind_of.model_fields)
            field = kind_of.model_fields.get(str(part))
            kind_of = field.annotation if field else None
            variants = _variants(kind_of, field.metadata if field else ())
        else:
            kind_of = _element(kind_of, part)
            variants = _variants(*_unwrap(kind_of))
    return _Place(path, parent, field, siblings, variants)


def _unwrap(annotation: Any) -> tuple[Any, Sequence[Any]]:  # noqa: ANN401  # a type form
    if hasattr(annotation, "__metadata__"):
        return get_args(annotation)[0], annotation.__metadata__
    return annotation, ()


def _element(annotation: Any, part: int | str) -> Any:  # noqa: ANN401  # a type form
    """Return the type of one element of a tuple, a list or a mapping."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list) and args and isinstance(part, int):
        is_uniform = origin is list or args[-1] is ...
        return args[0] if is_uniform else args[min(part, len(args) - 1)]
    return args[1] if origin is dict else None


def _variants(annotation: Any, metadata: Sequence[Any]) -> _Variants:  # noqa: ANN401  # a type form
    for each in metadata:
        if isinstance(each, OneOf):
            return _Variants(component_types(each.kind), each.kind)
    if any(isinstance(each, FieldInfo) and each.discriminator == "type" for each in metadata):
        classes = [each for each in get_args(annotation) if issubclass(each, Spec)]
        return _Variants({each.model_fields["type"].default: each for each in classes})
    return _Variants({})


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004  # characters of a readable line


def _missing(place: _Place, error: ErrorDetails) -> str:
    meaning = (place.field.description or "").partition("\n")[0] if place.field else ""
    return f"missing. Add it: {meaning}" if meaning else "missing. Add it."


def _extra(place: _Place, error: ErrorDetails) -> str:
    return f"unknown key. {suggest(error['loc'][-1], place.siblings)}"


def _unknown_type(place: _Place, error: ErrorDetails) -> str:
    context: dict[str, Any] = error.get("ctx", {})
    found = context.get("tag")
    known = sorted(place.variants.classes)
    match = nearest(found, known)
    parts = [
        f"unknown type {_shown(found)}.",
        f"Did you mean {match!r}?" if match else "",
        f"Known: {', '.join(known)}.",
    ]
    failed = failed_plugins(place.variants.kind) if place.variants.kind else {}
    if failed:
        reasons = "; ".join(f"{name} ({' '.join(reason.split())})" for name, reason in failed.items())
        parts.append(f"Plugins that failed to load: {reasons}.")
    return " ".join(each for each in parts if each)


def _missing_type(place: _Place, error: ErrorDetails) -> str:
    return f"missing. Add one of: {', '.join(sorted(place.variants.classes))}."


def _literal(place: _Place, error: ErrorDetails) -> str:
    choices = [str(each) for each in get_args(place.field.annotation)] if place.field else []
    match = nearest(error["input"], choices)
    remedy = f"Did you mean {match!r}?" if match else "Take one of them."
    return f"must be {error.get('ctx', {}).get('expected', '')}, found {_shown(error['input'])}. {remedy}"


def _must_be(what: str, remedy: str) -> Callable[[_Place, ErrorDetails], str]:
    def text(place: _Place, error: ErrorDetails) -> str:
        limits = {name: _number(value) for name, value in error.get("ctx", {}).items()}
        return f"must be {what.format(**limits)}, found {_shown(error['input'])}. {remedy}"

    return text


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _own_words(place: _Place, error: ErrorDetails) -> str:
    """Messages of our own validators, and of whatever pydantic says that is not rewritten below."""
    text = error["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{text}." if ". " in text else f"{text}. Correct one of them."


def _other(place: _Place, error: ErrorDetails) -> str:
    text = error["msg"][:1].lower() + error["msg"][1:].rstrip(".")
    return f"{text}, found {_shown(error['input'])}. Correct the value."


_WHOLE = _must_be("a whole number", "Write digits alone.")
_REAL = _must_be("a number", "Write a number, such as 0.001 or 3e-4.")
_MAPPING = _must_be("a mapping", "Write 'key: value' pairs beneath it.")
_LIST = _must_be("a list", "Write [a, b] or lines that begin with '-'.")
_TRUTH = _must_be("true or false", "Write true or false.")
_STRING = _must_be("text", "Put it in quotes.")
_TEXTS: dict[str, Callable[[_Place, ErrorDetails], str]] = {
    "missing": _missing,
    "extra_forbidden": _extra,
    "union_tag_invalid": _unknown_type,
    "union_tag_not_found": _missing_type,
    "literal_error": _literal,
    "value_error": _own_words,
    "greater_than": _must_be("more than {gt}", "Raise it."),
    "greater_than_equal": _must_be("at least {ge}", "Raise it."),
    "less_than": _must_be("less than {lt}", "Lower it."),
    "less_than_equal": _must_be("at most {le}", "Lower it."),
    "string_pattern_mismatch": _must_be(
        "a name of 1 to 63 lower-case letters, digits, '-' and '_', with a letter or digit at both ends", "Rename it."
    ),
    "finite_number": _must_be("a finite number", "Write a finite one."),
    "too_short": _must_be("of length {min_length} or more", "Add what is missing."),
    "too_long": _must_be("of length {max_length} or less", "Shorten it."),
    "string_type": _STRING,
    "path_type": _STRING,
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), _REAL),
    **dict.fromkeys(("bool_type", "bool_parsing"), _TRUTH),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "dict_attributes_type"), _MAPPING),
    **dict.fromkeys(("tuple_type", "list_type"), _LIST),
}
