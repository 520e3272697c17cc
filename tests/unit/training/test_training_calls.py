"""A tenant's calls: order, repetition, slots that come and go, futures, and what is refused."""

import dataclasses
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from training_world import (
    FAST,
    SUPERVISED,
    are_equal,
    batch,
    drain,
    engine,
    forward_call,
    largest_difference,
    parameters,
    policy,
    run,
    step_call,
    train_call,
    with_arrays,
)

from joynexus.errors import (
    AdmissionError,
    BackPressureError,
    InvalidBatchError,
    SequenceConflictError,
    SpecError,
    TenantExistsError,
    TenantNotFoundError,
    UnknownComponentError,
)
from joynexus.models.action_module import ActionModule
from joynexus.observability.engine_usage import RowCount
from joynexus.specs.action_module import GaussianModuleSpec, OftModuleSpec
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.training import call_queue, runner
from joynexus.training.engine import TrainingEngine
from joynexus.training.losses import LOSSES, LossFunction, LossInputs, LossRows
from joynexus.types import Loss, TrainingBatch, TrainingCall

# ---- slots


def test_c03_nothing_of_a_closed_tenant_is_left() -> None:
    trainer = engine(slots=1)
    trainer.open_slot("a", policy(), seed=1)
    run(trainer, *(train_call("a", step, batch(3, step)) for step in range(5)), forward_call("a", 5, batch(2, 9)))
    module = weakref.ref(trainer._slot("a").state.parts.module)
    trainer.close_slot("a")
    gc.collect()
    assert module() is None
    for ask in (
        lambda: trainer.snapshot("a"),
        lambda: trainer.submit(train_call("a", 6, batch(1, 1))),
        lambda: trainer.close_slot("a"),
        lambda: trainer.status("a"),
    ):
        with pytest.raises(TenantNotFoundError, match="'a'"):
            ask()
    trainer.open_slot("b", policy(), seed=7)
    fresh = engine()
    fresh.open_slot("b", policy(), seed=7)
    assert are_equal(parameters(trainer, "b"), parameters(fresh, "b"))
    for each in (trainer, fresh):
        run(each, *(train_call("b", step, batch(2, step)) for step in range(3)))
    assert are_equal(parameters(trainer, "b"), parameters(fresh, "b"))
    assert trainer.status("b").optimizer_steps == 3


def test_c03_a_closed_tenants_prefixes_leave_the_store_and_shared_ones_stay() -> None:
    trainer = engine()
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    run(trainer, train_call("a", 0, TrainingBatch.concatenate([batch(3, 1), batch(2, 2)])))
    run(trainer, train_call("b", 0, batch(2, 2)))
    store = trainer._runner._store
    assert len(store) == 5
    trainer.close_slot("a")
    assert len(store) == 2
    assert run(trainer, train_call("b", 1, batch(2, 2)))[0].reused == 2
    trainer.close_slot("b")
    assert (len(store), store.nbytes) == (0, 0)


def test_c03_a_tenant_that_closes_during_its_step_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = engine()

    def closing(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
        trainer.close_slot("a")
        return LossRows(loss=module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator))

    monkeypatch.setitem(LOSSES, "closing", LossFunction(compute=closing))
    trainer.open_slot("a", policy(), seed=0)
    future = trainer.submit(train_call("a", 0, batch(2, 1), loss=Loss(name="closing")))
    assert trainer.step() == 0
    with pytest.raises(TenantNotFoundError, match="closed before"):
        future.result(timeout=0)
    assert len(trainer._runner._store) == 0


def test_the_note_of_a_tenants_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "KEPT_KEYS", 4)
    trainer = engine(prefix_store={"device_bytes": 0, "host_bytes": 0})
    trainer.open_slot("a", policy(), seed=0)
    run(trainer, *(train_call("a", step, batch(3, step)) for step in range(5)))
    assert len(trainer._slot("a").prefix_keys) <= 4


