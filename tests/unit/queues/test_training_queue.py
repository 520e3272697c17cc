import asyncio
import pickle
from collections import Counter

import pytest

from joynexus.errors import InvalidBatchError, QueueClosedError
from joynexus.queues.training_queue import Lease, TrainingQueue
from joynexus.specs.service import QueueSpec


@pytest.fixture
def queue(loop):
    return TrainingQueue(QueueSpec(lane_items=32, max_in_flight=64, lease_s=100.0, ageing_s=10.0), clock=loop.time)


async def open_lanes(queue: TrainingQueue, *tenants: str, signature: str = "x", **options) -> None:
    for tenant in tenants:
        await queue.open_lane(tenant, signature=signature, workload=0, **options)


async def put_all(queue: TrainingQueue, items) -> list[str]:
    return [await queue.put(item) for item in items]


async def poll(
    queue: TrainingQueue, *tenants: str, each: int = 100, max_samples: int = 10_000, consumer: str = "trainer"
) -> Lease:
    """Take what is there."""
    wanted = dict.fromkeys(tenants, each)
    return await queue.gather(consumer, wanted, max_samples=max_samples, max_wait_s=0.0, timeout_s=0.0)


def ids(lease: Lease) -> list[str]:
    return [item.item_id for item in lease.items]


# put


def test_put_answers_full_at_the_bound_of_items_and_ok_again_once_one_is_leased(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(lane_items=2), clock=loop.time)

    async def main():
        await open_lanes(queue, "a")
        answers = await put_all(queue, [make_item("a", index) for index in range(3)])
        await poll(queue, "a", each=1)
        return answers, await put_all(queue, [make_item("a", index) for index in (2, 3)]), await queue.stats()

    answers, after, stats = run(main())
    assert answers == ["ok", "ok", "full"]
    assert after == ["ok", "full"]
    assert (stats["a"].waiting, stats["a"].in_flight, stats["a"].refused_full) == (2, 1, 2)


def test_put_answers_full_at_the_bound_of_bytes(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(lane_bytes=100), clock=loop.time)

    async def main():
        await open_lanes(queue, "a")
        answers = await put_all(
            queue, [make_item("a", 0, rows=6), make_item("a", 1, rows=6), make_item("a", 2, rows=7)]
        )
        return answers, await queue.put(make_item("a", 3, rows=6)), (await queue.stats())["a"].waiting_bytes

    assert run(main()) == (["ok", "ok", "full"], "full", 96)


def test_item_that_fits_no_lane_is_refused_and_not_kept_waiting(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(lane_bytes=100), clock=loop.time)

    async def main():
        await open_lanes(queue, "a")
        with pytest.raises(InvalidBatchError, match=r"104 bytes.*100"):
            await queue.put(make_item("a", rows=13))
        return await queue.put(make_item("a", rows=12))

    assert run(main()) == "ok"


def test_put_without_a_lane_is_closed(run, queue, make_item):
    async def main():
        first = await queue.put(make_item("a"))
        await open_lanes(queue, "a")
        too_early = await queue.put(make_item("a", workload=1))
        await queue.close_lane("a")
        await queue.close_lane("a")
        return first, too_early, await queue.put(make_item("a")), await queue.stats()

    assert run(main()) == ("closed", "closed", "closed", {})


@pytest.mark.parametrize("version", [None, 3])
def test_repeated_put_is_a_duplicate_while_waiting_leased_and_acknowledged(run, queue, make_item, version):
    item = make_item("a", 0, version=version)

    async def main():
        await open_lanes(queue, "a")
        answers = [await queue.put(item), await queue.put(item)]
        lease = await poll(queue, "a")
        answers.append(await queue.put(item))
        await queue.acknowledge("trainer", ids(lease))
        answers.append(await queue.put(item))
        return answers, (await queue.stats())["a"]

    answers, stats = run(main())
    assert answers == ["ok", "duplicate", "duplicate", "duplicate"]
    assert (stats.waiting, stats.duplicates, stats.acknowledged) == (0, 3, 1)


