"""Why an engine was idle: every moment has one reason, whatever is nested in what."""

import threading

import pytest

from joynexus.observability.idle_clock import IdleClock


class FakeClock:
    """A wall clock that only tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def fail_after(self, seconds: float) -> None:
        self.now += seconds
        raise ValueError("in a block")


@pytest.fixture
def wall() -> FakeClock:
    return FakeClock()


@pytest.fixture
def idle(wall: FakeClock) -> IdleClock:
    return IdleClock(wall)


def test_a_loop_is_told_apart_without_a_gap(wall, idle):
    idle.watch("control")
    for _ in range(3):
        wall.pass_by(0.5)
        with idle.working():
            wall.pass_by(2.0)
        with idle.because("copying"):
            wall.pass_by(0.25)
        with idle.because("no_data"):
            wall.pass_by(1.0)
    times = idle.times()
    assert times.idle == {"control": 1.5, "copying": 0.75, "no_data": 3.0}
    assert times.wall_seconds == 11.25


def test_the_innermost_block_counts(wall, idle):
    with idle.because("control"):
        wall.pass_by(1.0)
        with idle.working():
            wall.pass_by(2.0)
            with idle.because("copying"):
                wall.pass_by(4.0)
        wall.pass_by(8.0)
    assert idle.times().idle == {"control": 9.0, "copying": 4.0}
    assert idle.times().wall_seconds == 15.0


def test_time_that_nobody_watches_is_not_counted(wall, idle):
    wall.pass_by(5.0)
    with idle.working():
        wall.pass_by(1.0)
    wall.pass_by(5.0)
    assert idle.times().wall_seconds == 1.0
    assert idle.times().idle == {}


def test_a_reading_holds_the_phase_that_lasts(wall, idle):
    with idle.because("no_data"):
        wall.pass_by(3.0)
        assert idle.times().idle == {"no_data": 3.0}
        wall.pass_by(1.0)
    assert idle.times().idle == {"no_data": 4.0}


def test_a_reason_that_is_learnt_of_later_is_corrected(wall, idle):
    with idle.because("no_data"):
        wall.pass_by(3.0)
    idle.move(1.0, "no_data", "waiting_for_group")
    assert idle.times().idle == {"no_data": 2.0, "waiting_for_group": 1.0}
    idle.move(9.0, "no_data", "waiting_for_group")
    assert idle.times().idle == {"no_data": 0.0, "waiting_for_group": 3.0}
    assert idle.times().wall_seconds == 3.0


def test_an_engine_may_work_in_another_thread(wall, idle):
    def work() -> None:
        with idle.working():
            wall.pass_by(2.0)

    with idle.because("control"):
        wall.pass_by(1.0)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        wall.pass_by(1.0)
    assert idle.times().idle == {"control": 2.0}
    assert idle.times().wall_seconds == 4.0


def test_a_block_that_is_cancelled_before_the_one_inside_it_ends_alone(wall, idle):
    outer, inner = idle.because("control"), idle.working()
    outer.__enter__()
    inner.__enter__()
    wall.pass_by(1.0)
    outer.__exit__(None, None, None)
    wall.pass_by(2.0)
    inner.__exit__(None, None, None)
    assert idle.times().idle == {}
    assert idle.times().wall_seconds == 3.0


def test_an_error_ends_its_block(wall, idle):
    with pytest.raises(ValueError, match="in a block"), idle.because("copying"):
        wall.fail_after(1.0)
    wall.pass_by(1.0)
    assert idle.times().idle == {"copying": 1.0}
