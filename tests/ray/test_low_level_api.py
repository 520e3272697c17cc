"""Every low-level call of a tenant against a live service: order, repetition, versions, state, and what stays."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import ray
from ray_world import counter, evaluation_workload, leftovers, rl_workload, tenant_spec, wait_until
from safetensors.numpy import load_file

from joynexus.actors import names
from joynexus.actors.roles import RoleClient, find_role
from joynexus.api import Service, Tenant
from joynexus.envs.base import EpisodeStart
from joynexus.errors import (
    CheckpointError,
    InvalidBatchError,
    NonFiniteError,
    SequenceConflictError,
    ServiceError,
    SimulatorError,
    SpecError,
    StalePolicyError,
    TenantFailedError,
    TenantNotFoundError,
    UnknownComponentError,
)
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.types import ActionChunk, Loss, Observation, TrainingBatch, TrainingCall

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

Opener = Callable[..., Tenant]
FAST = OptimizerSpec(lr=1e-2)
WAIT_S = 60.0
_numbers = count()


@pytest.fixture
def open_tenant(service: Service) -> Iterator[Opener]:
    """Open tenants without workloads; they are stopped after the test, if the test has not done it."""
    opened: list[str] = []

    def open_one(label: str = "t", **changes: object) -> Tenant:
        name = f"{label}-{next(_numbers)}"
        opened.append(name)
        return service.open(tenant_spec(name, **changes), timeout_s=WAIT_S)

    yield open_one
    for name in opened:
        service.request_stop(name)
    for name in opened:
        service.stop(name)


def observation(rows: int = 1, seed: int = 0, *, image_side: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    cameras, side = (1, image_side) if image_side else (0, 16)
    return Observation(
        images=rng.integers(0, 256, (rows, cameras, side, side, 3), dtype=np.uint8),
        image_mask=np.ones((rows, cameras), dtype=np.bool_),
        state=rng.standard_normal((rows, 4)).astype(np.float32),
        instructions=("count",) * rows,
    )


def batch(rows: int = 2, seed: int = 0, *, image_side: int = 0) -> TrainingBatch:
    rng = np.random.default_rng(1000 + seed)
    return TrainingBatch(
        observation=observation(rows, seed, image_side=image_side),
        actions=rng.uniform(-0.9, 0.9, (rows, 4, 1)).astype(np.float32),
        action_is_pad=np.zeros((rows, 4), dtype=np.bool_),
        sample_ids=tuple(f"{seed}/{row}" for row in range(rows)),
    )


def exported(tenant: Tenant, folder: Path) -> dict[str, np.ndarray]:
    """A tenant's present parameters, as its export holds them."""
    return load_file(Path(tenant.export(folder / tenant.name).result(WAIT_S)) / "module.safetensors")


def are_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def deterministic(tenant: Tenant, version: int | None = None) -> ActionChunk:
    return tenant.predict(observation(), deterministic=True, version=version).result(WAIT_S)


# ---- training calls


def test_c12_four_calls_queued_without_awaiting_equal_awaited_ones(open_tenant: Opener, tmp_path: Path) -> None:
    """The first batch is so large that Ray delivers it after the small calls made behind it."""
    side = 64
    policy = {"observation": {"cameras": ["front"], "image_size": [side, side]}}
    queued, awaited = (open_tenant(label, seed=5, policy=policy) for label in ("queued", "awaited"))
    large, small = batch(24, 1, image_side=side), batch(1, 2, image_side=side)
    assert large.nbytes > 250_000
    futures = []
    for _ in range(3):
        futures += [queued.forward_backward(large), queued.optim_step(FAST)]
        futures += [queued.forward_backward(small), queued.optim_step(FAST)]
    for _ in range(3):
        for data in (large, small):
            awaited.forward_backward(data).result(WAIT_S)
            awaited.optim_step(FAST).result(WAIT_S)

    results = [each.result(WAIT_S) for each in futures]
    assert [each.sequence for each in results] == list(range(12))
    assert [each.optimizer_steps for each in results] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert are_equal(exported(queued, tmp_path), exported(awaited, tmp_path))