def test_dataset_items_below_the_start_of_a_resumed_lane_are_duplicates(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", next_episode=5)
        return await put_all(queue, [make_item("a", index) for index in (4, 5)])

    assert run(main()) == ["duplicate", "ok"]


def test_another_try_of_an_episode_is_no_duplicate(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        first, second = (make_item("a", 7, version=1, item_id=f"a/7/try{attempt}") for attempt in range(2))
        return [await queue.put(first), await queue.put(second)]

    assert run(main()) == ["ok", "ok"]


def test_id_of_another_tenants_item_is_refused(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await queue.put(make_item("a", item_id="same"))
        with pytest.raises(InvalidBatchError, match="same"):
            await queue.put(make_item("b", item_id="same"))
        assert await queue.acknowledge("trainer", ["same"]) == 1
        return await queue.put(make_item("b", item_id="same"))

    assert run(main()) == "ok"


def test_what_is_remembered_of_acknowledged_items_is_bounded(run, queue, make_item, monkeypatch):
    monkeypatch.setattr("joynexus.queues.lane._REMEMBERED", 10)

    async def main():
        await open_lanes(queue, "sft", "rl", "gap")
        for index in range(100):
            for item in (make_item("sft", index), make_item("rl", index, version=1), make_item("gap", index + 5)):
                assert await queue.put(item) == "ok"
            await queue.acknowledge("trainer", ids(await poll(queue, "sft", "rl", "gap")))
        again = [await queue.put(make_item("sft", index)) for index in range(100)]
        assert set(again) == {"duplicate"}
        assert await queue.put(make_item("rl", 99, version=1)) == "duplicate"
        assert await queue.put(make_item("gap", 104)) == "duplicate"
        done = [queue._book.lane(tenant)._done for tenant in ("sft", "rl", "gap")]
        return [len(each._ordinals) + len(each._ids) for each in done]

    assert all(size <= 10 for size in run(main()))


# fairness and grouping


def test_weights_three_one_one_are_exact_under_saturation(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(max_in_flight=64), clock=loop.time)
    weights = {"a": 3.0, "b": 1.0, "c": 1.0}
    served = Counter()

    async def main():
        made = Counter()
        for tenant, weight in weights.items():
            await queue.open_lane(tenant, signature="x", workload=0, weight=weight)
        for _ in range(50):
            for tenant in weights:
                while await queue.put(make_item(tenant, made[tenant], rows=4)) == "ok":
                    made[tenant] += 1
            lease = await poll(queue, *weights, max_samples=40)
            assert sum(item.cost for item in lease.items) == 40
            served.update(item.tenant for item in lease.items)
            await queue.acknowledge("trainer", ids(lease))

    run(main())
    assert {tenant: served[tenant] / 500 for tenant in weights} == {
        "a": pytest.approx(0.6, abs=0.012),
        "b": pytest.approx(0.2, abs=0.004),
        "c": pytest.approx(0.2, abs=0.004),
    }


def test_three_hundred_puts_by_one_do_not_hold_up_another(run, queue, make_item):
    async def main():
        await open_lanes(queue, "flood", "b")
        flood = asyncio.gather(*(queue.put(make_item("flood", index)) for index in range(300)))
        late = asyncio.create_task(queue.put(make_item("b")))
        answers = Counter(await flood)
        assert await late == "ok"
        lease = await poll(queue, "flood", "b", max_samples=8)
        return answers, [item.tenant for item in lease.items]

    answers, tenants = run(main())
    assert answers == {"ok": 32, "full": 268}
    assert "b" in tenants[:2]


def test_late_tenant_is_in_the_next_group(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item(tenant, index) for tenant in "ab" for index in range(32)])
        for _ in range(5):
            await poll(queue, "a", "b", max_samples=8)
        await open_lanes(queue, "late")
        await queue.put(make_item("late"))
        return [item.tenant for item in (await poll(queue, "a", "b", "late", max_samples=8)).items]

    assert "late" in run(main())


def test_a_group_has_one_signature_and_the_rare_one_never_starves(run, queue, make_item):
    groups: list[set[str]] = []

    async def main():
        crowd = [f"t{index}" for index in range(4)]
        await open_lanes(queue, *crowd, signature="x")
        await open_lanes(queue, "rare", signature="y")
        made = Counter()
        for _ in range(50):
            for tenant in (*crowd, "rare"):
                while await queue.put(make_item(tenant, made[tenant])) == "ok":
                    made[tenant] += 1
            lease = await poll(queue, *crowd, "rare", max_samples=8)
            groups.append({item.tenant for item in lease.items})
            assert lease.signature == ("y" if "rare" in groups[-1] else "x")
            await queue.acknowledge("trainer", ids(lease))

    run(main())
    assert all("rare" not in group or group == {"rare"} for group in groups)
    # Each of five equal tenants gets a fifth of the samples, whatever its signature.
    assert sum("rare" in group for group in groups) == pytest.approx(10, abs=1)


def test_low_priority_is_served_last_but_ageing_lifts_it(run, queue, make_item):
    async def main():
        await open_lanes(queue, "high", priority="high")
        await open_lanes(queue, "low", priority="low")
        await put_all(queue, [make_item(tenant, index) for tenant in ("low", "high") for index in range(5)])
        first = [item.tenant for item in (await poll(queue, "high", "low", max_samples=3)).items]
        await asyncio.sleep(20.0)
        await queue.put(make_item("high", 5))
        aged = [item.tenant for item in (await poll(queue, "high", "low", max_samples=2)).items]
        after = [item.tenant for item in (await poll(queue, "high", "low", max_samples=1)).items]
        return first, aged, after

    first, aged, after = run(main())
    assert first == ["high"] * 3
    assert "low" in aged
    assert after == ["high"]


def test_group_is_bounded_by_samples_and_small_items_fill_what_a_large_one_leaves(run, queue, make_item):
    async def main():
        await open_lanes(queue, "large", "small")
        await put_all(queue, [make_item("large", index, rows=6) for index in range(2)])
        await put_all(queue, [make_item("small", index) for index in range(10)])
        return [
            Counter(item.tenant for item in (await poll(queue, "large", "small", max_samples=8)).items) for _ in "123"
        ]

    # The second group pays the small ones back what the first gave the large one.
    assert run(main()) == [{"large": 1, "small": 2}, {"small": 8}, {"large": 1}]


def test_item_larger_than_a_group_goes_alone(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item("a", 0, rows=20), make_item("a", 1), make_item("b", 0)])
        return [ids(await poll(queue, "a", "b", max_samples=8)) for _ in range(2)]

    assert run(main()) == [["a/0/0"], ["b/0/0", "a/0/1"]]


def test_no_more_items_than_wanted_and_none_of_others(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b", "c")
        await put_all(queue, [make_item(tenant, index) for tenant in "abc" for index in range(3)])
        wanted = {"a": 2, "b": 0, "gone": 5}
        return ids(await queue.gather("trainer", wanted, max_samples=100, max_wait_s=0.0))

    assert run(main()) == ["a/0/0", "a/0/1"]


def test_items_of_a_tenant_keep_their_order(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item(tenant, index) for index in range(9) for tenant in "ab"])
        got = [item for _ in range(6) for item in (await poll(queue, "a", "b", max_samples=3)).items]
        return [[item.ordinal for item in got if item.tenant == tenant] for tenant in "ab"]

    assert run(main()) == [list(range(9))] * 2


# waiting


def test_gather_times_out_empty(run, loop, queue):
    async def main():
        await open_lanes(queue, "a")
        lease = await queue.gather("trainer", {"a": 1}, max_samples=8, max_wait_s=5.0, timeout_s=2.0)
        return bool(lease), lease.signature, loop.time()

    assert run(main()) == (False, "", pytest.approx(2.0))


def test_gather_waits_for_the_first_and_then_up_to_max_wait_for_others(run, loop, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b", "c")
        gather = asyncio.create_task(
            queue.gather("trainer", dict.fromkeys("abc", 9), max_samples=8, max_wait_s=0.5, timeout_s=100.0)
        )
        await asyncio.sleep(10.0)
        await queue.put(make_item("a"))
        await asyncio.sleep(0.4)
        await queue.put(make_item("b"))
        lease = await gather
        return [item.tenant for item in lease.items], loop.time()

    assert run(main()) == (["a", "b"], pytest.approx(10.5))


def test_gather_does_not_wait_once_all_that_are_wanted_are_ready(run, loop, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await open_lanes(queue, "other", signature="y")
        await queue.put(make_item("a"))
        wanted = {"a": 9, "b": 9, "other": 9, "has no lane": 9}
        gather = asyncio.create_task(queue.gather("trainer", wanted, max_samples=8, max_wait_s=50.0))
        await asyncio.sleep(1.0)
        await queue.put(make_item("b"))
        lease = await gather
        return len(lease.items), loop.time()

    assert run(main()) == (2, pytest.approx(1.0))


def test_gather_does_not_wait_once_the_group_is_full(run, loop, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item("a", index, rows=4) for index in range(3)])
        lease = await queue.gather("trainer", {"a": 9, "b": 9}, max_samples=8, max_wait_s=50.0)
        return len(lease.items), loop.time()

    assert run(main()) == (2, 0.0)


def test_full_counts_only_what_is_wanted(run, loop, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item("a", index, rows=4) for index in range(3)])
        lease = await queue.gather("trainer", {"a": 1, "b": 1}, max_samples=8, max_wait_s=50.0)
        return len(lease.items), loop.time()

    assert run(main()) == (1, pytest.approx(50.0))


def test_items_that_another_took_while_the_group_filled_are_waited_for_again(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        slow = asyncio.create_task(
            queue.gather("slow", {"a": 1, "b": 1}, max_samples=8, max_wait_s=5.0, timeout_s=60.0)
        )
        await queue.put(make_item("a", 0))
        await asyncio.sleep(1.0)
        fast = await poll(queue, "a", consumer="fast")
        await asyncio.sleep(20.0)
        await queue.put(make_item("a", 1))
        return ids(fast), ids(await slow)

    assert run(main()) == (["a/0/0"], ["a/0/1"])


# leases


def test_expired_lease_returns_its_items_in_order_at_the_heads(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item(tenant, index) for index in range(6) for tenant in "ab"])
        first = await poll(queue, "a", "b", each=2)
        await asyncio.sleep(100.0)
        again = await poll(queue, "a", "b", consumer="next")
        return (
            sorted(ids(first)),
            [item.ordinal for item in again.items if item.tenant == "a"],
            (await queue.stats())["a"],
        )

    first, ordinals, stats = run(main())
    assert first == ["a/0/0", "a/0/1", "b/0/0", "b/0/1"]
    assert ordinals == [0, 1, 2, 3, 4, 5]
    assert (stats.returned, stats.in_flight, stats.leased) == (2, 6, 8)


@pytest.mark.parametrize("order", ["earlier first", "later first"])
def test_leases_that_overlap_come_back_in_order_whichever_ends_first(run, queue, make_item, order):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index) for index in range(8)])
        for name in ("one", "two", "one", "two"):
            await poll(queue, "a", each=1, consumer=name)
        for name in ("one", "two") if order == "earlier first" else ("two", "one"):
            assert await queue.release(name) == 2
        return [item.ordinal for item in (await poll(queue, "a")).items]

    assert run(main()) == list(range(8))


