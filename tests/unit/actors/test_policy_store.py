"""The store in process: snapshots stand for themselves, replicas are calls of ``follow``."""

import asyncio
from typing import Any

import numpy as np

from joynexus.actors.policy_store import BY_VALUE_BYTES, Changes, PolicyStore
from joynexus.observability.group_log import GroupLog
from joynexus.specs.tenant import PolicySpec
from joynexus.types import PolicySnapshot

POLICY = PolicySpec.model_validate(
    {
        "backbone": "tiny",
        "observation": {"state_dim": 1},
        "action": {"dim": 1, "horizon": 1, "num_action_steps": 1, "normalization": "identity"},
        "action_module": {"type": "gaussian"},
    }
)


def snapshot(tenant: str, version: int, mark: float = 0.0) -> PolicySnapshot:
    weights = {"mark": np.full(1, mark, dtype=np.float32)}
    return PolicySnapshot(tenant=tenant, version=version, policy=POLICY, parameters=weights, stats=None, seed=0)


class FakeReplica:
    """Holds versions as a replica does, and polls."""

    def __init__(self, store: PolicyStore, name: str = "r", backbone: str = "tiny") -> None:
        self.store, self.name, self.backbone = store, name, backbone
        self.known: Any = {}
        self.served: dict[str, dict[int, float]] = {}

    async def poll(self, timeout_s: float = 0.05) -> Changes:
        changes = await self.store.follow(self.name, self.backbone, self.known, {"seen": 1}, timeout_s)
        for tenant in changes.removed:
            self.served.pop(tenant)
        for each in changes.snapshots:
            self.served.setdefault(each.tenant, {})[each.version] = float(each.parameters["mark"][0])
        if changes.removed or changes.snapshots:
            self.known = changes.known
        return changes


def make_store() -> PolicyStore:
    return PolicyStore(keep=lambda each: each)


def test_a_replica_that_starts_late_gets_base_and_newest():
    async def main() -> dict[str, dict[int, float]]:
        store = make_store()
        for version in range(4):
            await store.publish("tiny", snapshot("a", version, mark=float(version)))
        replica = FakeReplica(store)
        await replica.poll()
        return replica.served

    assert asyncio.run(main()) == {"a": {0: 0.0, 3: 3.0}}


def test_an_older_version_and_another_backbones_change_nothing():
    async def main() -> None:
        store = make_store()
        assert await store.publish("tiny", snapshot("a", 2))
        assert not await store.publish("tiny", snapshot("a", 1))
        replica = FakeReplica(store)
        await replica.poll()
        await store.publish("other", snapshot("b", 0))
        assert (await replica.poll()).snapshots == []

    asyncio.run(main())


def test_a_poll_waits_and_is_answered_by_the_next_publication():
    async def main() -> float:
        store = make_store()
        replica = FakeReplica(store)
        poll = asyncio.create_task(replica.poll(timeout_s=10.0))
        await asyncio.sleep(0.01)
        assert not poll.done()
        await store.publish("tiny", snapshot("a", 0, mark=7.0))
        await poll
        return replica.served["a"][0]

    assert asyncio.run(main()) == 7.0


def test_c03_a_name_that_left_and_came_back_between_two_polls_is_another_tenant():
    async def main() -> dict[str, dict[int, float]]:
        store = make_store()
        replica = FakeReplica(store)
        for version in range(3):
            await store.publish("tiny", snapshot("a", version, mark=1.0))
        await replica.poll()
        await store.remove("a")
        await store.publish("tiny", snapshot("a", 0, mark=9.0))
        await replica.poll()
        return replica.served

    assert asyncio.run(main()) == {"a": {0: 9.0}}


def test_served_waits_for_every_replica_that_polls():
    async def main() -> None:
        store = make_store()
        first, second = FakeReplica(store, "one"), FakeReplica(store, "two")
        await store.publish("tiny", snapshot("a", 0))
        await first.poll()
        await second.poll()
        await store.publish("tiny", snapshot("a", 1))
        waiting = asyncio.create_task(store.served("a", 1, timeout_s=10.0))
        await first.poll()
        await first.poll()  # a replica tells what it holds with its next poll
        assert not waiting.done()
        await second.poll()
        await second.poll()
        assert await waiting
        assert not await store.served("a", 2, timeout_s=0.01)
        assert not await store.served("nobody", 0, timeout_s=0.01)

    asyncio.run(main())


def test_the_last_usage_of_each_replica_is_kept():
    async def main() -> dict[str, Any]:
        store = make_store()
        await FakeReplica(store, "gone").poll(timeout_s=0.001)
        return await store.inference_usage()

    assert asyncio.run(main()) == {"gone": {"seen": 1}}


def test_a_poll_that_tells_no_usage_leaves_what_was_told_before():
    async def main() -> None:
        store = make_store()
        await store.publish("tiny", snapshot("a", 0))
        await store.follow("r", "tiny", {}, {"seen": 1}, 0.01)
        await store.follow("r", "tiny", {}, None, 0.01)
        await store.follow("new", "tiny", {}, None, 0.01)
        assert await store.inference_usage() == {"r": {"seen": 1}, "new": {}}

    asyncio.run(main())


def test_only_a_large_snapshot_becomes_an_object():
    async def main() -> None:
        kept: list[PolicySnapshot] = []
        store = PolicyStore(keep=kept.append)
        small, large = snapshot("a", 0), snapshot("b", 0)
        large.parameters["mark"] = np.zeros(BY_VALUE_BYTES, dtype=np.float32)
        await store.publish("tiny", small)
        await store.publish("tiny", large)
        assert [each.tenant for each in kept] == ["b"]
        assert small in (await store.follow("r", "tiny", {}, {}, 0.01)).snapshots

    asyncio.run(main())


def test_groups_are_collected_over_polls_and_taken_once():
    async def scenario() -> list:
        store = PolicyStore(keep=lambda snapshot: snapshot)
        log = GroupLog()
        for samples in (3, 4):
            log.append(tenants=1, samples=samples)
            await store.follow("r", "lite", {}, {"groups": log.since()}, 0.0)
        await store.follow("r", "lite", {}, None, 0.0)
        assert await store.inference_usage() == {"r": {}}
        return await store.inference_groups()

    ((backbone, groups),) = asyncio.run(scenario())
    assert backbone == "lite"
    assert groups.samples.tolist() == [3, 4]


def test_a_fresh_usage_waits_for_each_living_replica_to_tell():
    async def scenario() -> tuple:
        store = PolicyStore(keep=lambda snapshot: snapshot)
        await store.follow("r", "lite", {}, {"seen": 1}, 0.0)
        asked = asyncio.ensure_future(store.inference_usage(30.0))
        await asyncio.sleep(0.1)
        was_done = asked.done()
        await store.follow("r", "lite", {}, {"seen": 2}, 0.0)
        return was_done, await asked

    assert asyncio.run(scenario()) == (False, {"r": {"seen": 2}})
