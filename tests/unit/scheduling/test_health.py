from collections.abc import Callable

import pytest

from joynexus.scheduling.health import FailTenant, HealthMonitor, Restart
from joynexus.specs.service import HealthSpec

SPEC = HealthSpec(
    period_s=1.0,
    timeout_s=2.0,
    missed_pings=2,
    startup_s=30.0,
    max_restarts=2,
    restart_window_s=100.0,
    stall_s=50.0,
)


def up(monitor: HealthMonitor, role: str = "worker", tenant: str | None = "alice", now: float = 0.0) -> None:
    monitor.add(role, tenant=tenant, now=now)
    monitor.answered(role, now=now)


def test_a_well_role_is_left_alone():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    for second in range(1000):
        monitor.answered("worker", now=float(second))
        assert monitor.decide(float(second)) == []


def test_a_death_is_acted_on_at_once_and_once():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    monitor.died("worker", reason="ActorDiedError: killed", now=5.0)
    assert monitor.decide(5.0) == [Restart(role="worker", reason="ActorDiedError: killed")]
    assert monitor.decide(5.1) == []
    assert monitor.num_restarts("worker", now=5.1) == 1


def test_c23_a_dead_worker_is_reported_while_others_are_busy():
    monitor = HealthMonitor(SPEC)
    for index in range(3):
        up(monitor, f"worker-{index}")
    # Two are within a long step but answer pings from their own thread; the third is gone and answers none.
    for beat in (1.0, 2.0):
        for busy in ("worker-0", "worker-1"):
            monitor.answered(busy, now=beat)
        monitor.missed("worker-2", now=beat)
    actions = monitor.decide(2.0)  # within three heartbeats
    assert [action.role for action in actions] == ["worker-2"]
    assert "2 pings of 2 s missed in a row" in actions[0].reason


def test_one_missed_ping_is_forgiven():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    for second in range(20):
        (monitor.missed if second % 2 else monitor.answered)("worker", now=float(second))
        assert monitor.decide(float(second)) == []


def test_a_slow_start_is_no_hang_but_has_an_end():
    monitor = HealthMonitor(SPEC)
    monitor.add("worker", tenant="alice", now=0.0)
    for second in range(30):
        monitor.missed("worker", now=float(second))
        assert monitor.decide(float(second)) == []
    assert monitor.decide(30.1) == [Restart(role="worker", reason="hung: no first answer within 30 s")]


def test_a_restarted_role_may_start_slowly_again():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    monitor.died("worker", reason="x", now=0.0)
    monitor.decide(0.0)
    monitor.restarted("worker", now=10.0)
    monitor.missed("worker", now=12.0)
    monitor.missed("worker", now=14.0)
    assert monitor.decide(39.0) == []
    assert len(monitor.decide(41.0)) == 1


def test_too_many_restarts_within_the_window_fail_the_tenant_alone():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    up(monitor, "other", "bob")
    for now in (0.0, 10.0):
        monitor.died("worker", reason="crash", now=now)
        assert isinstance(monitor.decide(now)[0], Restart)
        monitor.restarted("worker", now=now)
    monitor.died("worker", reason="crash", now=20.0)
    (action,) = monitor.decide(20.0)
    assert action == FailTenant(role="worker", tenant="alice", reason="crash; restarted 2 times in 100 s already")
    assert monitor.decide(21.0) == []


def test_restarts_long_ago_are_forgotten():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    for now in (0.0, 60.0, 120.0, 180.0, 240.0):
        monitor.died("worker", reason="crash", now=now)
        assert isinstance(monitor.decide(now)[0], Restart)
        monitor.restarted("worker", now=now)


def test_adding_a_role_again_does_not_clear_its_history():
    monitor = HealthMonitor(SPEC)
    for now in (0.0, 1.0, 2.0):
        up(monitor, now=now)
        monitor.died("worker", reason="crash", now=now)
        (action,) = monitor.decide(now)
    assert isinstance(action, FailTenant)


def test_a_restart_that_cannot_be_done_counts_as_well():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    seen = []
    for now in (0.0, 1.0, 2.0):
        monitor.died("worker", reason="restore failed", now=now)
        seen += monitor.decide(now)
    assert [type(each) for each in seen] == [Restart, Restart, FailTenant]


