import inspect
import pickle

import pytest

from joynexus import errors
from joynexus.errors import AdmissionError, JoyNexusError, SpecError

ERRORS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_crosses_processes_whole(error):
    raised = error("alice: it is wrong, 3 were found. Give 2.")
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert str(copy) == str(raised)


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_the_root_and_no_constructor_of_its_own(error):
    assert issubclass(error, JoyNexusError)
    assert "__init__" not in vars(error)
    assert inspect.getdoc(error)


def test_the_kinds_that_callers_tell_apart():
    assert issubclass(errors.ContractError, SpecError)
    assert issubclass(errors.UnknownComponentError, SpecError)
    assert issubclass(errors.PlacementError, AdmissionError)
    assert issubclass(errors.TenantExistsError, AdmissionError)
    assert issubclass(SpecError, ValueError)
    assert issubclass(errors.TenantNotFoundError, LookupError)
