"""The choice of groups on a virtual clock: an engine that takes as long as its cost model says."""

import itertools
import random
from dataclasses import dataclass, field

import pytest

from joynexus.scheduling.cost import Measured
from joynexus.scheduling.grouping import LEAD_S, Choice, GroupChooser, Head

FIXED_S, ROW_S = 0.010, 0.001
"""Of a forward of the backbone."""


@dataclass
class Tenant:
    """Keeps one call ready, ``away_s`` after the answer to the last one."""

    weight: float = 1.0
    priority: str = "normal"
    signature: str = "x"
    rows: int = 8
    head_s: float = 0.0005
    """Per row."""
    encoded: float = 1.0
    """Part of its rows that the store lacks."""
    away_s: float = 0.0
    start_s: float = 0.0
    jitter: float = 0.0
    has_features: bool = False
    ready_at: float = 0.0
    spent: Measured = field(default_factory=Measured)
    groups: list[int] = field(default_factory=list)
    """Numbers of the groups that it was in."""
    latencies: list[float] = field(default_factory=list)


class World:
    """An engine's loop: choose, run, answer."""

    def __init__(
        self, seed: int = 0, *, max_rows: int = 256, max_wait_s: float = 0.02, lead_s: float = 0.0, **tenants: Tenant
    ) -> None:
        self.draw = random.Random(seed)
        self.tenants = tenants
        self.now = 0.0
        self.busy = 0.0
        self.groups: list[tuple[str, ...]] = []
        self.chooser = GroupChooser(
            max_rows=max_rows, max_wait_s=max_wait_s, lead_s=lead_s, spent=lambda tenant: self.tenants[tenant].spent
        )
        for name, each in tenants.items():
            each.ready_at = each.start_s
            self.chooser.add(name, signature=each.signature, weight=each.weight, priority=each.priority)  # type: ignore[arg-type]

    def run(self, seconds: float, *, may_wait: bool = False) -> "World":
        end = self.now + seconds
        while self.now < end:
            ready = {name: each for name, each in self.tenants.items() if each.ready_at <= self.now}
            heads = {
                name: Head(rows=each.rows, since=each.ready_at, has_features=each.has_features)
                for name, each in ready.items()
            }
            choice = self.chooser.choose(heads, self.now, may_wait=may_wait)
            if choice.tenants:
                self.execute(choice)
                continue
            comes = [each.ready_at for each in self.tenants.values() if each.ready_at > self.now]
            self.now = min([*comes, end, *([choice.hold_until] if choice.hold_until is not None else [])])
        return self

    def execute(self, choice: Choice) -> None:
        number, members = len(self.groups), [self.tenants[name] for name in choice.tenants]
        encoded = [round(each.rows * (0.0 if each.has_features else each.encoded)) for each in members]
        prefix_s = FIXED_S + ROW_S * sum(encoded) if any(encoded) else 0.0
        began = self.now
        for each, count in zip(members, encoded, strict=True):
            own = each.rows * each.head_s * (1.0 + each.jitter * self.draw.uniform(-1.0, 1.0))
            share = prefix_s * count / max(sum(encoded), 1)
            before = each.spent
            each.spent = Measured(
                rows=before.rows + each.rows,
                encoded=before.encoded + count,
                prefix_s=before.prefix_s + share,
                head_s=before.head_s + own,
            )
            self.now += own
        self.now += prefix_s
        self.busy += self.now - began
        for name, each in zip(choice.tenants, members, strict=True):
            each.groups.append(number)
            each.latencies.append(self.now - each.ready_at)
            each.ready_at = self.now + each.away_s * (1.0 + each.jitter * self.draw.uniform(-1.0, 1.0))
            self.chooser.finished(name, self.now)
        self.groups.append(choice.tenants)

    def shares(self) -> dict[str, float]:
        total = sum(each.spent.seconds for each in self.tenants.values())
        return {name: each.spent.seconds / total for name, each in self.tenants.items()}


def test_weights_three_one_one_share_device_seconds_within_two_percent():
    world = World(a=Tenant(weight=3.0, jitter=0.2), b=Tenant(jitter=0.2), c=Tenant(jitter=0.2)).run(20.0)
    assert world.shares() == {
        "a": pytest.approx(0.6, abs=0.02),
        "b": pytest.approx(0.2, abs=0.02),
        "c": pytest.approx(0.2, abs=0.02),
    }


