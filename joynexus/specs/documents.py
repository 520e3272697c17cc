"""YAML in and out, without its surprises.

Scalars are those of YAML 1.2 (``3e-4`` is a number; ``on`` and ``no`` are strings), keys are unique, tags are
refused, and aliases are bounded in what they expand to. Whatever is wrong is one line with line and column.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from joynexus.errors import SpecError

MAX_FILE_BYTES = 1 << 20
"""A spec is a page of text; more is a mistake or an attack."""
MAX_VALUES = 100_000
"""Values of one document after the expansion of aliases, which can be nested into billions."""

_TAG = "tag:yaml.org,2002:"
_ODD_BREAKS = frozenset("\r\x85\u2028\u2029")
_FIRST_CHARACTERS = list("+-.0123456789")
_RESOLVERS: tuple[tuple[str, str, list[str] | None], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", _FIRST_CHARACTERS),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _FIRST_CHARACTERS,
    ),
    ("merge", r"<<", ["<"]),
)


class _Composer(yaml.SafeLoader):
    """Turns text into nodes; their scalars are resolved as in YAML 1.2."""


_Composer.yaml_implicit_resolvers = {}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML version would read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape line breaks other than the usual one: unquoted, PyYAML writes them and reads spaces."""
        style = '"' if _ODD_BREAKS.intersection(text) else None
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Composer, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})\Z"), _first)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def _int(text: str) -> int:
    is_based = text[:2] in ("0o", "0x")
    return int(text, 0) if is_based else int(text.replace("_", ""))


_SCALARS: dict[str, Callable[[str], Any]] = {
    f"{_TAG}null": lambda _: None,
    f"{_TAG}bool": lambda text: text.lower() == "true",
    f"{_TAG}int": _int,
    f"{_TAG}float": _float,
    f"{_TAG}str": str,
    f"{_TAG}merge": str,
}


class _Reader:
    """Builds plain values from the nodes of one document."""

    def __init__(self) -> None:
        self._num_values = 0

    def value(self, node: yaml.Node) -> Any:  # noqa: ANN401  # any JSON value
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _problem(f"aliases expand to more than {MAX_VALUES} values", node)
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            try:
                return _SCALARS[node.tag](node.value)
            except ValueError as error:
                raise _problem(f"cannot read {node.value[:40]!r} as {node.tag.removeprefix(_TAG)}", node) from error
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(each) for each in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node)
        raise _problem(f"tag {node.tag.replace(_TAG, '!!')!r} is not allowed", node)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("a key is a list or a mapping", key_node)
            if key_node.tag == f"{_TAG}merge":
                merged = {**self._merge(value_node), **merged}
                continue
            if key_node.value in own:
                raise _problem(f"key {key_node.value!r} is given twice", key_node)
            own[key_node.value] = self.value(value_node)
        return {**merged, **own}

    def _merge(self, node: yaml.Node) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            value = self.value(source)
            if not isinstance(value, dict):
                raise _problem("'<<' merges something that is not a mapping", source)
            merged = {**cast("dict[str, Any]", value), **merged}
        return merged


def read_documents(path: Path) -> list[Any]:
    """Read every YAML document of a file, leaving out empty ones.

    Args:
        path: A text file in UTF-8.

    Returns:
        Plain values: mappings with string keys, lists, strings, numbers, booleans and None.

    Raises:
        SpecError: If the file can't be read, or is not one or more YAML documents, with line and column.
    """
    composer = None
    try:
        composer = _Composer(_read_text(path))
        documents: list[Any] = []
        while composer.check_node():
            node = composer.get_node()
            assert node is not None
            documents.append(_Reader().value(node))
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: {_describe(error)}") from error
    except RecursionError as error:
        raise SpecError(f"{path}: nested too deeply, or an alias that contains itself. Write it out.") from error
    finally:
        if composer is not None:
            composer.dispose()
    documents = [each for each in documents if each is not None]
    if not documents:
        raise SpecError(f"{path}: empty. Write a tenant (tenant, policy, workloads) or a service (backbones) in it.")
    return documents


def write_documents(documents: Iterable[Any]) -> str:
    """Write values as YAML, so that reading them gives equal values."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise SpecError(f"{path}: a folder. Give the files in it.")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SpecError(f"{path}: larger than {MAX_FILE_BYTES} bytes. A spec is a page of text; is it this file?")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise SpecError(f"{path}: no such file. Check the path.") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8, at byte {error.start}. Save it as UTF-8 text.") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from error


def _problem(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)


def _describe(error: yaml.YAMLError) -> str:
    remedy = "Correct the YAML there: indentation, colons and quotes."
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, error.problem or "not YAML"
        if "\\t" in problem:
            remedy = "Indent with spaces, not tabs."
        elif "given twice" in problem:
            remedy = "Keep one of the two."
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}. {remedy}"
    return f"{' '.join(str(error).split())}. {remedy}"
