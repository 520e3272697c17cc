import pytest

from joynexus.errors import AdmissionError, TenantExistsError
from joynexus.scheduling.admission import ServiceState, admit
from joynexus.scheduling.plan import compile_plan

FIXED = 27_400_000 * 4 + (256 << 20)
"""Bytes of the lite backbone and of the default prefix store."""


def test_c07_refused_tenants_keep_no_slot(make_tenant, make_service):
    service = make_service(training={"slots": 2})
    state = ServiceState(service=service)
    plans = [compile_plan(make_tenant(name), service) for name in "abcd"]
    for plan in plans[:2]:
        admit(plan, state)
        state = state.having(plan)
    for _ in range(3):
        with pytest.raises(AdmissionError):
            admit(plans[2], state)
    left = ServiceState(service=service, tenants=state.tenants[1:])
    admit(plans[3], left)
    assert left.having(plans[3]).load("lite").used_slots == 2


def test_a_refusal_says_what_is_needed_and_what_is_free(make_tenant, make_service):
    service = make_service(training={"slots": 1})
    first, second = (compile_plan(make_tenant(name), service) for name in "ab")
    with pytest.raises(AdmissionError) as caught:
        admit(second, ServiceState(service=service, tenants=(first,)))
    needed, whole = second.memory.total, service.training.device_bytes - FIXED
    assert str(caught.value) == (
        f"tenant 'b': no room at backbone 'lite': needed are 1 slot and {needed} bytes, free are 0 of 1 slots and "
        f"{whole - first.memory.total} of {whole} bytes. Resubmit when a tenant leaves, or raise training.slots or "
        "training.device_bytes."
    )


def test_memory_runs_out_before_slots(make_tenant, make_service):
    roomy = make_service()
    need = compile_plan(make_tenant("a"), roomy).memory.total
    service = make_service(training={"slots": 8, "device_bytes": FIXED + 2 * need})
    plans = [compile_plan(make_tenant(name), service) for name in "abc"]
    state = ServiceState(service=service, tenants=tuple(plans[:2]))
    admit(plans[1], ServiceState(service=service, tenants=(plans[0],)))
    with pytest.raises(AdmissionError, match=r"free are 6 of 8 slots and 0 of \d+ bytes. Resubmit"):
        admit(plans[2], state)


def test_what_can_never_fit_is_not_told_to_wait(make_tenant, make_service):
    service = make_service(training={"device_bytes": FIXED + 1000})
    with pytest.raises(AdmissionError, match="has 1000 bytes for slots in all") as caught:
        admit(compile_plan(make_tenant("a"), service), ServiceState(service=service))
    assert "Resubmit" not in str(caught.value)


def test_a_name_that_lives_is_refused(make_tenant, make_service):
    service = make_service()
    plan = compile_plan(make_tenant("a"), service)
    with pytest.raises(TenantExistsError, match="tenant 'a': a tenant of this name lives"):
        admit(plan, ServiceState(service=service, tenants=(plan,)))


def test_backbones_are_counted_apart(make_tenant, make_service):
    service = make_service(backbones={"lite": {"type": "lite"}, "twin": {"type": "lite"}}, training={"slots": 1})
    first = compile_plan(make_tenant("a"), service)
    admit(
        compile_plan(make_tenant("b", policy={"backbone": "twin"}), service),
        ServiceState(service=service, tenants=(first,)),
    )