def test_renewed_lease_does_not_expire_and_another_consumers_does(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index) for index in range(2)])
        await poll(queue, "a", each=1, consumer="alive")
        await poll(queue, "a", each=1, consumer="dead")
        for _ in range(4):
            await asyncio.sleep(60.0)
            await queue.renew("alive")
        return ids(await poll(queue, "a"))

    assert run(main()) == ["a/0/1"]


@pytest.mark.parametrize("sign_of_life", ["gather", "acknowledge"])
def test_a_consumer_that_works_need_not_renew(run, queue, make_item, sign_of_life):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index) for index in range(5)])
        await poll(queue, "a", each=1)
        for index in range(1, 4):
            await asyncio.sleep(60.0)
            if sign_of_life == "gather":
                await poll(queue, "a", each=1)
            else:
                await queue.acknowledge("trainer", [f"a/0/{index}"])
        return (await queue.stats())["a"].returned

    assert run(main()) == 0


def test_blocked_gather_gets_the_items_of_a_lease_that_expires(run, loop, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        await queue.put(make_item("a"))
        await poll(queue, "a", consumer="dead")
        lease = await queue.gather("trainer", {"a": 1}, max_samples=8, max_wait_s=0.0, timeout_s=1000.0)
        return ids(lease), loop.time()

    assert run(main()) == (["a/0/0"], pytest.approx(100.0))


def test_release_returns_everything_at_once(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item(tenant, index) for index in range(2) for tenant in "ab"])
        await poll(queue, "a", "b")
        gather = asyncio.create_task(
            queue.gather("next", {"a": 9, "b": 9}, max_samples=99, max_wait_s=0.0, timeout_s=99.0)
        )
        await asyncio.sleep(1.0)
        assert await queue.release("trainer") == 4
        assert await queue.release("trainer") == 0
        return sorted(ids(await gather))

    assert run(main()) == ["a/0/0", "a/0/1", "b/0/0", "b/0/1"]


