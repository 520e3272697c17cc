"""The command line: one thin function per command.

``light`` answers from the specs alone, with neither torch nor Ray installed; what needs a cluster imports it inside
its command. Errors are one line each on stderr, and the exit code tells their kind (:mod:`joynexus.cli.outcome`).
"""

from typing import Annotated

import typer

import joynexus
from joynexus.cli import fit, formats, light, operate, run
from joynexus.cli.outcome import JoyNexusGroup

app = typer.Typer(
    name="joynexus",
    cls=JoyNexusGroup,
    help="Post-train Vision-Language-Action policies of many tenants over one shared frozen backbone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(light.validate)
app.command()(light.plan)
app.command()(light.schema)
app.command()(fit.fit)
app.command()(run.run)
app.command()(operate.up)
app.command()(operate.status)
app.command()(operate.usage)
app.command()(operate.logs)
app.command()(operate.stop)
app.command()(formats.export)
app.command()(operate.down)
app.add_typer(formats.importing, name="import")


def _print_version(wanted: bool) -> bool:  # noqa: FBT001  # typer calls it with the option's value
    if wanted:
        typer.echo(f"joynexus {joynexus.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
    del version  # its callback has ended the program


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="joynexus")