@pytest.mark.parametrize("module", ["gaussian", "oft", "flow_matching"])
def test_c04_a_slot_that_was_used_before_learns_as_a_fresh_one(module: str) -> None:
    trainer, fresh = engine(slots=1), engine()
    trainer.open_slot("a", policy(module), seed=3)
    run(trainer, *(train_call("a", step, batch(2, step)) for step in range(3)))
    trainer.close_slot("a")
    curves = []
    for each in (trainer, fresh):
        each.open_slot("a", policy(module), seed=3)
        curves.append(run(each, *(train_call("a", step, batch(4, step)) for step in range(20))))
    assert curves[0][0].metrics["grad_norm"] > 0
    assert [each.metrics["loss"] for each in curves[0]] == [each.metrics["loss"] for each in curves[1]]


@pytest.mark.parametrize("module", ["gaussian", "oft", "flow_matching"])
def test_training_on_one_batch_lowers_its_loss(module: str) -> None:
    trainer = engine()
    trainer.open_slot("a", policy(module), seed=0)
    results = run(trainer, *(train_call("a", step, batch(8, 1)) for step in range(60)))
    losses = [each.metrics["loss"] for each in results]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert results[-1].optimizer_steps == 60


def test_another_seed_gives_another_module() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=1)
    trainer.open_slot("b", policy(), seed=2)
    assert largest_difference(parameters(trainer, "a"), parameters(trainer, "b")) > 1e-3


def test_c07_refused_opens_hold_no_slot() -> None:
    trainer = engine(slots=2, device_bytes=300 << 20)
    too_long = policy(OftModuleSpec(max_prefix_tokens=2))
    no_stats = policy(normalization="quantile")
    too_large = policy(GaussianModuleSpec(hidden_dim=8192, num_layers=16))
    elsewhere = policy().model_copy(update={"backbone": "other"})
    for broken, error in [(too_long, SpecError), (no_stats, SpecError), (too_large, AdmissionError)] * 2:
        with pytest.raises(error):
            trainer.open_slot("broken", broken, seed=0)
    with pytest.raises(AdmissionError, match=r"'other'.*'tiny'"):
        trainer.open_slot("broken", elsewhere, seed=0)
    assert trainer.tenants() == {}
    trainer.open_slot("a", policy(), seed=0)
    assert len(trainer.tenants()) == 1
    with pytest.raises(TenantExistsError):
        trainer.open_slot("a", policy(), seed=0)
    trainer.open_slot("b", policy(), seed=0)
    with pytest.raises(AdmissionError, match="all 2 slots"):
        trainer.open_slot("c", policy(), seed=0)


