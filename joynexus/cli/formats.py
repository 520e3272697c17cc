"""Commands that read and write checkpoints: ``import lerobot``, ``import starvla`` and ``export``."""

import json
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from joynexus.cli.light import AsJson
from joynexus.cli.operate import Named, connect_service, state_of
from joynexus.cli.outcome import BAD_INPUT, JoyNexusGroup, report
from joynexus.errors import CheckpointError, ServiceError, SpecError
from joynexus.specs.loading import load_service
from joynexus.specs.service import ServiceSpec

if TYPE_CHECKING:
    from joynexus.models.formats.imported import ImportedPolicy

importing = typer.Typer(
    cls=JoyNexusGroup,
    help="Take another project's checkpoint apart into a backbone and a policy that a tenant can start from.",
    no_args_is_help=True,
)

Checkpoint = Annotated[Path, typer.Argument(help="Folder of the checkpoint.")]
Out = Annotated[Path, typer.Option("--out", help="Where to; must not exist yet.")]
Vlm = Annotated[
    Path | None,
    typer.Option("--vlm", help="Folder with config.json and tokenizer of the vision-language model, no weights."),
]
TenantName = Annotated[str | None, typer.Option("--name", help="Name of the tenant. Default: the folder's.")]


class Format(StrEnum):
    """What an export is written as."""

    JOYNEXUS = "joynexus"
    LEROBOT = "lerobot"
    STARVLA = "starvla"
    PEFT = "peft"


class Statistics(StrEnum):
    """What a StarVLA policy's data was normalised with."""

    MIN_MAX = "min_max"
    QUANTILE = "quantile"
    MEAN_STD = "mean_std"
    IDENTITY = "identity"


@importing.command()
def lerobot(path: Checkpoint, *, out: Out, vlm: Vlm = None, name: TenantName = None, as_json: AsJson = False) -> None:
    """Import a LeRobot policy folder: SmolVLA, pi0 or pi0.5."""
    from joynexus.models.formats.lerobot import open_lerobot

    _import(lambda: open_lerobot(path, vlm=vlm), out=out, name=name, as_json=as_json)


@importing.command()
def starvla(
    path: Annotated[Path, typer.Argument(help="Folder of a run, or one of its checkpoints (.safetensors).")],
    *,
    out: Out,
    vlm: Vlm = None,
    name: TenantName = None,
    robot: Annotated[str | None, typer.Option(help="Robot in dataset_statistics.json, where it has several.")] = None,
    cameras: Annotated[str | None, typer.Option(help="Cameras in their order, with commas between.")] = None,
    normalization: Annotated[Statistics, typer.Option(help="What the data was normalised with.")] = Statistics.MIN_MAX,
    as_json: AsJson = False,
) -> None:
    """Import a StarVLA run: QwenOFT or QwenGR00T."""
    from joynexus.models.formats.starvla import StarVlaOptions, open_starvla

    options = StarVlaOptions(
        vlm=vlm,
        robot=robot,
        cameras=None if cameras is None else tuple(cameras.split(",")),
        normalization=normalization.value,
    )
    _import(lambda: open_starvla(path, options=options), out=out, name=name, as_json=as_json)


def export(
    tenant: Annotated[str, typer.Argument(help="Tenant; or, with a slash, the folder of an export or an import.")],
    folder: Annotated[Path, typer.Argument(help="Where to; must not exist yet.")],
    *,
    format_: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.JOYNEXUS,
    imported: Annotated[
        Path | None, typer.Option("--import", help="Folder of the import that the policy started from, if it moved.")
    ] = None,
    service: Annotated[
        Path | None, typer.Option("--service", help="YAML of the service, for --format peft of a folder.")
    ] = None,
    name: Named = None,
) -> None:
    """Write a tenant's policy for use elsewhere: its own module and statistics, nothing of anybody else's.

    As lerobot or starvla, a policy that was imported goes back into the checkpoint that it came from.
    """
    if folder.exists():
        raise ServiceError(f"{folder}: exists already. Name a new folder.")
    with _exported(tenant, folder, name) as (source, running):
        version = _version(source)
        if format_ is Format.JOYNEXUS:
            _copy(source, folder)
        elif format_ is Format.PEFT:
            _write_adapter(source, folder, running if service is None else load_service(service))
        else:
            _put_together(source, folder, format_, imported)
    typer.echo(f"{tenant}: version {version} written to {folder} as {format_.value}")