def test_acknowledge_is_idempotent_and_counts_what_it_knew(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index) for index in range(3)])
        lease = await poll(queue, "a", each=2)
        counts = [await queue.acknowledge("trainer", names) for names in (ids(lease), ids(lease), ["nobody's"])]
        await asyncio.sleep(200.0)
        return counts, ids(await poll(queue, "a")), (await queue.stats())["a"].acknowledged

    assert run(main()) == ([2, 0, 0], ["a/0/2"], 2)


@pytest.mark.parametrize("leased_again", [False, True])
def test_late_acknowledgement_still_holds(run, queue, make_item, leased_again):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index) for index in range(2)])
        lease = await poll(queue, "a", each=1, consumer="slow")
        await asyncio.sleep(150.0)
        if leased_again:
            assert ids(await poll(queue, "a", each=1, consumer="other")) == ids(lease)
        assert await queue.acknowledge("slow", ids(lease)) == 1
        await queue.release("other")
        return ids(await poll(queue, "a")), (await queue.stats())["a"].waiting_samples

    assert run(main()) == (["a/0/1"], 0)


def test_max_in_flight_holds_a_tenant_back_until_it_acknowledges(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(max_in_flight=3), clock=loop.time)

    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item(tenant, index) for tenant in "ab" for index in range(5)])
        first = await poll(queue, "a")
        nothing = await poll(queue, "a")
        others = await poll(queue, "a", "b")
        blocked = asyncio.create_task(queue.gather("trainer", {"a": 9}, max_samples=99, max_wait_s=0.0, timeout_s=50.0))
        await asyncio.sleep(1.0)
        await queue.acknowledge("trainer", ids(first)[:1])
        return ids(first), ids(nothing), ids(others), ids(await blocked)

    first, nothing, others, after = run(main())
    assert (len(first), nothing, after) == (3, [], ["a/0/3"])
    assert others == ["b/0/0", "b/0/1", "b/0/2"]