def test_memory_is_counted_slot_by_slot() -> None:
    probe = engine()
    probe.open_slot("a", policy(), seed=0)
    one = probe.status("a").slot_bytes
    fixed = probe._table.capacity.fixed
    trainer = engine(device_bytes=fixed + 2 * one + one // 2)
    trainer.open_slot("a", policy(), seed=0)
    trainer.open_slot("b", policy(), seed=0)
    with pytest.raises(AdmissionError, match=rf"needs \d+ bytes, {one // 2} of"):
        trainer.open_slot("c", policy(), seed=0)


def test_closing_answers_the_calls_that_wait() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    future = trainer.submit(train_call("a", 0, batch(1, 1)))
    trainer.close_slot("a")
    with pytest.raises(TenantNotFoundError, match="closed before"):
        future.result(timeout=0)
    assert trainer.step() == 0


# ---- order and repetition


@pytest.mark.parametrize("module", ["oft", "flow_matching"])
def test_c12_queued_calls_run_in_order(module: str) -> None:
    queued, awaited = engine(), engine()
    for each in (queued, awaited):
        each.open_slot("a", policy(module), seed=0)
    calls = [
        forward_call("a", 0, batch(2, 1)),
        step_call("a", 1),
        forward_call("a", 2, batch(3, 2)),
        step_call("a", 3),
    ]
    run(queued, *calls)
    for call in calls:
        run(awaited, call)
    assert are_equal(parameters(queued, "a"), parameters(awaited, "a"))
    assert queued.status("a").optimizer_steps == 2


@pytest.mark.parametrize("module", ["gaussian", "oft"])
@pytest.mark.parametrize(("first", "second"), [(2, 2), (1, 5), (4, 1)])
def test_c13_two_micro_batches_weigh_as_much_as_their_union(module: str, first: int, second: int) -> None:
    parts, whole = engine(), engine()
    for each in (parts, whole):
        each.open_slot("a", policy(module), seed=0)
        run(each, train_call("a", 0, batch(3, 9)))
    one, two = batch(first, 1), batch(second, 2)
    apart = run(parts, forward_call("a", 1, one), forward_call("a", 2, two), step_call("a", 3))[2]
    union = TrainingBatch.concatenate([one, two])
    result = run(whole, forward_call("a", 1, union), step_call("a", 2))[1]
    assert result.metrics["accumulated_rows"] == first + second
    assert apart.metrics["grad_norm"] == pytest.approx(result.metrics["grad_norm"], rel=1e-5)
    assert largest_difference(parameters(parts, "a"), parameters(whole, "a")) <= 1e-6
    halves = engine()
    halves.open_slot("a", policy(module), seed=0)
    run(halves, train_call("a", 0, batch(3, 9)), train_call("a", 1, two))
    assert largest_difference(parameters(halves, "a"), parameters(whole, "a")) > 1e-5  # the first part does count


def test_c13_the_gradient_is_that_of_the_mean_over_rows() -> None:
    norms = []
    for copies in (1, 3):
        trainer = engine()
        trainer.open_slot("a", policy(), seed=0)
        calls = [forward_call("a", number, batch(2, 1)) for number in range(copies)]
        norms.append(run(trainer, *calls, step_call("a", copies))[-1].metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_train_batch_is_forward_backward_and_optim_step() -> None:
    both, apart = engine(), engine()
    for each in (both, apart):
        each.open_slot("a", policy("flow_matching"), seed=0)
    run(both, train_call("a", 0, batch(3, 1)))
    run(apart, forward_call("a", 0, batch(3, 1)), step_call("a", 1))
    assert are_equal(parameters(both, "a"), parameters(apart, "a"))


def test_c14_a_repeated_number_is_one_update() -> None:
    trainer, once = engine(), engine()
    for each in (trainer, once):
        each.open_slot("a", policy(), seed=0)
    call = train_call("a", 0, batch(2, 1))
    before = trainer.submit(call)
    during = trainer.submit(train_call("a", 0, batch(2, 1)))
    drain(trainer)
    after = trainer.submit(call)
    assert before.result(timeout=0) == during.result(timeout=0) == after.result(timeout=0)
    run(once, call)
    assert trainer.step() == 0
    assert are_equal(parameters(trainer, "a"), parameters(once, "a"))
    others = [
        train_call("a", 0, batch(2, 2)),
        train_call("a", 0, batch(2, 1), optimizer=OptimizerSpec(lr=1e-3)),
        train_call("a", 0, batch(2, 1), loss=Loss(name="supervised", parameters={})).__class__(
            tenant="a", sequence=0, optimizer=FAST
        ),
    ]
    for other in others:
        with pytest.raises(SequenceConflictError, match="another payload"):
            trainer.submit(other)
    with pytest.raises(SequenceConflictError, match="call 5 came before call 1"):
        trainer.submit(train_call("a", 5, batch(1, 1)))


def test_a_call_that_is_not_repeatable_is_not_repeated() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    trainer.submit(train_call("a", 0, batch(1, 1)), is_repeatable=False)
    for is_repeatable in (True, False):
        with pytest.raises(SequenceConflictError):
            trainer.submit(train_call("a", 0, batch(1, 1)), is_repeatable=is_repeatable)


def test_a_failed_call_keeps_its_number_and_its_answer() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    bad = batch(1, 1)
    bad.observation.state[:] = np.inf
    first = trainer.submit(train_call("a", 0, bad))
    drain(trainer)
    again = trainer.submit(train_call("a", 0, bad))
    assert str(first.exception(timeout=0)) == str(again.exception(timeout=0))
    assert run(trainer, train_call("a", 1, batch(1, 2)))[0].optimizer_steps == 1


def test_a_refused_call_takes_no_number() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    with pytest.raises(UnknownComponentError):
        trainer.submit(train_call("a", 0, batch(1, 1), loss=Loss(name="nope")))
    assert run(trainer, train_call("a", 0, batch(1, 1)))[0].sequence == 0


def test_the_memory_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "KEPT_ANSWERS", 3)
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    calls = [train_call("a", step, batch(1, step)) for step in range(6)]
    results = run(trainer, *calls)
    assert len(trainer._slot("a").calls.answered()) == 3
    assert trainer.submit(calls[3]).result(timeout=0) == results[3]
    with pytest.raises(SequenceConflictError, match="answered long ago"):
        trainer.submit(calls[2])


def test_too_many_waiting_calls_are_pushed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "MAX_QUEUED_CALLS", 2)
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    for sequence in range(2):
        trainer.submit(step_call("a", sequence))
    with pytest.raises(BackPressureError, match="2 calls wait"):
        trainer.submit(step_call("a", 2))
    drain(trainer)
    run(trainer, step_call("a", 2))


