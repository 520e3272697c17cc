"""Every second of a device belongs to one tenant and one kind, on a CPU and on a device that answers late."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.observability.device_clock import CpuMarks, DeviceClock, device_cores, device_marks
from joynexus.observability.engine_usage import KINDS, EngineLedger
from joynexus.observability.idle_clock import IdleClock


class FakeDevice:
    """A device whose time only tests move, and that may be behind what it was given."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = float("inf")
        self.num_asked = 0

    def work(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float | None:
        self.num_asked += 1
        return end - begin if end <= self.reached else None


def fail_after(seconds: float, pass_by) -> None:
    pass_by(seconds)
    raise ValueError("in a span")


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def ledger() -> EngineLedger:
    return EngineLedger()


@pytest.fixture
def clock(ledger, device) -> DeviceClock:
    return DeviceClock(ledger, device)


def test_a_step_is_told_apart_without_a_gap(clock, ledger, device):
    with clock.step():
        device.work(1.0)
        with clock.shared("prefix") as span:
            device.work(6.0)
            span.split = {"a": 2, "b": 1}
        for tenant in "ab":
            with clock.span(tenant, "other"):
                device.work(0.25)
                with clock.span(tenant, "backward"):
                    device.work(2.0)
                device.work(0.25)
        device.work(1.0)
    assert ledger.usage().by_kind == {
        "a": {"prefix": 4.0, "other": 1.5, "backward": 2.0},
        "b": {"prefix": 2.0, "other": 1.5, "backward": 2.0},
    }
    assert ledger.usage().busy_seconds == device.now


def test_what_nobody_caused_is_split_evenly_among_who_took_part(clock, ledger, device):
    with clock.step():
        clock.takes_part(["a", "b"])
        device.work(3.0)
        with clock.span("c", "head_forward"):
            device.work(1.0)
    assert ledger.usage().device_seconds == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_a_step_in_which_nobody_takes_part_is_not_booked(clock, ledger, device):
    with clock.step():
        device.work(1.0)
    assert ledger.usage().device_seconds == {}
    with clock.step(), clock.span("a", "optimizer"):
        device.work(1.0)
    assert ledger.usage().busy_seconds == 1.0


def test_a_shared_span_that_nobody_caused_is_split_evenly(clock, ledger, device):
    with clock.step():
        clock.takes_part("ab")
        with clock.shared("prefix") as span:
            device.work(2.0)
            span.split = {"a": 0, "b": 0}
    assert ledger.usage().by_kind == {"a": {"prefix": 1.0}, "b": {"prefix": 1.0}}


def test_a_shared_span_holds_the_parts_around_a_nested_one(clock, ledger, device):
    with clock.step(), clock.shared("prefix") as span:
        device.work(1.0)
        with clock.span("poison", "prefix"):
            device.work(5.0)
        device.work(1.0)
        span.kind, span.split = "copy", {"a": 1}
    assert ledger.usage().device_seconds == {"poison": 5.0, "a": 2.0}
    assert ledger.usage().by_kind["a"]["copy"] == 2.0


def test_an_error_ends_its_span_and_is_paid_for(clock, ledger, device):
    with clock.step():
        with pytest.raises(ValueError, match="in a span"), clock.span("a", "backward"):
            fail_after(1.0, device.work)
        with clock.span("b", "backward"):
            device.work(2.0)
    assert ledger.usage().device_seconds == {"a": 1.0, "b": 2.0}


def test_spans_outside_a_step_are_no_error_and_not_booked(clock, ledger, device):
    with clock.span("a", "other"):
        device.work(1.0)
    assert ledger.usage().device_seconds == {}


def test_what_a_tenant_has_spent_is_known_within_a_span(clock, device):
    with clock.step(), clock.span("a", "other"):
        device.work(1.0)
        assert clock.spent("a") == 1.0
        with clock.span("a", "backward"):
            device.work(2.0)
        assert clock.spent("a") == 3.0
        assert clock.spent("b") == 0.0
    with clock.step():
        assert clock.spent("a") == 0.0  # of a step, not of all


def test_a_device_that_is_behind_is_never_waited_for_and_nothing_is_lost(clock, ledger, device):
    device.reached = 1.0
    with clock.step():
        for tenant in "ab":
            with clock.span(tenant, "backward"):
                device.work(1.0)
        assert clock.spent("b") == 0.0
    assert ledger.usage().device_seconds == {"a": 1.0}
    with clock.step(), clock.span("a", "optimizer"):
        device.work(1.0)
    assert ledger.usage().device_seconds == {"a": 1.0}
    device.reached = 2.0
    clock.settle()
    assert ledger.usage().device_seconds == {"a": 1.0, "b": 1.0}
    device.reached = 3.0
    clock.settle()
    assert ledger.usage().by_kind["a"] == {"backward": 1.0, "optimizer": 1.0}


def test_a_device_that_is_behind_is_asked_once_per_settling(clock, device):
    device.reached = -1.0
    with clock.step():
        for index in range(50):
            with clock.span(f"tenant-{index}", "backward"):
                device.work(1.0)
    device.num_asked = 0
    clock.settle()
    assert device.num_asked == 1


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sums_over_kinds_and_tenants_are_the_busy_time(data):
    """Random trees of spans: kinds sum to a tenant's seconds, tenants to the busy ones, busy and idle to the wall's."""
    device, lasting = FakeDevice(), st.floats(0.0, 10.0)
    ledger = EngineLedger()
    ledger.idle = IdleClock(lambda: device.now)
    clock = DeviceClock(ledger, device)
    tenants, kinds = st.sampled_from("abcd"), st.sampled_from(KINDS)

    def spans(depth: int) -> None:
        for _ in range(data.draw(st.integers(0, 2))):
            device.work(data.draw(lasting))
            if data.draw(st.booleans()):
                with clock.span(data.draw(tenants), data.draw(kinds)):
                    device.work(data.draw(lasting))
                    if depth:
                        spans(depth - 1)
            else:
                with clock.shared(data.draw(kinds)) as span:
                    device.work(data.draw(lasting))
                    span.split = data.draw(st.dictionaries(tenants, st.integers(0, 5)))

    worked = 0.0
    ledger.idle.watch("control")
    for _ in range(data.draw(st.integers(1, 3))):
        with ledger.idle.because("no_data"):
            device.work(data.draw(lasting))
        began = device.now
        with ledger.idle.working(), clock.step():
            clock.takes_part("a")
            spans(2)
        worked += device.now - began
        device.work(data.draw(lasting))
    usage = ledger.usage()
    assert usage.busy_seconds == pytest.approx(worked, abs=1e-9)
    assert sum(usage.device_seconds.values()) == pytest.approx(usage.busy_seconds, abs=1e-9)
    for tenant, seconds in usage.device_seconds.items():
        assert sum(usage.by_kind[tenant].values()) == pytest.approx(seconds, abs=1e-9)
    assert usage.busy_seconds + sum(usage.idle.values()) == pytest.approx(device.now, abs=1e-9)
    assert usage.wall_seconds == pytest.approx(device.now, abs=1e-9)


# CPU time


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_cpu_is_not_charged_for_what_others_do(threads):
    threads(1)
    marks = device_marks(torch.device("cpu"))
    began = marks.mark()
    other = threading.Thread(target=burn, args=(0.2,))
    other.start()
    other.join()
    assert marks.seconds(began, marks.mark()) < 0.05
    burn(0.2)
    assert marks.seconds(began, marks.mark()) >= 0.2


def test_torchs_worker_threads_are_counted_and_no_others(threads):
    """An engine of two threads: half of the work is its worker's; a thread beside it burns as much and is nobody's."""
    threads(2)
    found: dict[str, float] = {}
    stop = threading.Event()

    def beside() -> None:
        while not stop.is_set():
            burn(0.01)
        found["beside"] = time.thread_time()

    def engine() -> None:
        marks = CpuMarks()
        began, own, process = marks.mark(), time.thread_time(), time.process_time()
        data = torch.ones(600, 600)
        for _ in range(30):
            data @ data
        found.update(marked=marks.mark() - began, own=time.thread_time() - own, process=time.process_time() - process)

    other, working = threading.Thread(target=beside), threading.Thread(target=engine)
    other.start()
    working.start()
    working.join()
    stop.set()
    other.join()
    assert found["marked"] > 1.4 * found["own"]
    assert found["marked"] < found["process"] - 0.3 * found["own"]


def test_a_clock_follows_the_thread_that_reads_it(threads):
    threads(2)
    marks = CpuMarks()
    marks.mark()
    readings: list[float] = []

    def engine() -> None:
        began = marks.mark()
        burn(0.1)
        readings.append(marks.mark() - began)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert readings[0] >= 0.1


def test_cores_of_a_device(threads):
    threads(2)
    assert device_cores(torch.device("cpu")) == 2
    assert device_cores(torch.device("cuda")) == 1
