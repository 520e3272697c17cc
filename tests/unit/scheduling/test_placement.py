import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.errors import PlacementError
from joynexus.scheduling.placement import NodeResources, check_bundles, service_bundles
from joynexus.specs.base import Resources


def cpus(*amounts: float) -> list[Resources]:
    return [Resources(num_cpus=each) for each in amounts]


def nodes(*totals: float, free: tuple[float, ...] | None = None) -> list[NodeResources]:
    return [
        NodeResources(name=f"n{i}", total={"CPU": total}, available=None if free is None else {"CPU": free[i]})
        for i, total in enumerate(totals)
    ]


def test_c24_roles_that_need_four_cpus_are_refused_on_one():
    with pytest.raises(PlacementError) as caught:
        check_bundles(cpus(1, 1, 1, 1), nodes(1, free=(0.5,)), owner="tenant 'alice'")
    assert str(caught.value) == (
        "tenant 'alice': cannot be placed: needed are 4 CPU in 4 bundles; the cluster has 1 CPU on 1 nodes, 0.5 CPU "
        "free. Lower the resources or the workers, or add nodes."
    )


def test_a_bundle_larger_than_any_node_is_refused_though_the_sum_would_do():
    with pytest.raises(PlacementError, match="a bundle needs 3 CPU, and no node has more than 2 CPU"):
        check_bundles(cpus(3), nodes(2, 2), owner="a")


def test_busy_is_told_from_impossible():
    assert check_bundles(cpus(1, 1), nodes(2, free=(2.0,)), owner="a") == "now"
    assert check_bundles(cpus(1, 1), nodes(2, free=(1.0,)), owner="a") == "later"


def test_what_the_autoscaler_may_add_counts_for_later():
    more = [NodeResources(name="worker", total={"CPU": 8})]
    assert check_bundles(cpus(4), nodes(1), owner="a", may_add=more) == "later"
    with pytest.raises(PlacementError, match="needs 9 CPU"):
        check_bundles(cpus(9), nodes(1), owner="a", may_add=more)


def test_the_services_own_roles_are_never_counted_as_free(make_service):
    service = make_service(inference={"num_replicas": 2})
    held = service_bundles(service)
    assert sum(each.num_cpus for each in held) == pytest.approx(0.5 + 0.05 + 2 * 0.25)
    assert check_bundles(cpus(0.9), nodes(2), owner="a", held=held) == "now"
    with pytest.raises(PlacementError, match=r"beside 1\.05 CPU of the service's own roles"):
        check_bundles(cpus(1, 0.5), nodes(2), owner="a", held=held)


def test_fractions_add_up_exactly():
    assert check_bundles(cpus(*[0.1] * 10), nodes(1), owner="a") == "now"
    with pytest.raises(PlacementError):
        check_bundles(cpus(*[0.1] * 11), nodes(1), owner="a")


def test_all_resources_count():
    need = [Resources(num_cpus=1, num_gpus=0.5, memory_bytes=1 << 30, custom={"env": 2.0})]
    whole = {"CPU": 4.0, "GPU": 1.0, "memory": float(2 << 30), "env": 2.0}
    assert check_bundles(need, [NodeResources(name="a", total=whole)], owner="a") == "now"
    for name in whole:
        less = {**whole, name: 0.1}
        with pytest.raises(PlacementError, match=name):
            check_bundles(need, [NodeResources(name="a", total=less)], owner="a")


def test_bundles_that_stand_together_need_one_node():
    assert check_bundles(cpus(1, 1), nodes(1, 1), owner="a") == "now"
    with pytest.raises(PlacementError):
        check_bundles(cpus(1, 1), nodes(1, 1), owner="a", together=True)


def test_nothing_fits_anywhere_even_without_nodes():
    assert check_bundles([], [], owner="a") == "now"
    with pytest.raises(PlacementError, match="0 CPU on 0 nodes"):
        check_bundles(cpus(1), [], owner="a")


def test_a_search_too_large_to_decide_lets_ray_try():
    # 65 bundles of 2 on nodes of 3: the greedy search fails and the exact one is not tried.
    assert check_bundles(cpus(*[2] * 65), nodes(*[3] * 64, 1, 1), owner="a") == "later"


@settings(deadline=None, max_examples=150)
@given(needs=st.lists(st.integers(1, 6), max_size=5), rooms=st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_the_decision_is_that_of_trying_everything(needs, rooms):
    def fits(choice: tuple[int, ...]) -> bool:
        return all(sum(n for n, at in zip(needs, choice, strict=True) if at == i) <= r for i, r in enumerate(rooms))

    possible = any(fits(choice) for choice in itertools.product(range(len(rooms)), repeat=len(needs)))
    try:
        answer = check_bundles(cpus(*needs), nodes(*rooms), owner="a")
    except PlacementError:
        answer = "never"
    assert answer == ("now" if possible else "never")