def test_an_optimizer_step_without_rows_is_skipped_and_counted() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    was = parameters(trainer, "a")
    result = run(trainer, step_call("a", 0))[0]
    assert (result.metrics["skipped"], result.optimizer_steps, result.group_samples) == (1.0, 0, 0)
    assert are_equal(parameters(trainer, "a"), was)


# ---- futures


def waiting_loss(gate: threading.Event) -> LossFunction:
    def compute(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
        gate.wait(20)
        return LossRows(loss=module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator))

    return LossFunction(compute=compute)


def busy_loss(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    return LossRows(loss=module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator))


@pytest.mark.parametrize("is_measured", [False, True])
def test_c15_a_short_part_does_not_wait_for_a_long_one_beside_it(
    monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    gate = threading.Event()
    monkeypatch.setitem(LOSSES, "slow", waiting_loss(gate))
    monkeypatch.setitem(LOSSES, "busy", LossFunction(compute=busy_loss))
    trainer = engine()
    trainer.open_slot("slow", policy(), seed=0)
    trainer.open_slot("quick", policy(), seed=1)
    rows = 4  # before anything is measured, the larger part is taken to be the longer one
    if is_measured:
        rows = 2
        run(trainer, train_call("slow", 0, batch(2, 0), loss=Loss(name="busy")), train_call("quick", 0, batch(2, 0)))
    number = int(is_measured)
    slow = trainer.submit(train_call("slow", number, batch(rows, 1), loss=Loss(name="slow")))
    quick = trainer.submit(train_call("quick", number, batch(2, 2)))
    thread = threading.Thread(target=trainer.step)
    thread.start()
    result = quick.result(timeout=15)
    assert not slow.done()
    gate.set()
    thread.join(20)
    assert slow.result(timeout=0).group_id == result.group_id
    assert result.group_tenants == 2


def test_no_lock_is_held_during_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setitem(LOSSES, "slow", waiting_loss(gate))
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    running = trainer.submit(train_call("a", 0, batch(1, 0), loss=Loss(name="slow")))
    thread = threading.Thread(target=trainer.step)
    thread.start()
    deadline = time.monotonic() + 10
    while trainer._runner._group_id == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    begin = time.monotonic()
    waiting = trainer.submit(train_call("a", 1, batch(1, 1)))
    trainer.open_slot("b", policy(), seed=1)
    trainer.snapshot("a")
    assert trainer.tenants()["a"].queued_calls == 2
    trainer.close_slot("b")
    assert time.monotonic() - begin < 5
    with pytest.raises(RuntimeError, match="another thread"):
        trainer.step()
    assert not running.done()
    gate.set()
    thread.join(20)
    drain(trainer)
    assert waiting.result(timeout=0).optimizer_steps == 2


def drive(trainer: TrainingEngine, stop: threading.Event) -> None:
    while not stop.is_set() or trainer.has_work:
        if trainer.step() == 0:
            time.sleep(0.001)


def be_client(trainer: TrainingEngine, name: str) -> None:
    for step in range(8):
        future = trainer.submit(train_call(name, step, batch(2, step)))
        if step % 2:
            future.result(timeout=20)


def test_submitting_from_many_threads_equals_submitting_from_one() -> None:
    trainer, plain = engine(), engine()
    names = [f"t{index}" for index in range(4)]
    for each in (trainer, plain):
        for index, name in enumerate(names):
            each.open_slot(name, policy(), seed=index)
    stop = threading.Event()
    driver = threading.Thread(target=drive, args=(trainer, stop))
    clients = [threading.Thread(target=be_client, args=(trainer, name)) for name in names]
    for thread in (driver, *clients):
        thread.start()
    for thread in clients:
        thread.join(30)
    stop.set()
    driver.join(30)
    for name in names:
        run(plain, *(train_call(name, step, batch(2, step)) for step in range(8)))
        assert are_equal(parameters(trainer, name), parameters(plain, name))


# ---- fairness and size of a group


def calls_by_cost(monkeypatch: pytest.MonkeyPatch, *, offset: int) -> dict[str, int]:
    """Calls of two tenants in 16 groups of one call each, if a row costs 1 ms to encode and 1 ms to train on."""
    trainer = engine(max_group_samples=4)

    def work(tenant: str) -> tuple[RowCount, float, float]:
        usage = trainer.usage()
        samples, encoded = usage.samples.get(tenant, 0), usage.prefixes.get(tenant, {}).get("encoded", 0)
        return RowCount(samples=samples, encoded=encoded), 0.001 * encoded, 0.001 * (samples + encoded)

    monkeypatch.setattr(trainer._ledger, "work", work)
    trainer.open_slot("heavy", policy(), seed=0, weight=3.0)
    trainer.open_slot("light", policy(), seed=1, weight=1.0)
    for step in range(24):
        trainer.submit(train_call("heavy", step, batch(3, step)))
        trainer.submit(train_call("light", step, batch(3, step + offset)))
    for _ in range(16):
        trainer.step()
    assert trainer.usage().mean_samples == 3.0
    return {tenant: 24 - status.queued_calls for tenant, status in trainer.tenants().items()}


def test_a_group_holds_at_most_its_samples_and_shares_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_by_cost(monkeypatch, offset=1000) == {"heavy": 12, "light": 4}


def test_a_tenant_that_finds_its_prefixes_pays_for_its_own_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    served = calls_by_cost(monkeypatch, offset=0)  # the same frames: heavy encodes them, and light finds them
    assert served["light"] > 4


def test_a_group_is_put_off_only_on_request_and_not_for_long() -> None:
    trainer = engine(max_wait_ms=50.0)
    for index, name in enumerate("ab"):
        trainer.open_slot(name, policy(), seed=index)
    for step in range(3):
        run(trainer, *(train_call(name, step, batch(1, 10 * step + index)) for index, name in enumerate("ab")))
    trainer.submit(train_call("a", 3, batch(1, 90)))
    began, waited = time.monotonic(), 0
    while trainer.step(may_wait=True) == 0:
        waited += 1
        assert trainer.hold_s is not None
        assert trainer.hold_s <= 0.05
        assert time.monotonic() - began < 20.0
        time.sleep(trainer.hold_s)
    assert trainer.hold_s is None
    assert waited <= 50
    trainer.submit(train_call("a", 4, batch(1, 91)))
    assert trainer.step() == 1  # whoever does not ask for it never waits


def test_a_call_larger_than_a_group_still_runs() -> None:
    trainer = engine(max_group_samples=2)
    trainer.open_slot("a", policy(), seed=0)
    assert run(trainer, train_call("a", 0, batch(5, 0)))[0].group_samples == 5


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": np.zeros((2, 3, 2), np.float32)}, r"actions are float32 \[2, 3, 2\], need float32 \[2, 4, 2\]"),
        ({"actions": np.zeros((2, 4, 2), np.float64)}, "actions are float64"),
        ({"action_is_pad": np.zeros((2, 3), np.bool_)}, "action_is_pad"),
        ({"state": np.zeros((2, 5), np.float32)}, r"state is float32 \[2, 5\], need float32 \[2, 3\]"),
        ({"images": np.zeros((2, 1, 8, 8, 3), np.uint8)}, r"frames are \[8, 8, 3\]"),
        ({"images": np.zeros((2, 2, 16, 16, 3), np.uint8)}, "images are"),
        ({"extras": {"valid": np.ones(3, np.bool_)}}, "'valid'"),
        ({"extras": {"valid": np.ones(2, np.float32)}}, "'valid'"),
        ({"extras": {"weights": np.ones(2, np.float32)}}, "'weights' is not read by this loss"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_other_shapes_is_refused_at_once(change: dict[str, object], message: str) -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    data = object.__new__(TrainingBatch)
    original = with_arrays(batch(2, 1)) if "extras" not in change else batch(2, 1)
    seen = {name: getattr(original.observation, name) for name in ("images", "image_mask", "state", "instructions")}
    fields = {each.name: getattr(original, each.name) for each in dataclasses.fields(TrainingBatch)}
    del fields["observation"]
    observed = object.__new__(type(original.observation))  # past the run-time checks of tests, as a user's arrays come
    for name, value in seen.items():
        object.__setattr__(observed, name, change.get(name, value))
    object.__setattr__(data, "observation", observed)
    for name, value in fields.items():
        object.__setattr__(data, name, change.get(name, value))
    with pytest.raises(InvalidBatchError, match=message):
        trainer.submit(train_call("a", 0, data))


def test_a_call_needs_its_parts() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    with pytest.raises(InvalidBatchError, match="neither batch nor optimizer"):
        trainer.submit(TrainingCall(tenant="a", sequence=0))
    with pytest.raises(InvalidBatchError, match="loss is missing"):
        trainer.submit(TrainingCall(tenant="a", sequence=0, batch=batch(1, 1)))
    with pytest.raises(InvalidBatchError, match="batch is missing"):
        trainer.submit(TrainingCall(tenant="a", sequence=0, loss=SUPERVISED, optimizer=FAST))


def test_a_prompt_that_is_too_long_fails_its_call() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    data = with_arrays(batch(1, 1), instructions=("a very long instruction",))
    future = trainer.submit(train_call("a", 0, data))
    drain(trainer)
    with pytest.raises(InvalidBatchError, match=r"tenant 'a'.*max_prompt_tokens"):
        future.result(timeout=0)


# ---- versions


def test_a_snapshot_is_a_copy_under_its_version() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=4)
    base = trainer.snapshot("a")
    assert base.version == 0
    run(trainer, train_call("a", 0, batch(2, 1)))
    assert trainer.advance_version("a") == 1
    later = trainer.snapshot("a")
    assert (later.version, later.seed, later.tenant) == (1, 4, "a")
    assert not are_equal(dict(base.parameters), dict(later.parameters))
    assert are_equal(dict(base.parameters), dict(trainer.base_snapshot("a").parameters))
    run(trainer, train_call("a", 1, batch(2, 2)))
    assert not are_equal(dict(later.parameters), parameters(trainer, "a"))


def test_instructions_that_are_too_long_are_refused_before_anything_is_made_of_them() -> None:
    trainer = engine()
    trainer.open_slot("a", policy(tokens=12), seed=0)
    trainer.check_instructions("a", ("pick it", "lift"))
    with pytest.raises(InvalidBatchError, match=r"tenant 'a': prompt .* max_prompt_tokens is 12"):
        trainer.check_instructions("a", ("pick it", "push the red cube to the very end of the table"))
    with pytest.raises(TenantNotFoundError):
        trainer.check_instructions("b", ("lift",))