def test_a_role_of_the_service_fails_without_a_tenant():
    monitor = HealthMonitor(HealthSpec(max_restarts=0))
    up(monitor, "trainer", None)
    monitor.died("trainer", reason="out of memory", now=1.0)
    assert monitor.decide(1.0) == [
        FailTenant(role="trainer", tenant=None, reason="out of memory; restarted 0 times in 300 s already")
    ]


def test_reports_about_removed_roles_are_ignored():
    monitor = HealthMonitor(SPEC)
    up(monitor)
    monitor.remove("worker")
    for report in (monitor.answered, monitor.missed, monitor.restarted):
        report("worker", now=1.0)
    monitor.died("worker", reason="late news", now=1.0)
    assert monitor.decide(1000.0) == []


def test_a_workload_without_progress_fails_its_tenant():
    monitor = HealthMonitor(SPEC)
    monitor.track("alice sft", tenant="alice", now=0.0)
    for second in range(0, 40, 10):
        monitor.progressed("alice sft", ("steps", second), now=float(second))
    for second in range(40, 80, 10):
        monitor.progressed("alice sft", ("steps", 30), now=float(second))
        assert monitor.decide(float(second)) == []
    (action,) = monitor.decide(80.5)
    assert isinstance(action, FailTenant)
    assert action.tenant == "alice"
    assert action.reason == "no progress for 50 s (stall_s 50), last ('steps', 30)"
    assert monitor.decide(200.0) == []


def test_a_finished_workload_is_expected_to_do_nothing():
    monitor = HealthMonitor(SPEC)
    monitor.track("alice sft", tenant="alice", now=0.0)
    monitor.untrack("alice sft")
    monitor.progressed("alice sft", 1, now=1.0)
    assert monitor.decide(1000.0) == []


class Job:
    """A job whose inference role is killed at second 20; what comes of it depends on how the role comes back."""

    def __init__(self, comes_back: Callable[[float], bool], *, serves: bool) -> None:
        self.monitor = HealthMonitor(SPEC)
        self.monitor.add("inference", tenant="alice", now=0.0)
        self.monitor.track("rollout", tenant="alice", now=0.0)
        self.comes_back = comes_back
        self.serves = serves
        self.status = "RUNNING"
        self.steps = 0
        self.ended_at: float | None = None

    def second(self, now: float) -> None:
        if now < 20.0:
            is_alive, works = True, True
        else:
            is_alive = self.comes_back(now)
            works = is_alive and self.serves
        self.steps += works
        self.monitor.progressed("rollout", self.steps, now=now)
        if is_alive:
            self.monitor.answered("inference", now=now)
        else:
            self.monitor.died("inference", reason="ActorDiedError", now=now)
        for action in self.monitor.decide(now):
            if isinstance(action, FailTenant):
                self.status, self.ended_at = f"FAILED: {action.reason}", now
            else:
                self.monitor.restarted("inference", now=now)


DEADLINE_S = 20.0 + 3 * SPEC.startup_s + SPEC.stall_s


@pytest.mark.parametrize(
    ("comes_back", "serves", "outcome"),
    [
        (lambda now: now % 20 != 0, True, "FAILED: ActorDiedError; restarted 2 times"),  # comes back, and dies again
        (lambda now: now >= 22.0, True, "RUNNING"),
        (lambda _: False, True, "FAILED: ActorDiedError; restarted 2 times"),
        (lambda now: now >= 22.0, False, "FAILED: no progress for"),
    ],
)
def test_c25_a_killed_role_is_resumed_or_its_job_fails_by_the_deadline(comes_back, serves, outcome):
    job = Job(comes_back, serves=serves)
    for second in range(int(DEADLINE_S) + 100):
        job.second(float(second))
        if job.ended_at is not None:
            break
    assert job.status.startswith(outcome)
    if outcome == "RUNNING":
        assert job.steps > DEADLINE_S - 20  # it goes on, and is not merely called running
    else:
        assert job.ended_at is not None
        assert job.ended_at <= DEADLINE_S
