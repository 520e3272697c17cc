"""The simulation of the scheduler: it loses nothing, and where there is a formula it agrees with it."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.simulation.check import check_trace
from benchmarks.simulation.clock import VirtualLoop
from benchmarks.simulation.costs import GPU_NODE, DeviceCosts, from_fields
from benchmarks.simulation.device import Gpu
from benchmarks.simulation.fit import load_costs
from benchmarks.simulation.isolated import run_alone
from benchmarks.simulation.learners import RlLearner
from benchmarks.simulation.measures import jain, percentile
from benchmarks.simulation.saturation import backlogged, saturated_shares
from benchmarks.simulation.service import Outcome, simulate
from benchmarks.simulation.settings import Ledger, Settings
from benchmarks.simulation.store import VirtualStore
from benchmarks.simulation.tenants import VirtualReplica, observation
from benchmarks.simulation.workload import (
    EvaluationWork,
    RlWork,
    SftWork,
    Tenant,
    draw_tenants,
)
from joynexus.specs.service import InferenceSpec
from joynexus.types import PredictRequest

SFT = SftWork(dataset="dataset-0", dataset_rows=320, batch_rows=32, num_steps=30)
RL = RlWork(num_iterations=3, episodes=4, decisions=10, num_envs=2, step_s=0.2, num_epochs=3, minibatch_rows=32)
EVALUATION = EvaluationWork(episodes=4, decisions=10, num_envs=2, step_s=0.2)


def tenant(work: SftWork | RlWork | EvaluationWork, name: str = "alone") -> Tenant:
    return Tenant(name=name, arrival_s=0.0, signature="layout-0", work=work)


def crowd(gpus: int = 1) -> tuple[list[Tenant], Outcome]:
    """Two that learn from one dataset, one from another with a batch across epochs, two that collect, one that acts."""
    works = (SFT, SFT, dataclasses.replace(SFT, dataset="dataset-1", batch_rows=48), RL, RL, EVALUATION)
    tenants = [
        dataclasses.replace(
            tenant(work, f"t{index}"), arrival_s=0.3 * index, seed=index, signature=f"layout-{index % 2}"
        )
        for index, work in enumerate(works)
    ]
    return tenants, simulate(tenants, GPU_NODE, Settings(gpus=gpus))


def test_every_sample_is_trained_exactly_once_per_epoch() -> None:
    tenants, outcome = crowd()
    trained = 0
    for each in tenants:
        if isinstance(each.work, EvaluationWork):
            continue
        counts, work = outcome.learners[each.name].trained, each.work
        if isinstance(work, SftWork):
            epochs, rest = divmod(work.num_steps * work.batch_rows, work.dataset_rows)
            assert set(counts.values()) <= {16 * epochs, 16 * (epochs + 1)}
            assert sum(count == 16 * (epochs + 1) for count in counts.values()) == rest // 16
            assert counts.total() == work.num_steps * work.batch_rows
        else:
            assert counts.total() == work.num_iterations * work.rows * work.num_epochs
            assert max(counts.values()) == 16 * work.num_epochs
        trained += counts.total()
    assert outcome.ledger.trained_rows == trained
    assert outcome.ledger.encoded + outcome.ledger.reused + outcome.ledger.carried == trained


def test_device_seconds_of_tenants_are_the_busy_seconds_of_devices() -> None:
    tenants, outcome = crowd(gpus=2)
    assert outcome.ledger.total_s == pytest.approx(outcome.busy_s, rel=1e-9)
    assert set(outcome.ledger.seconds) == set(outcome.stays) == {each.name for each in tenants}
    assert all(stay.end_s > stay.admitted_s >= stay.arrival_s for stay in outcome.stays.values())


@pytest.mark.parametrize("work", [SFT, RL, EVALUATION], ids=["sft", "rl", "evaluation"])
@pytest.mark.parametrize("ships", ["auto", "never"])
def test_a_single_tenant_costs_what_it_costs_alone_with_our_reuse(
    work: SftWork | RlWork | EvaluationWork, ships: Literal["auto", "never"]
) -> None:
    settings = Settings(ship_features=ships)
    outcome = simulate([tenant(work)], GPU_NODE, settings)
    alone = run_alone(tenant(work), GPU_NODE, settings, reuses=True)
    assert outcome.busy_s == pytest.approx(alone.busy_s, rel=1e-6)
    # What may come on top is the wait for company, once per group and batch at most.
    bound = outcome.ledger.batches * settings.inference.max_wait_ms / 1000
    bound += outcome.ledger.groups * settings.training.max_wait_ms / 1000
    assert alone.held_s - 1e-6 <= outcome.makespan_s <= alone.held_s + bound
    assert outcome.makespan_s == pytest.approx(alone.held_s, rel=0.01)


def test_alone_and_conventional_encodes_every_epoch_again() -> None:
    settings = Settings()
    plain = dataclasses.replace(GPU_NODE, pads=False)
    conventional = run_alone(tenant(SFT), plain, settings, reuses=False)
    assert conventional.seconds["prefix"] == pytest.approx(30 * plain.encode_s(32))
    assert run_alone(tenant(SFT), plain, settings, reuses=True).seconds["prefix"] == pytest.approx(
        10 * plain.encode_s(32)
    )


def test_a_store_that_is_too_small_finds_nothing_in_a_cycle() -> None:
    store = VirtualStore(capacity_bytes=3 * 16 * 10, row_bytes=10)
    for block in (0, 1, 2, 3) * 3:
        assert not store.find(("data", block))
        store.keep(("data", block))
    assert len(store) == 3
    assert store.find(("data", 3))


def test_equal_seeds_give_equal_numbers_and_others_do_not() -> None:
    _, first = crowd()
    _, second = crowd()
    assert first.stays == second.stays
    assert first.ledger == second.ledger
    assert draw_tenants(12, seed=4) != draw_tenants(12, seed=3)
    assert draw_tenants(12, seed=3) == draw_tenants(20, seed=3)[:12]


def test_a_replica_without_batching_waits_like_an_m_d_1_queue() -> None:
    """Pollaczek and Khinchine: the mean wait of Poisson arrivals at one server of constant time s is ls/2(1-l)."""
    costs = dataclasses.replace(GPU_NODE, act_fixed_s=0.0, act_row_s=0.0)
    service_s, load = costs.encode_s(1), 0.6
    ledger, loop = Ledger(), VirtualLoop()
    settings = Settings(inference=InferenceSpec(max_batch_size=1, max_wait_ms=0.0, max_queued_rows=10_000))

    async def run() -> None:
        replica = VirtualReplica(loop, Gpu(loop), costs, settings, ledger)
        replica.open(tenant(EVALUATION))
        rng = random.Random(0)
        asked: list[asyncio.Task[None]] = []
        for _ in range(2_500):
            request = PredictRequest(tenant="alone", observation=observation(1), seeds=(0,))
            asked.append(loop.create_task(replica.predict(request)))
            await asyncio.sleep(rng.expovariate(load / service_s))
        await asyncio.gather(*asked)
        await replica.aclose()

    loop.run_until_complete(run())
    loop.close()
    waits = ledger.predict_waits_s
    assert sum(waits) / len(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


def test_weights_3_1_1_give_shares_within_two_percent_under_saturation() -> None:
    tenants = backlogged((3.0, 1.0, 1.0), (32, 32, 32))
    shares = saturated_shares(tenants, GPU_NODE, Settings(), groups=300)
    total = sum(shares.values())
    for each in tenants:
        assert shares[each.name] / total == pytest.approx(each.weight / 5.0, rel=0.02)


def test_equal_weights_give_equal_device_seconds_whatever_a_call_costs() -> None:
    tenants = backlogged((1.0,), (16, 32, 64, 128))
    shares = saturated_shares(tenants, GPU_NODE, Settings(), groups=300)
    assert jain(list(shares.values())) > 0.999


def test_a_gpu_gives_two_jobs_half_each() -> None:
    loop, ended = VirtualLoop(), {}

    async def job(gpu: Gpu, name: str, begin_s: float, seconds: float) -> None:
        await asyncio.sleep(begin_s)
        await gpu.run(seconds)
        ended[name] = loop.time()

    async def run() -> Gpu:
        gpu = Gpu(loop)
        await asyncio.gather(job(gpu, "long", 0.0, 2.0), job(gpu, "short", 1.0, 0.5))
        return gpu

    gpu = loop.run_until_complete(run())
    loop.close()
    assert ended == pytest.approx({"short": 2.0, "long": 2.5})
    assert gpu.busy_s == pytest.approx(2.5)


def test_a_loop_in_which_nobody_can_go_on_says_so() -> None:
    loop = VirtualLoop()
    with pytest.raises(RuntimeError, match="stuck at 0"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_tenants_beyond_the_slots_wait_for_one() -> None:
    tenants = [tenant(EVALUATION, f"t{index}") for index in range(4)]
    outcome = simulate(tenants, GPU_NODE, Settings(slots=2))
    admitted = sorted(stay.admitted_s for stay in outcome.stays.values())
    assert admitted[:2] == [0.0, 0.0]
    assert admitted[2] == pytest.approx(min(stay.end_s for stay in outcome.stays.values()))


def test_padding_fills_a_forward_up_to_a_power_of_two() -> None:
    fixed, row = GPU_NODE.prefix_fixed_s, GPU_NODE.prefix_row_s
    assert GPU_NODE.encode_s(0) == 0.0
    assert GPU_NODE.encode_s(5) == pytest.approx(fixed + 8 * row)
    assert GPU_NODE.encode_s(17) == pytest.approx(2 * fixed + 17 * row)
    assert GPU_NODE.unpadded().encode_s(5) == pytest.approx(fixed + 5 * row)


def test_costs_name_what_is_wrong_with_them() -> None:
    fields = {name: value for name, value in dataclasses.asdict(GPU_NODE).items() if name not in {"name", "source"}}
    assert isinstance(from_fields(fields, "measured.json"), DeviceCosts)
    with pytest.raises(ValueError, match=r"lack \['optimizer_s'\] and have unknown \['optimiser_s'\]"):
        from_fields({**{k: v for k, v in fields.items() if k != "optimizer_s"}, "optimiser_s": 1.0}, "measured.json")
    with pytest.raises(ValueError, match="train_row_s"):
        from_fields({**fields, "train_row_s": -1.0}, "measured.json")


def test_stale_episodes_are_not_learnt_from() -> None:
    outcome = simulate([tenant(dataclasses.replace(RL, num_envs=4, episodes=6))], GPU_NODE, Settings())
    learner = outcome.learners["alone"]
    assert isinstance(learner, RlLearner)
    assert learner.trained_rows == 3 * 60 * 3


def test_percentile_and_jain() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(each) for each in range(1, 101)], 0.99) == 99.0
    assert jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_a_trace_is_predicted_from_its_costs(tmp_path: Path) -> None:
    costs = {name: value for name, value in dataclasses.asdict(GPU_NODE).items() if name not in {"name", "source"}}
    works = {"sft": SFT, "sft/then": EVALUATION, "rl": RL}
    kinds = {"sft": "sft", "sft/then": "evaluation", "rl": "rl"}
    trace = {
        "costs": costs,
        "tenants": [
            {"name": name, "work": {"type": kinds[name], **dataclasses.asdict(work)}} for name, work in works.items()
        ],
        "busy_s": {"sft": 4.0, "rl": 2.0},
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    rows = check_trace(path).tables["Simulated and measured busy seconds"]
    predicted = {str(row["tenant"]): float(row["simulated_busy_s"] or 0) for row in rows}
    alone = {name: run_alone(tenant(work), GPU_NODE, Settings(), reuses=True).busy_s for name, work in works.items()}
    assert predicted["sft"] == pytest.approx(alone["sft"] + alone["sft/then"], rel=0.1)
    assert predicted["rl"] == pytest.approx(alone["rl"], rel=0.1)
    path.write_text("{}")
    with pytest.raises(ValueError, match="lacks"):
        check_trace(path)


def test_features_travel_where_the_products_rule_says_so() -> None:
    assert Settings().carries(GPU_NODE)
    slow = dataclasses.replace(GPU_NODE, hop_byte_s=1e-8)
    assert not Settings().carries(slow)
    assert Settings(ship_features="always").carries(slow)


def test_costs_are_fitted_to_the_core_benchmark(tmp_path: Path) -> None:
    def row(tenants: int, batch: int, seconds: float) -> dict[str, object]:
        return {"backbone": "3M", "tokens": 20, "tenants": tenants, "batch": batch, "grouped_ms": 1e3 * seconds}

    forward = [row(tenants, batch, 0.01 + 0.002 * tenants * batch) for tenants in (1, 4) for batch in (1, 2)]
    path = tmp_path / "group_forward.json"
    environment = {"device": "cpu", "cpu": "a CPU"}
    step = [row(4, 1, 0.01 + 0.002 * 4 + 4 * 0.006)]
    tables = {"Forward stage": forward, "Whole step": step}
    path.write_text(json.dumps({"name": "core/group_forward", "tables": tables, "environment": environment}))
    costs = load_costs(path)
    assert costs.encode_s(3) == pytest.approx(0.016)
    assert costs.train_s(8) == pytest.approx(0.006)
    assert costs.act_s(1) == pytest.approx(0.002)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no 'costs'"):
        load_costs(path)