def test_a_workload_that_needs_more_in_flight_gets_it(run, loop, make_item):
    queue = TrainingQueue(QueueSpec(max_in_flight=3), clock=loop.time)

    async def main():
        await queue.open_lane("a", signature="s", workload=0, max_in_flight=5)
        await put_all(queue, [make_item("a", index) for index in range(9)])
        return ids(await poll(queue, "a"))

    assert len(run(main())) == 5


def test_consumer_killed_while_blocked_in_gather_swallows_nothing(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        zombie = asyncio.create_task(queue.gather("trainer", {"a": 9}, max_samples=9, max_wait_s=5.0, timeout_s=1000.0))
        await asyncio.sleep(1.0)
        assert await queue.release("trainer") == 0  # its successor starts with this
        await queue.put(make_item("a"))
        successor = await poll(queue, "a")
        return ids(await zombie), ids(successor)

    assert run(main()) == ([], ["a/0/0"])


def test_consumer_killed_while_its_group_fills_swallows_nothing(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        zombie = asyncio.create_task(
            queue.gather("trainer", {"a": 9, "b": 9}, max_samples=9, max_wait_s=500.0, timeout_s=1000.0)
        )
        await queue.put(make_item("a"))
        await asyncio.sleep(1.0)
        await queue.release("trainer")
        return ids(await zombie), ids(await poll(queue, "a"))

    assert run(main()) == ([], ["a/0/0"])


@pytest.mark.parametrize("put_first", [False, True])
def test_cancelled_gather_takes_nothing(run, queue, make_item, put_first):
    """Also where the item that it waited for came in the same turn of the loop."""

    async def main():
        await open_lanes(queue, "a")
        gather = asyncio.create_task(queue.gather("trainer", {"a": 9}, max_samples=9, max_wait_s=0.0, timeout_s=1000.0))
        await asyncio.sleep(1.0)
        if put_first:
            await queue.put(make_item("a"))
            gather.cancel()
        else:
            gather.cancel()
            await queue.put(make_item("a"))
        with pytest.raises(asyncio.CancelledError):
            await gather
        stats = (await queue.stats())["a"]
        return stats.waiting, stats.in_flight, queue._waiters

    assert run(main()) == (1, 0, {})


# versions, workloads, episodes


def test_min_version_drops_older_items_counts_them_and_refuses_more(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item("a", index, version=index) for index in range(4)])
        await put_all(queue, [make_item("b", 0, version=0), make_item("b", 1)])
        dropped = [await queue.set_min_version("a", 2), await queue.set_min_version("a", 1)]
        answers = await put_all(
            queue, [make_item("a", 9, version=1), make_item("a", 10, version=2), make_item("a", 11)]
        )
        stats = await queue.stats()
        return dropped, answers, stats["a"], stats["b"], ids(await poll(queue, "a"))

    dropped, answers, a, b, left = run(main())
    assert dropped == [2, 0]
    assert answers == ["stale", "ok", "ok"]
    assert (a.dropped_stale, a.waiting, a.waiting_samples, a.min_version) == (3, 4, 4, 2)
    assert (b.dropped_stale, b.waiting) == (0, 2)
    assert left == ["a/0/2", "a/0/3", "a/0/10", "a/0/11"]


def test_leased_item_that_has_become_stale_is_dropped_when_it_comes_back(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index, version=index) for index in range(3)])
        await poll(queue, "a", each=2)
        assert await queue.set_min_version("a", 1) == 0
        await queue.release("trainer")
        return ids(await poll(queue, "a")), (await queue.stats())["a"].dropped_stale

    assert run(main()) == (["a/0/1", "a/0/2"], 1)