def test_c13_two_parts_of_a_batch_weigh_as_much_as_their_union(open_tenant: Opener, tmp_path: Path) -> None:
    parts, union = open_tenant("parts", seed=2), open_tenant("union", seed=2)
    first, second = batch(3, 1), batch(1, 2)
    for each in (first, second):
        parts.forward_backward(each)
    parts.optim_step(FAST)
    assert union.train_batch(TrainingBatch.concatenate([first, second]), optimizer=FAST).result(WAIT_S).metrics["loss"]

    found, wanted = exported(parts, tmp_path), exported(union, tmp_path)
    assert found.keys() == wanted.keys()
    assert max(float(np.abs(found[name] - wanted[name]).max()) for name in found) <= 1e-6


def test_c14_a_call_that_is_sent_again_is_one_update(service: Service, open_tenant: Opener, tmp_path: Path) -> None:
    again, once = open_tenant("again", seed=3), open_tenant("once", seed=3)
    trainer = RoleClient(names.trainer("tiny"), service.namespace)

    def call(data: TrainingBatch) -> TrainingCall:
        return TrainingCall(tenant=again.name, sequence=0, batch=data, loss=Loss(name="supervised"), optimizer=FAST)

    results = [trainer.call("submit", call(batch(2, 1))) for _ in range(3)]
    once.train_batch(batch(2, 1), optimizer=FAST).result(WAIT_S)

    assert results[0] == results[1] == results[2]
    assert results[0].optimizer_steps == 1
    assert are_equal(exported(again, tmp_path), exported(once, tmp_path))
    with pytest.raises(SequenceConflictError, match="another payload"):
        trainer.call("submit", call(batch(2, 9)))
    assert again.train_batch(batch(2, 2)).result(WAIT_S).sequence == 1


def test_c09_an_unknown_loss_is_refused_and_what_was_queued_behind_it_does_nothing(
    open_tenant: Opener, tmp_path: Path
) -> None:
    tenant = open_tenant("loss")
    before = exported(tenant, tmp_path / "before")
    refused = tenant.forward_backward(batch(), loss="supervized")
    behind = tenant.train_batch(batch(), optimizer=FAST)
    with pytest.raises(UnknownComponentError, match=r"supervized.*'ppo', 'supervised', 'weighted'"):
        refused.result(WAIT_S)
    with pytest.raises(SequenceConflictError, match="was refused"):
        behind.result(10.0)  # at once, and not when its patience is over
    assert are_equal(exported(tenant, tmp_path / "after"), before)

    weighted = batch()
    with pytest.raises(InvalidBatchError, match="weights"):
        tenant.forward_backward(weighted, loss="weighted").result(WAIT_S)
    result = tenant.train_batch(batch(), optimizer=FAST).result(WAIT_S)
    assert (result.sequence, result.optimizer_steps) == (0, 1)


def test_a_failed_call_is_this_tenants_alone_and_a_publication_behind_it_tells(
    open_tenant: Opener, tmp_path: Path
) -> None:
    bad, good = open_tenant("bad"), open_tenant("good")
    poisoned = batch(2, 1)
    poisoned.actions[0, 0, 0] = np.nan
    before = exported(bad, tmp_path / "before")
    failing = bad.train_batch(poisoned, optimizer=FAST)
    publication = bad.sync_weights()
    fine = good.train_batch(batch(2, 1), optimizer=FAST)
    with pytest.raises(NonFiniteError, match="actions"):
        publication.result(WAIT_S)
    with pytest.raises(NonFiniteError, match="actions"):
        failing.result(WAIT_S)

    assert fine.result(WAIT_S).optimizer_steps == 1
    assert are_equal(exported(bad, tmp_path / "after"), before)
    bad.train_batch(batch(2, 1), optimizer=FAST)
    assert bad.sync_weights().result(WAIT_S) == 1


# ---- versions and acting


def test_c18_every_answer_bears_the_version_that_made_it(open_tenant: Opener) -> None:
    tenant = open_tenant("versions")
    seen: list[ActionChunk] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            seen.append(deterministic(tenant))

    asking = threading.Thread(target=ask)
    asking.start()
    made = {0: deterministic(tenant, version=0).actions}
    try:
        for step in range(1, 5):
            for _ in range(4):  # none is awaited: the publication waits for them
                tenant.train_batch(batch(4, step), optimizer=FAST)
            version = tenant.sync_weights().result(WAIT_S)
            assert version == step
            answer = deterministic(tenant)
            assert answer.policy_version == version
            made[version] = answer.actions
    finally:
        is_over.set()
        asking.join()

    known = [made[version] for version in range(5)]
    assert all(np.abs(first - second).max() > 1e-4 for first, second in pairwise(known))
    assert len({each.policy_version for each in seen}) >= 3
    for each in seen:
        assert np.array_equal(each.actions, made[each.policy_version]), each.policy_version
    assert np.array_equal(deterministic(tenant, version=0).actions, made[0])
    with pytest.raises(StalePolicyError, match="version 2"):
        deterministic(tenant, version=2)


