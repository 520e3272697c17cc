import pytest
import typer
from typer.testing import CliRunner, Result

from joynexus import errors
from joynexus.cli.outcome import JoyNexusGroup, exit_code


def end_with(error: BaseException) -> Result:
    app = typer.Typer(cls=JoyNexusGroup, pretty_exceptions_enable=False)

    @app.callback()
    def options() -> None:
        pass

    @app.command()
    def work() -> None:
        raise error

    return CliRunner().invoke(app, ["work"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SpecError, 2),
        (errors.UnknownComponentError, 2),
        (errors.ContractError, 2),
        (errors.DatasetError, 2),
        (errors.AssetsMissingError, 2),
        (errors.TenantNotFoundError, 2),
        (errors.AdmissionError, 3),
        (errors.PlacementError, 3),
        (errors.TenantExistsError, 3),
        (errors.TenantFailedError, 1),
        (errors.ServiceError, 1),
        (errors.SimulatorError, 1),
        (errors.CheckpointError, 1),
    ],
)
def test_each_kind_of_error_has_its_code_and_one_line(error, code):
    result = end_with(error("alice: wrong. Do this."))
    assert result.exit_code == code == exit_code(error("x"))
    assert result.stderr == "joynexus: error: alice: wrong. Do this.\n"
    assert result.stdout == ""


def test_each_line_of_an_error_is_marked():
    assert end_with(errors.SpecError("a\nb")).stderr == "joynexus: error: a\njoynexus: error: b\n"


def test_ctrl_c_ends_with_130():
    result = end_with(KeyboardInterrupt())
    assert result.exit_code == 130
    assert result.stderr == "joynexus: interrupted\n"


def test_a_fault_of_our_own_is_not_hidden():
    result = end_with(RuntimeError("a bug"))
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)
