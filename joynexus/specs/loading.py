"""From files to specs and back.

Every error is a :class:`SpecError` of one line per problem, ``file: dotted.path: problem. remedy``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from pydantic import ValidationError

from joynexus.errors import SpecError, UnknownComponentError
from joynexus.specs.base import Spec
from joynexus.specs.documents import read_documents, write_documents
from joynexus.specs.initial_policy import check_init_from
from joynexus.specs.messages import describe_errors
from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec

AnySpec = TypeVar("AnySpec", bound=Spec)


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """What several files hold."""

    tenants: list[TenantSpec] = field(default_factory=list[TenantSpec])
    services: dict[Path | str, ServiceSpec] = field(default_factory=dict[Path | str, ServiceSpec])
    """By file."""
    errors: list[SpecError] = field(default_factory=list[SpecError])
    """One per file or name that is wrong."""


def parse_tenant(data: object, source: str) -> TenantSpec:
    """Validate plain values as a tenant; relative dataset paths stay as they are.

    Args:
        data: What a YAML or JSON document holds.
        source: Where it is from, for messages: the name of the file.

    Raises:
        SpecError: Naming every problem; :class:`UnknownComponentError` if one is a ``type`` that is not registered.
    """
    return _parse(TenantSpec, data, source)


def parse_service(data: object, source: str) -> ServiceSpec:
    """Validate plain values as a service; arguments and errors as in :func:`parse_tenant`."""
    return _parse(ServiceSpec, data, source)


def load_any(path: Path | str) -> tuple[TenantSpec | ServiceSpec, ...]:
    """Read all documents of a YAML file, and tell tenants from services by their keys.

    Relative paths are made absolute against the file's folder; a backbone's, where it begins with a dot.

    Raises:
        SpecError: If a document is neither, or wrong; all documents' problems are named at once.
    """
    file = Path(path)
    documents = read_documents(file)
    specs: list[TenantSpec | ServiceSpec] = []
    errors: list[SpecError] = []
    for index, data in enumerate(documents):
        source = f"{file} (document {index + 1})" if len(documents) > 1 else str(file)
        try:
            spec = _kind(data, source)
            resolved = _parse(spec, data, source).resolve_paths(file.parent.resolve())
            if isinstance(resolved, TenantSpec):
                _check_start(resolved, source)
        except SpecError as error:
            errors.append(error)
            continue
        specs.append(resolved)
    raise_all(errors)
    return tuple(specs)


def load_tenant(path: Path | str) -> TenantSpec:
    """Read the one tenant of a file; see :func:`load_any`."""
    return _only(TenantSpec, path, "a tenant")


def load_service(path: Path | str) -> ServiceSpec:
    """Read the one service of a file; see :func:`load_any`."""
    return _only(ServiceSpec, path, "a service")


def load_files(paths: Sequence[Path | str]) -> LoadedFiles:
    """Read several files, each of one or more documents, and keep what is wrong apart from what is right."""
    owners: dict[str, Path | str] = {}
    loaded = LoadedFiles()
    for path in paths:
        try:
            specs = load_any(path)
        except SpecError as error:
            loaded.errors.append(error)
            continue
        for spec in specs:
            if isinstance(spec, ServiceSpec):
                loaded.services[path] = spec
            elif spec.tenant in owners:
                first = owners[spec.tenant]
                loaded.errors.append(SpecError(f"{path}: tenant: {spec.tenant!r} is also in {first}. Rename one."))
            else:
                owners[spec.tenant] = path
                loaded.tenants.append(spec)
    return loaded


def load_tenants(paths: Sequence[Path | str]) -> tuple[TenantSpec, ...]:
    """Read the tenants of several files.

    Raises:
        SpecError: Naming every problem of every file, and every name that two tenants share.
    """
    loaded = load_files(paths)
    misplaced = [SpecError(f"{path}: a service, not a tenant. Give it with --service.") for path in loaded.services]
    raise_all([*loaded.errors, *misplaced])
    return tuple(loaded.tenants)


def dump_yaml(*specs: Spec) -> str:
    """Write specs as YAML documents; reading them gives equal specs."""
    return write_documents(spec.model_dump(mode="json") for spec in specs)


def raise_all(errors: Sequence[SpecError]) -> None:
    """Raise the errors as one, of the class of the first if all agree, with all their lines."""
    if not errors:
        return
    is_same = len({type(error) for error in errors}) == 1
    raise (type(errors[0]) if is_same else SpecError)("\n".join(str(error) for error in errors))


def _only(kind: type[AnySpec], path: Path | str, what: str) -> AnySpec:
    specs = load_any(path)
    if len(specs) != 1:
        raise SpecError(f"{path}: {len(specs)} documents, where one is expected. Split the file.")
    (spec,) = specs
    if not isinstance(spec, kind):
        raise SpecError(f"{path}: not {what}, but {type(spec).__name__}. Give another file.")
    return spec


def _kind(data: object, source: str) -> type[TenantSpec] | type[ServiceSpec]:
    keys = {str(key) for key in _mapping(data, source)}
    tenant, service = (len(keys & set(spec.model_fields)) for spec in (TenantSpec, ServiceSpec))
    if tenant == service:
        found = f"found the keys {sorted(keys)}" if keys else "found no keys"
        raise SpecError(
            f"{source}: neither a tenant (tenant, policy, workloads) nor a service (backbones), {found}. "
            "Add the keys of one of them."
        )
    return TenantSpec if tenant > service else ServiceSpec


def _check_start(tenant: TenantSpec, source: str) -> None:
    try:
        check_init_from(tenant.policy, owner=tenant.tenant)
    except SpecError as error:
        raise SpecError(f"{source}: {error}") from error


def _mapping(data: object, source: str) -> Mapping[object, object]:
    if not isinstance(data, dict):
        raise SpecError(f"{source}: must be a mapping, found a {type(data).__name__}. Write 'key: value' pairs.")
    return cast("Mapping[object, object]", data)


def _parse(spec: type[AnySpec], data: object, source: str) -> AnySpec:
    try:
        return spec.model_validate(_mapping(data, source))
    except ValidationError as error:
        problems = describe_errors(error, spec)
        message = "\n".join(f"{source}: {line}" for line in problems.lines)
        raise (UnknownComponentError if problems.has_unknown_component else SpecError)(message) from error