def test_new_workload_drops_what_is_left_of_the_old_one(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        await put_all(queue, [make_item("a", index) for index in range(4)])
        lease = await poll(queue, "a", each=1)
        await queue.open_lane("a", signature="x", workload=1)
        answers = await put_all(queue, [make_item("a", 9), make_item("a", 0, workload=1)])
        late = await queue.acknowledge("trainer", ids(lease))
        returned = await queue.release("trainer")
        stats = (await queue.stats())["a"]
        return answers, late, returned, stats.dropped_stale, ids(await poll(queue, "a"))

    assert run(main()) == (["stale", "ok"], 0, 0, 4, ["a/1/0"])


def test_opening_again_changes_nothing_and_an_older_workload_is_ignored(run, queue, make_item):
    async def main():
        await queue.open_lane("a", signature="x", workload=1, next_episode=4)
        await queue.put(make_item("a", 4, workload=1))
        await queue.take_episodes("a", 10)
        before = await queue.stats()
        await queue.open_lane("a", signature="x", workload=1, next_episode=4)
        await queue.open_lane("a", signature="y", workload=0, next_episode=99)
        return before, await queue.stats()

    before, after = run(main())
    assert before == after
    assert after["a"].next_episode == 14


def test_closed_lane_leaves_nothing_behind(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        await put_all(queue, [make_item("a", 0), make_item("a", 1), make_item("b", 0)])
        lease = await poll(queue, "a", each=1)
        await queue.close_lane("a")
        assert await queue.acknowledge("trainer", ids(lease)) == 0
        assert await queue.release("trainer") == 0
        assert list(queue._book._entries) == ["b/0/0"]
        assert "a" not in queue._book._fair
        await open_lanes(queue, "a")
        return await queue.put(make_item("a", 0)), ids(await poll(queue, "a"))

    assert run(main()) == ("ok", ["a/0/0"])


def test_episodes_are_handed_out_once_over_all_workers(run, queue):
    async def main():
        await open_lanes(queue, "a", next_episode=100)
        firsts = await asyncio.gather(*(queue.take_episodes("a", count) for count in (1, 3, 2, 4)))
        with pytest.raises(QueueClosedError, match="'b'"):
            await queue.take_episodes("b", 1)
        return sorted(firsts)

    assert run(main()) == [100, 101, 104, 106]


# cases


def test_c20_each_blocked_consumer_gets_only_its_own_and_all_of_it(run, loop, make_item):
    """64 concurrent producers with keyed items, the consumers blocked first: blocked gets must not starve puts."""
    queue = TrainingQueue(QueueSpec(lane_items=4), clock=loop.time)
    tenants = [f"t{index}" for index in range(64)]
    num_items = 20

    async def produce(tenant: str) -> None:
        for ordinal in range(num_items):
            while await queue.put(make_item(tenant, ordinal)) == "full":
                await asyncio.sleep(0.001)

    async def consume(tenant: str) -> list[str]:
        got: list[str] = []
        while len(got) < num_items:
            lease = await queue.gather(tenant, {tenant: 2}, max_samples=2, max_wait_s=0.001, timeout_s=10.0)
            got += ids(lease)
            await queue.acknowledge(tenant, ids(lease))
        return got

    async def main():
        for index, tenant in enumerate(tenants):
            await queue.open_lane(tenant, signature=f"s{index % 3}", workload=0)
        consumers = [asyncio.create_task(consume(tenant)) for tenant in tenants]
        await asyncio.sleep(0.1)
        await asyncio.gather(*(produce(tenant) for tenant in reversed(tenants)))
        got = await asyncio.gather(*consumers)
        return dict(zip(tenants, got, strict=True)), await queue.stats()

    got, stats = run(main())
    assert got == {tenant: [f"{tenant}/0/{ordinal}" for ordinal in range(num_items)] for tenant in tenants}
    assert {(each.waiting, each.in_flight, each.acknowledged) for each in stats.values()} == {(0, 0, num_items)}
    assert loop.time() < 5.0


def test_one_queue_serves_several_loops_one_after_the_other(make_item):
    """It binds to no loop when it is made: a Ray actor's constructor may run outside the loop of its methods."""
    queue = TrainingQueue(QueueSpec())

    async def turn(ordinal: int) -> list[str]:
        await open_lanes(queue, "a")
        gather = asyncio.create_task(queue.gather("t", {"a": 9}, max_samples=9, max_wait_s=0.0, timeout_s=5.0))
        await asyncio.sleep(0)
        await queue.put(make_item("a", ordinal))
        return ids(await gather)

    assert [asyncio.run(turn(index)) for index in range(2)] == [["a/0/0"], ["a/0/1"]]


def test_ping_answers_while_a_gather_is_blocked(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a", "b")
        gather = asyncio.create_task(queue.gather("t", {"b": 1}, max_samples=9, max_wait_s=0.0, timeout_s=50.0))
        await asyncio.sleep(1.0)
        await queue.put(make_item("a"))
        answer = await queue.ping()
        assert not gather.done()
        return answer

    assert run(main()) == {"a": 1, "b": 0}


def test_answers_cross_processes(run, queue, make_item):
    async def main():
        await open_lanes(queue, "a")
        await queue.put(make_item("a"))
        return await poll(queue, "a"), await queue.stats()

    lease, stats = run(main())
    assert ids(pickle.loads(pickle.dumps(lease))) == ["a/0/0"]
    assert pickle.loads(pickle.dumps(stats)) == stats