def test_a_rows_noise_depends_on_its_seed_alone(open_tenant: Opener) -> None:
    tenant = open_tenant("seeds")
    one = observation()
    both = Observation.concatenate([one, one])
    there = tenant.predict(both, seeds=[7, 8]).result(WAIT_S)
    back = tenant.predict(both, seeds=[8, 7]).result(WAIT_S)
    alone = tenant.predict(one, seeds=[8]).result(WAIT_S)

    assert there.log_prob is not None
    assert there.value is not None
    assert np.abs(there.actions[0] - there.actions[1]).max() > 1e-3
    np.testing.assert_allclose(there.actions, back.actions[::-1], atol=1e-6)
    np.testing.assert_allclose(there.actions[1:], alone.actions, atol=1e-6)
    calm = [tenant.predict(both, seeds=seeds, deterministic=True).result(WAIT_S) for seeds in ([1, 2], [3, 4])]
    assert np.array_equal(calm[0].actions, calm[1].actions)
    narrow = dataclasses.replace(one, state=one.state[:, :3])
    with pytest.raises(InvalidBatchError, match="state"):
        tenant.predict(narrow).result(WAIT_S)


# ---- state


def test_a_saved_state_comes_back_exactly(open_tenant: Opener, tmp_path: Path) -> None:
    tenant = open_tenant("state")

    def train(seed: int) -> None:
        tenant.train_batch(batch(2, seed), optimizer=FAST)  # awaited by nobody: what follows is ordered behind it

    train(1)
    saved = tenant.save_state("one")
    first = exported(tenant, tmp_path / "first")
    train(2)
    second = exported(tenant, tmp_path / "second")
    tenant.load_state("one")
    back = exported(tenant, tmp_path / "back")
    train(2)
    again = exported(tenant, tmp_path / "again")

    assert Path(saved.result(WAIT_S)).name == "one"
    assert not are_equal(first, second)
    assert are_equal(back, first)
    assert are_equal(again, second)  # moments and generator are part of the state
    with pytest.raises(CheckpointError, match="nowhere"):
        tenant.load_state("nowhere").result(WAIT_S)
    with pytest.raises(SpecError, match="not a name"):
        tenant.save_state("../outside").result(WAIT_S)
    train(3)
    assert tenant.sync_weights().result(WAIT_S) == 1


def test_c06_an_export_holds_one_tenant_and_touches_no_other(open_tenant: Opener, tmp_path: Path) -> None:
    tenants = [open_tenant(label, seed=index) for index, label in enumerate(("ada", "ben", "cyd"))]
    for index, each in enumerate(tenants):
        each.train_batch(batch(2, index), optimizer=FAST).result(WAIT_S)
    before = [exported(each, tmp_path / "before") for each in tenants]
    folder = Path(tenants[1].export(tmp_path / "ben").result(WAIT_S))

    assert are_equal(load_file(folder / "module.safetensors"), before[1])
    assert sorted(each.name for each in folder.iterdir()) == ["module.safetensors", "policy.json", "stats.json"]
    text = (folder / "policy.json").read_text()
    assert tenants[1].name in text
    assert not any(each.name in text for each in (tenants[0], tenants[2]))
    after = [exported(each, tmp_path / "after") for each in tenants]
    assert all(are_equal(*pair) for pair in zip(before, after, strict=True))
    assert not are_equal(before[0], before[1])


# ---- environments


