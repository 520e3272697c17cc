"""Whatever tenants do beside each other, each gets what it gets alone: parameters, moments, draws, losses, errors."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from training_scenarios import Move, Plan, Run, Scenario, alone, compare, faulty_losses, scenarios, together
from training_world import backbone

from joynexus.training.losses import LOSSES

pytestmark = pytest.mark.timeout(300)  # many small runs, on a busy machine


@pytest.fixture(scope="module")
def running() -> Iterator[list[Run]]:
    """The engines in which a loss may close a neighbour's slot: the last one, if any."""
    runs: list[Run] = []
    losses = faulty_losses(lambda: runs[-1] if runs else None)
    LOSSES.update(losses)
    yield runs
    for name in losses:
        del LOSSES[name]


@pytest.fixture(scope="module", autouse=True)
def _backbone_stays_as_it_is() -> Iterator[None]:
    before = backbone().checksum()
    yield
    assert backbone().checksum() == before


def check(scenario: Scenario, running: list[Run]) -> None:
    running.clear()
    expected = alone(scenario)
    for tenant, outcome in together(scenario, running.append).items():
        compare(outcome, expected[tenant])


@settings(settings.get_profile("exactness"), max_examples=20)
@given(scenario=scenarios)
def test_each_tenant_gets_beside_others_what_it_gets_alone(running: list[Run], scenario: Scenario) -> None:
    check(scenario, running)


def test_the_comparison_sees_a_difference(running: list[Run]) -> None:
    moves = (Move("train", 2, 0),)
    one, other = (Scenario((Plan("oft", seed, None, 12, moves, None),), (), 0, 256) for seed in range(2))
    running.clear()
    with pytest.raises(AssertionError):
        compare(alone(one)["tenant-0"], alone(other)["tenant-0"])


def test_every_fault_at_once(running: list[Run]) -> None:
    """One tenant of each fault, all in one group, around two that are well; the last one loses its slot meanwhile."""
    faults = ("nan", "raises", "infinite_gradient", "bad_features", "closing")
    good = tuple(Move(kind, 3, content) for content, kind in enumerate(("train", "forward", "carried", "step")))
    plans = [Plan("gaussian", 1, 0.5, 12, good, None), Plan("oft", 2, None, 12, good, None)]
    plans[1:1] = [Plan("flow_matching", 0, 0.0, 12, (good[0], Move(fault, 2, 1), good[1]), None) for fault in faults]
    plans.append(Plan("oft", 2, None, 12, good, 99))
    scenario = Scenario(tuple(plans), (), store_rows=3, max_group=256)
    check(scenario, running)
    outcomes = together(scenario, running.append)
    assert outcomes[f"tenant-{len(plans) - 1}"].state is None
    assert [outcomes[f"tenant-{index}"].answers[1][0] for index in range(1, 5)] == [
        "NonFiniteError", "TenantFailedError", "NonFiniteError", "NonFiniteError"
    ]  # fmt: skip