def test_a_module_twenty_times_as_dear_gets_device_time_by_weight_and_not_by_rows():
    world = World(dear=Tenant(head_s=0.02), b=Tenant(head_s=0.001), c=Tenant(head_s=0.001)).run(40.0)
    assert list(world.shares().values()) == [pytest.approx(1 / 3, abs=0.02)] * 3
    rows = {name: each.spent.rows for name, each in world.tenants.items()}
    assert rows["b"] > 5 * rows["dear"]


def test_who_finds_its_prefixes_pays_for_its_module_alone():
    world = World(found=Tenant(encoded=0.0), encodes=Tenant()).run(8.0)
    assert list(world.shares().values()) == [pytest.approx(1 / 2, abs=0.02)] * 2
    found, encodes = (world.tenants[name].spent for name in ("found", "encodes"))
    per_row = (FIXED_S + 8 * ROW_S) / 8 + 0.0005
    assert found.rows / encodes.rows == pytest.approx(per_row / 0.0005, rel=0.05)


def test_equal_tenants_are_in_nearly_every_group_though_costs_vary():
    world = World(**{f"t{index}": Tenant(jitter=0.3) for index in range(8)}).run(20.0)
    assert sum(map(len, world.groups)) / len(world.groups) > 7.8


def test_a_lead_keeps_a_few_calls_together_whatever_they_cost():
    world = World(lead_s=LEAD_S, dear=Tenant(head_s=0.005), b=Tenant(), c=Tenant()).run(0.5)
    assert set(map(len, world.groups)) == {3}


def test_any_two_tenants_stay_within_the_stated_bound_of_their_shares():
    """Twice the dearest call of each, by weight, and what estimates were wrong by: here nothing after the first."""
    weights = {"a": 3.0, "b": 1.0, "c": 0.5, "d": 2.0}
    heads = {"a": 0.0005, "b": 0.004, "c": 0.001, "d": 0.002}
    world = World(**{name: Tenant(weight=weights[name], head_s=heads[name]) for name in weights}).run(1.0)
    before = {name: each.spent.seconds / each.weight for name, each in world.tenants.items()}
    dearest = {name: (8 * heads[name] + FIXED_S + 8 * ROW_S) / weights[name] for name in weights}
    for _ in range(60):
        world.run(0.1)
        served = {name: each.spent.seconds / each.weight - before[name] for name, each in world.tenants.items()}
        for one, other in itertools.combinations(weights, 2):
            assert abs(served[one] - served[other]) <= 4 * (dearest[one] + dearest[other])


def test_late_tenant_is_in_the_next_group_and_has_saved_up_nothing():
    world = World(a=Tenant(weight=3.0), b=Tenant(), late=Tenant(start_s=5.0)).run(5.0)
    before = len(world.groups)
    world.run(5.0)
    assert world.tenants["late"].groups[0] <= before + 1
    others = [sum(number >= before for number in world.tenants[name].groups) for name in ("b", "late")]
    assert others[1] <= others[0] + 2


def test_late_tenant_of_another_signature_is_in_the_next_group():
    world = World(**{f"t{index}": Tenant() for index in range(8)}, late=Tenant(start_s=5.0, signature="y")).run(10.0)
    first = next(number for number, group in enumerate(world.groups) if "late" in group)
    served = sum(each.spent.rows for name, each in world.tenants.items() if name != "late") / len(world.groups)
    assert served > 0
    assert world.tenants["late"].latencies[0] <= 2 * (FIXED_S + 64 * ROW_S + 64 * 0.0005) + 0.05
    assert world.groups[first] == ("late",)


def test_no_signature_starves():
    crowd = {f"t{index}": Tenant() for index in range(8)}
    world = World(**crowd, rare=Tenant(signature="y")).run(20.0)
    groups = world.tenants["rare"].groups
    gaps = [later - earlier for earlier, later in itertools.pairwise(groups)]
    assert max(gaps) <= 4
    # Encoding alone costs it the fixed part of a forward, which the others share: fewer calls, the same seconds.
    assert world.shares()["rare"] == pytest.approx(1 / 9, abs=0.02)