def test_environment_calls_and_rollouts(open_tenant: Opener) -> None:
    tenant = open_tenant("env")
    contract = tenant.env_open(counter(num_envs=2, is_repeatable=True)).result(WAIT_S)
    assert (contract.state_dim, contract.action_dim) == (4, 1)
    starts = {env: EpisodeStart(episode=env, seed=40 + env, initial_state=env) for env in range(2)}
    first = tenant.env_reset(starts).result(WAIT_S)
    assert [first[env].state[0].tolist() for env in range(2)] == [[0, 0, 0, 40], [0, 0, 1, 41]]
    moved = tenant.env_step({1: np.full((3, 1), 0.5, dtype=np.float32)}).result(WAIT_S)
    assert list(moved) == [1]
    assert moved[1].observation.state[0].tolist() == [3, 0, 1, 41]
    assert moved[1].rewards.tolist() == [0.5, 0.5, 0.5]
    ended = tenant.env_step({1: np.zeros((20, 1), dtype=np.float32)}).result(WAIT_S)[1]
    assert (ended.terminated, ended.num_steps) == (True, 9)
    tenant.env_close().result(WAIT_S)
    with pytest.raises(SimulatorError, match="env_open"):
        tenant.env_step({0: np.zeros((1, 1), dtype=np.float32)}).result(WAIT_S)

    trajectories = tenant.rollout(counter(num_envs=2), range(3)).result(WAIT_S)
    assert [each.episode for each in trajectories] == [0, 1, 2]
    assert all(each.tenant == tenant.name and each.success_once and len(each) == 3 for each in trajectories)
    tenant.train_batch(batch(), optimizer=FAST)
    tenant.sync_weights().result(WAIT_S)
    newer = tenant.rollout(counter(num_envs=2), [3]).result(WAIT_S)[0]
    assert [each.policy_version for each in (*trajectories, newer)] == [0, 0, 0, 1]
    with pytest.raises(SimulatorError, match="told to fail"):
        tenant.rollout(counter(raise_at=2), [4]).result(WAIT_S)


# ---- the lane


def test_c20_consumers_that_wait_first_get_their_own_items_and_all_of_them(open_tenant: Opener) -> None:
    tenants = [open_tenant("left"), open_tenant("right")]
    each_puts = 32

    def consume(tenant: Tenant) -> list[str]:
        found: list[str] = []
        while len(found) < each_puts:
            items = tenant.queue_get(max_items=5, timeout_s=WAIT_S).result(WAIT_S)
            assert all(item.tenant == tenant.name for item in items)
            found += [item.item_id for item in items]
        return found

    def produce(job: tuple[Tenant, int]) -> str:
        tenant, index = job
        item_id = f"{tenant.name}/{index}"
        while (answer := tenant.queue_put(batch(1, index), item_id).result(WAIT_S)) == "full":
            pass
        return answer

    jobs = [(tenant, index) for index in range(each_puts) for tenant in tenants]
    with ThreadPoolExecutor(len(jobs) + len(tenants)) as pool:
        consumers = [pool.submit(consume, tenant) for tenant in tenants]
        answers = list(pool.map(produce, jobs, timeout=WAIT_S))
        taken = [each.result(WAIT_S) for each in consumers]

    assert answers == ["ok"] * len(jobs)
    for tenant, items in zip(tenants, taken, strict=True):
        assert sorted(items) == sorted(f"{tenant.name}/{index}" for index in range(each_puts))
        assert tenant.queue_get(timeout_s=0.1).result(WAIT_S) == []


def test_a_lane_keeps_order_and_knows_an_item_that_comes_again(open_tenant: Opener) -> None:
    tenant = open_tenant("lane")
    answers = [tenant.queue_put(batch(1, index), f"i{index}").result(WAIT_S) for index in range(3)]
    again = tenant.queue_put(batch(1, 0), "i0").result(WAIT_S)
    items = tenant.queue_get(2).result(WAIT_S)
    rest = tenant.queue_get(5).result(WAIT_S)

    assert (answers, again) == (["ok"] * 3, "duplicate")
    assert [[each.item_id for each in found] for found in (items, rest)] == [["i0", "i1"], ["i2"]]
    assert isinstance(items[0].payload, TrainingBatch)
    assert np.array_equal(items[0].payload.actions, batch(1, 0).actions)
    assert tenant.queue_put(batch(1, 0), "i0").result(WAIT_S) == "duplicate"
    assert tenant.queue_get(timeout_s=0.1).result(WAIT_S) == []


# ---- workloads of an interactive tenant, and the end