def _import(opened: Callable[[], "ImportedPolicy"], *, out: Path, name: str | None, as_json: bool) -> None:
    from joynexus.models.formats.expected import check_tensors
    from joynexus.training.take_apart import take_apart

    if out.exists():
        raise ServiceError(f"{out}: exists already. Name a new folder.")
    try:
        found = opened()
        check_tensors(found)
    except CheckpointError as error:  # here it is the input that is wrong
        report(error)
        raise typer.Exit(BAD_INPUT) from None
    with _progress(f"{found.family}: import", sum(each.nbytes for each in found.tensors.infos.values())) as advance:
        done = take_apart(found, out, name=name, progress=advance)
    if as_json:
        rows = {"family": done.family, "folder": str(done.folder), "tensors": dict(done.tensors)}
        rows |= {"parameters": dict(done.parameters), "has_stats": done.has_stats, "check": list(done.notes)}
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(f"{done.family}: {_count(done.parameters['backbone'])} parameters frozen -> {out / 'backbone'}")
    typer.echo(f"{done.family}: {_count(done.parameters['policy'])} parameters to train -> {out / 'policy'}")
    if not done.has_stats:
        typer.echo("no statistics: those of the first dataset will be taken")
    for note in done.notes:
        typer.echo(f"check: {note}")
    typer.echo(f"next: joynexus validate {out / 'tenant.yaml'} --service {out / 'service.yaml'}")


@contextmanager
def _exported(tenant: str, folder: Path, name: str | None) -> Generator[tuple[Path, ServiceSpec | None]]:
    """Give a folder with the policy in joynexus' own format, and its service where that runs.

    The folder is the given one, a finished tenant's, or a temporary one.
    """
    if "/" in tenant:
        inner = Path(tenant) / "policy"
        yield (inner if (inner / "policy.json").is_file() else Path(tenant)), None
        return
    if (Path(tenant) / "policy.json").is_file() or (Path(tenant) / "policy" / "policy.json").is_file():
        typer.echo(f"taken as the name of a tenant; the folder is './{tenant}'", err=True)
    service = connect_service(name)
    finished = Path(state_of(service, tenant)["folder"]) / "export"
    if finished.exists():
        yield finished, service.spec
        return
    temporary = folder.parent.resolve() / f".exporting-{folder.name}-{uuid.uuid4().hex}"
    try:
        service.tenant(tenant).export(temporary).result(timeout_s=600.0)
        if not (temporary / "policy.json").is_file():
            raise ServiceError(
                f"{tenant}: the trainer's node has written {temporary}, which is not on this one. "
                "Name a folder that all nodes share."
            )
        yield temporary, service.spec
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _version(source: Path) -> Any:  # noqa: ANN401  # a JSON value
    try:
        return json.loads((source / "policy.json").read_bytes())["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: is no export: no policy.json can be read there. Check the path.") from error


def _copy(source: Path, folder: Path) -> None:
    with _unfinished(folder) as temporary:
        shutil.copytree(source, temporary)


@contextmanager
def _unfinished(folder: Path) -> Generator[Path]:
    """Give a temporary name that is put in place at the end, so that no half of a folder is ever there."""
    temporary = folder.parent / f".exporting-{folder.name}-{uuid.uuid4().hex}"
    try:
        yield temporary
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}. Free space or correct the storage.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_adapter(source: Path, folder: Path, service: ServiceSpec | None) -> None:
    from joynexus.models.formats.peft import write_peft
    from joynexus.training.export import read_export

    policy = read_export(source)
    backbone = None if service is None else service.backbones.get(policy.policy.backbone)
    if backbone is None:
        raise SpecError(
            f"{source}: the adapter is for backbone {policy.policy.backbone!r}. Name its service: --service."
        )
    with _unfinished(folder) as temporary:
        write_peft(temporary, policy, backbone)


def _put_together(source: Path, folder: Path, format_: Format, imported: Path | None) -> None:
    from joynexus.training.put_together import put_together

    with _progress(f"{format_.value}: export", None) as advance:
        put_together(source, folder, project=format_.value, imported=imported, progress=advance)


@contextmanager
def _progress(title: str, total: int | None) -> Generator[Callable[[int], None]]:
    """Show on a terminal how many bytes were written."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda count: shown.advance(task, count)


def _count(number: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
