"""Who is a flood, how long its batches may be, and who is run in their middle; without an engine."""

import pytest

from joynexus.queues.flood_control import STRETCH, FloodControl
from joynexus.queues.running_batch import Run, RunningBatch
from joynexus.queues.waiting_room import Pending, WaitingRoom
from joynexus.scheduling.preemption import LEAST_GAIN, LONGEST_WAIT
from joynexus.types import PredictRequest

FIXED_S, ROW_S = 0.010, 0.001


class World:
    """A room, its flood control, and a forward whose cost is known."""

    def __init__(self, loop, observe, max_rows: int = 32) -> None:
        self.loop, self.observe = loop, observe
        self.room = WaitingRoom(10_000)
        self.floods = FloodControl(self.room, max_rows)
        for rows in (1, 4, 16, 32) * 5:
            self.floods.learnt("x").forward.measured(rows, FIXED_S + ROW_S * rows)

    def ask(self, tenant: str, count: int = 1, *, rows: int = 1, signature: str = "x", now: float = 0.0) -> None:
        for _ in range(count):
            request = PredictRequest(tenant=tenant, observation=self.observe(rows), seeds=(0,) * rows)
            self.room.add(
                Pending(
                    request=request,
                    tenant=tenant,
                    signature=signature,
                    rows=rows,
                    queued_at=now,
                    answer=self.loop.create_future(),
                )
            )

    def run(self, rows: int, now: float = 0.0) -> RunningBatch:
        """Take a batch, and begin it."""
        batch = self.room.take("x", rows, now)
        floods = frozenset(each.tenant for each in batch if each.tenant in self.room.rows_by_tenant)
        return RunningBatch(batch, floods=floods, clock=lambda: now, deliver=lambda run: None)


@pytest.fixture
def world(loop, observe):
    return World(loop, observe)


def test_one_tenant_alone_may_fill_batches(world):
    world.ask("flood", 100)
    assert world.floods.surplus("x", 0.0) is None


def test_a_flood_may_lengthen_the_others_batch_by_two_fifths(world):
    world.ask("flood", 100)
    world.ask("a")
    world.ask("b", rows=2)
    surplus = world.floods.surplus("x", 0.0)
    assert surplus.quota == 32 // 3
    three = FIXED_S + 3 * ROW_S
    assert surplus.max_rows == int((STRETCH * three - FIXED_S) / ROW_S + 1e-6)
    batch = world.room.take("x", 32, 0.0, surplus=surplus)
    assert {each.tenant for each in batch} == {"flood", "a", "b"}
    assert sum(each.rows for each in batch) == surplus.max_rows


def test_others_of_another_signature_do_not_lengthen_it(world):
    world.ask("flood", 100)
    world.ask("y", rows=8, signature="y")
    one = FIXED_S + ROW_S
    assert world.floods.surplus("x", 0.0).max_rows == int((STRETCH * one - FIXED_S) / ROW_S + 1e-6)


@pytest.mark.parametrize(
    ("rows", "quota"), [([4] * 9 + [1], 4), ([1, 100, 100, 100], 8), ([1] * 8 + [300], 3), ([16] * 10 + [1], 8)]
)
def test_who_is_a_flood(world, rows: list[int], quota: int):
    """Tenants of four rows are none beside one of a single row; three that keep a hundred waiting are."""
    for index, count in enumerate(rows):
        world.ask(f"t{index}", count)
    assert world.floods.surplus("x", 0.0).quota == quota


def test_alone_in_a_batch_a_flood_may_make_it_as_long_as_its_pauses_allow(world):
    world.ask("flood", 100)
    arrivals = world.floods.learnt("x").arrivals
    arrivals.enter("a", 0.0)
    arrivals.leave("a", 0.1)
    one = FIXED_S + ROW_S
    assert world.floods.surplus("x", 0.2).max_rows == int((STRETCH * one - FIXED_S) / ROW_S + 1e-6)
    world.floods.learnt("x").pauses.measured(0.001, 0.010)
    longest = LONGEST_WAIT * one / 0.1
    assert world.floods.surplus("x", 0.2).max_rows == int((longest - FIXED_S) / ROW_S + 1e-6)


def test_who_comes_in_the_middle_of_a_flood_is_urgent(world):
    world.ask("flood", 100)
    running = world.run(8)
    assert running.gives_way
    assert world.floods.take_urgent(running, 0.0) == []
    world.ask("a")
    world.ask("b", 2)
    assert [each.tenant for each in world.floods.take_urgent(running, 0.001)] == ["a", "b", "b"]


def test_a_batch_that_others_are_in_goes_through(world):
    world.ask("flood", 100)
    world.ask("a")
    running = world.run(8)
    world.ask("b")
    assert not running.gives_way
    assert world.floods.take_urgent(running, 0.001) == []


def test_another_flood_does_not_interrupt(world):
    world.ask("flood", 100)
    running = world.run(8)
    world.ask("other", 100)
    assert world.floods.take_urgent(running, 0.001) == []


def test_nobody_interrupts_for_little_and_a_late_run_is_taken_to_go_on(world):
    world.ask("flood", 100)
    running = world.run(8)
    world.ask("a")
    end, own = FIXED_S + 8 * ROW_S, FIXED_S + ROW_S
    assert world.floods.take_urgent(running, end - 0.5 * LEAST_GAIN * own) == []
    assert len(world.floods.take_urgent(running, 3 * end)) == 1


def test_in_a_crowd_nobody_interrupts(world):
    world.ask("flood", 1000)
    now = 0.0
    for _ in range(100):  # "b" needs a third of the device
        now += 3 * (FIXED_S + ROW_S)
        world.ask("b", now=now)
        batch = world.room.take("x", 1, now, among=["b"])
        world.floods.finished(Run(batch=batch, answers=[], started=now, ended=now + FIXED_S + ROW_S))
    running = world.run(8, now)
    world.ask("a", now=now)
    assert world.floods.take_urgent(running, now + 0.001) == []
    world.floods.forget("b")
    assert [each.tenant for each in world.floods.take_urgent(running, now + 0.001)] == ["a"]


def test_what_is_offered_fills_one_batch_of_one_signature(world):
    world.ask("flood", 100)
    running = world.run(8)
    world.ask("a", rows=5)
    running.offer(world.floods.take_urgent(running, 0.001))
    world.ask("y", signature="y")
    assert world.floods.take_urgent(running, 0.001) == []
    world.ask("b", rows=4)
    running.offer(world.floods.take_urgent(running, 0.001))
    assert [each.tenant for each in running.offered] == ["a", "b"]
    assert [each.tenant for each in running.take()] == ["a", "b"]
    assert running.is_aside
    assert world.floods.take_urgent(running, 0.001) == []
    running.give([ValueError()] * 2)
    assert [each.tenant for each in world.floods.take_urgent(running, 0.001)] == ["y"]
