"""How a command ends: one line per error on stderr, and an exit code that scripts can tell apart.

0: done. 1: a run failed. 2: bad input: files, names, arguments. 3: refused: no room for it. 130: Ctrl-C.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from joynexus.errors import (
    AdmissionError,
    AssetsMissingError,
    DatasetError,
    InvalidBatchError,
    JoyNexusError,
    SpecError,
    TenantNotFoundError,
)

FAILED, BAD_INPUT, REFUSED, INTERRUPTED = 1, 2, 3, 130

_INPUT_ERRORS = (SpecError, DatasetError, AssetsMissingError, InvalidBatchError, TenantNotFoundError)


def exit_code(error: JoyNexusError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, AdmissionError):
        return REFUSED
    return BAD_INPUT if isinstance(error, _INPUT_ERRORS) else FAILED


def report(error: JoyNexusError) -> None:
    """Print an error: ``joynexus: error: ...`` for each of its lines, unwrapped."""
    for line in str(error).splitlines() or [type(error).__name__]:
        typer.echo(f"joynexus: error: {line}", err=True)


class JoyNexusGroup(TyperGroup):
    """Turns the errors that joynexus raises on purpose into lines and exit codes; others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  # the context of typer's own parser
        """Run the command."""
        try:
            return super().invoke(ctx)
        except JoyNexusError as error:
            report(error)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            typer.echo("joynexus: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