def test_low_class_progresses_by_ageing_under_saturation_by_a_higher_one():
    long = {"head_s": 0.02}
    world = World(low=Tenant(priority="low", **long), a=Tenant(priority="high", **long)).run(200.0)  # type: ignore[arg-type]
    assert len(world.tenants["low"].groups) == pytest.approx(200 / 20, abs=1)
    assert max(world.tenants["low"].latencies) <= 20.0 + 1.0


def test_low_class_takes_what_the_higher_ones_leave():
    world = World(low=Tenant(priority="low"), high=Tenant(priority="high", away_s=0.1)).run(20.0)
    assert len(world.tenants["high"].groups) > 60
    assert world.shares()["low"] > 0.5


def test_room_of_a_group_bounds_it_and_a_larger_call_runs_alone():
    world = World(max_rows=20, a=Tenant(rows=8), b=Tenant(rows=8), c=Tenant(rows=8), big=Tenant(rows=50)).run(10.0)
    assert {"big"} in map(set, world.groups)
    sizes = [sum(world.tenants[name].rows for name in group) for group in world.groups if "big" not in group]
    assert max(sizes) <= 20
    assert all(group == ("big",) for group in world.groups if "big" in group)


def test_choice_without_heads_is_empty():
    assert World(a=Tenant()).chooser.choose({}, 0.0, may_wait=True) == Choice()


# waiting for company


def away(count: int, **changes: float) -> dict[str, Tenant]:
    """Tenants that need a while for their next call, one row each, at different times."""
    options = {"rows": 1, "away_s": 0.03, "jitter": 0.1, **changes}
    return {f"t{index}": Tenant(start_s=0.002 * index, **options) for index in range(count)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "away_s", "gain"), [(2, 0.002, 1.5), (4, 0.01, 1.4), (8, 0.01, 1.3), (8, 0.03, 1.3)])
def test_group_waits_for_those_who_come_soon_where_a_forward_is_mostly_fixed(count: int, away_s: float, gain: float):
    """Without a wait groups run in turn, each while the others are away; none is ever full."""
    waits = World(**away(count, away_s=away_s)).run(3.0, may_wait=True)
    goes = World(**away(count, away_s=away_s)).run(3.0)
    calls = [[late for each in world.tenants.values() for late in each.latencies] for world in (waits, goes)]
    assert goes.busy / len(calls[1]) > gain * waits.busy / len(calls[0])  # device-seconds of a call
    assert sum(calls[0]) / len(calls[0]) < 1.2 * sum(calls[1]) / len(calls[1])  # until it is answered


def test_nobody_waits_where_a_forward_grows_with_its_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("test_grouping.FIXED_S", 0.0)
    world = World(**away(8)).run(1.5, may_wait=True)
    alone = World(**away(8)).run(1.5)
    assert [len(each.latencies) for each in world.tenants.values()] == [
        pytest.approx(len(each.latencies), rel=0.05) for each in alone.tenants.values()
    ]


def test_lonely_tenant_never_waits():
    world = World(a=Tenant(rows=1, away_s=0.01, jitter=0.3)).run(3.0, may_wait=True)
    assert max(world.tenants["a"].latencies) == pytest.approx(FIXED_S + ROW_S + 0.0005, rel=0.05)


def test_calls_whose_features_are_there_never_wait():
    for changes in ({"encoded": 0.0}, {"has_features": True}):
        world = World(**away(4, **changes)).run(1.0)  # type: ignore[arg-type]
        before = [len(each.latencies) for each in world.tenants.values()]
        world.run(2.0, may_wait=True)
        longest = max(max(each.latencies[count:]) for each, count in zip(world.tenants.values(), before, strict=True))
        assert longest <= 2 * 4 * 0.0005 * 1.1 + 1e-6


def test_wait_is_bounded():
    tenants = {"a": Tenant(rows=1), **away(6, away_s=0.5, jitter=0.9)}
    world = World(max_wait_s=0.005, **tenants).run(10.0, may_wait=True)
    longest_run = FIXED_S + 7 * (ROW_S + 0.0005 * 1.9)
    assert max(max(each.latencies) for each in world.tenants.values()) <= 2 * longest_run + 0.005 + 1e-6


def test_forgotten_tenant_leaves_nothing():
    world = World(a=Tenant(), b=Tenant()).run(1.0)
    world.chooser.remove("b")
    world.chooser.remove("b")
    del world.tenants["b"]
    world.run(1.0)
    assert world.groups[-1] == ("a",)
