"""``joynexus run``: submit tenants, follow them, and say how it ended."""

import signal
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from joynexus.cli.light import Files, ServiceFile, console
from joynexus.cli.outcome import FAILED
from joynexus.specs.loading import load_service, load_tenants
from joynexus.specs.service import default_service

if TYPE_CHECKING:
    from joynexus.api.service import Service


def run(
    files: Files,
    *,
    service: ServiceFile = None,
    output: Annotated[Path | None, typer.Option(help="Folder of this run. Default: a new one under the root.")] = None,
    isolated: Annotated[bool, typer.Option(help="Run the tenants one after the other, each alone.")] = False,
    local: Annotated[bool, typer.Option(help="Start a service of this process's own, whatever runs.")] = False,
    num_cpus: Annotated[int | None, typer.Option(help="Logical CPUs of a service of one's own.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the summary here; - prints it.")] = None,
) -> None:
    """Run tenants on the running service, or on one started for them, and wait for their end.

    Writes summary.json, a plot, and per tenant metrics, checkpoints, videos and the exported policy. Ends with 1 if a
    tenant failed. Ctrl-C, or the stop of the Ray job, stops the tenants.
    """
    tenants = load_tenants(files)
    spec = default_service() if service is None else load_service(service)
    from joynexus.api.session import run_isolated, run_shared  # needs Ray

    screen = Console(stderr=True)
    with _stoppable():
        if isolated:
            outcome = run_isolated(spec, tenants, output=output, num_cpus=num_cpus, progress=_Progress(screen))
        else:
            outcome = run_shared(
                spec,
                tenants,
                named=service is not None,
                local=local,
                output=output,
                num_cpus=num_cpus,
                progress=_Progress(screen),
            )
    _finish(outcome, json_out)


@contextmanager
def _stoppable() -> Any:  # noqa: ANN401  # a generator, as contextmanager wants it
    """Turn SIGTERM, which ends a Ray job, into the same orderly stop as Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Progress:
    """Shows a run on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def follow(self, service: "Service", tenants: Sequence[str]) -> Any:  # noqa: ANN401
        from joynexus.api.follow import follow
        from joynexus.cli.live import LiveProgress

        with _stoppable(), LiveProgress(self.console) as live:  # again: Ray's start puts handlers of its own in place
            return follow(service, tenants, show=live.show)


def _finish(outcome: Any, json_out: Path | None) -> None:  # noqa: ANN401
    from joynexus.observability.summary import summary_table

    if json_out is not None and str(json_out) == "-":
        typer.echo(outcome.summary_json())
    else:
        console().print(summary_table(outcome.service, outcome.tenants))
        if json_out is not None:
            json_out.write_text(outcome.summary_json())
    typer.echo(f"run: {outcome.folder}", err=True)
    if outcome.failed:
        for name, reason in outcome.failed.items():
            typer.echo(f"joynexus: error: {name}: {reason}", err=True)
        raise typer.Exit(FAILED)