def test_an_adapter_trains_by_rollouts_and_is_served(open_tenant: Opener, tmp_path: Path) -> None:
    """A tenant with weights of its own inside the backbone: beside a tenant without, which keeps its numbers."""
    plain = open_tenant("plain", seed=5)
    before = deterministic(plain).actions
    tenant = open_tenant("adapted", seed=5, policy={"adapter": {"rank": 2, "targets": ["q_proj", "v_proj"]}})
    assert np.array_equal(deterministic(tenant).actions, before)  # an adapter starts at nothing
    tenant.train(rl_workload(iterations=2), timeout_s=WAIT_S)
    own = exported(tenant, tmp_path)
    assert any(value.any() for name, value in own.items() if name.endswith("lora_B.weight"))
    answer = deterministic(tenant)
    assert answer.policy_version == 2
    assert not np.array_equal(answer.actions, before)
    assert np.array_equal(deterministic(plain).actions, before)


def test_an_interactive_tenant_can_be_given_workloads(open_tenant: Opener) -> None:
    tenant = open_tenant("grown")
    tenant.train_batch(batch(), optimizer=FAST)
    assert tenant.sync_weights().result(WAIT_S) == 1
    before = tenant.evaluate(evaluation_workload(episodes=2), timeout_s=WAIT_S)
    trained = tenant.train(rl_workload(iterations=2), timeout_s=WAIT_S)
    after = tenant.evaluate(evaluation_workload(episodes=2), timeout_s=WAIT_S)

    assert (before["policy_versions"], after["policy_versions"]) == ([1], [3])
    assert trained["iterations"] == 2
    with pytest.raises(TenantFailedError, match=r"gym Nowhere-v0.*cannot be made"):
        tenant.evaluate(evaluation_workload(environment=counter().model_copy(update={"id": "Nowhere-v0"})))
    assert tenant.train_batch(batch(), optimizer=FAST).result(WAIT_S).metrics["loss"] >= 0.0  # it lives on
    assert tenant.sync_weights().result(WAIT_S) == 4
    assert deterministic(tenant).policy_version == 4


def test_a_trainer_that_was_killed_comes_back_with_what_was_published(
    service: Service, open_tenant: Opener, tmp_path: Path
) -> None:
    tenant = open_tenant("survivor")
    tenant.train_batch(batch(2, 1), optimizer=FAST)
    tenant.sync_weights().result(WAIT_S)
    published = exported(tenant, tmp_path / "published")
    tenant.train_batch(batch(2, 2), optimizer=FAST).result(WAIT_S)
    trainer = find_role(names.trainer("tiny"), service.namespace)
    os.kill(ray.get(trainer.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    with pytest.raises(ServiceError, match="made anew"):
        tenant.train_batch(batch(2, 3), optimizer=FAST).result(WAIT_S)

    def back() -> dict[str, np.ndarray] | None:
        try:
            return exported(tenant, tmp_path / "back")
        except (ServiceError, TenantNotFoundError):
            return None

    assert are_equal(wait_until(back, timeout_s=WAIT_S, what="the trainer and its tenant are back"), published)
    assert tenant.train_batch(batch(2, 2), optimizer=FAST).result(WAIT_S).optimizer_steps == 2
    assert tenant.sync_weights().result(WAIT_S) == 2
    assert deterministic(tenant).policy_version == 2


def test_c03_a_stopped_tenant_leaves_nothing_and_its_seed_gives_the_same_base(
    service: Service, open_tenant: Opener, tmp_path: Path
) -> None:
    gone = open_tenant("gone", seed=11)
    base = exported(gone, tmp_path)
    gone.env_open(counter()).result(WAIT_S)
    gone.train_batch(batch(), optimizer=FAST)
    gone.sync_weights().result(WAIT_S)
    assert service.stop(gone.name) == "STOPPED"

    assert not leftovers(gone.name)
    calls: Sequence[Callable[[], object]] = (
        lambda: gone.train_batch(batch()).result(WAIT_S),
        lambda: gone.sync_weights().result(WAIT_S),
        lambda: deterministic(gone),
    )
    for each in calls:
        with pytest.raises(TenantNotFoundError, match=gone.name):
            each()
    assert gone.queue_put(batch(), "late").result(WAIT_S) == "closed"
    queue, store = (RoleClient(role, service.namespace) for role in (names.queue("tiny"), names.POLICY_STORE))
    assert not any(gone.name in lane for lane in queue.call("stats"))
    assert gone.name not in store.call("ping")

    new = open_tenant("new", seed=11)
    assert are_equal(exported(new, tmp_path), base)
    wait_until(lambda: deterministic(new).policy_version == 0, timeout_s=10.0, what="the new one is served")
