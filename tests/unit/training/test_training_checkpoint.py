"""Checkpoints: exact, whole or refused, and of one tenant alone."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from resume_elsewhere import COSINE, MODULES, everything, first_half, open_all, steps
from training_world import (
    are_equal,
    batch,
    engine,
    forward_call,
    parameters,
    policy,
    policy_stats,
    run,
    step_call,
    train_call,
)

from joynexus.errors import CheckpointError, InvalidBatchError, NonFiniteError, SequenceConflictError, SpecError
from joynexus.models.action_module import ActionModule
from joynexus.specs.algorithm import OptimizerSpec, ScheduleSpec
from joynexus.training import slot_state
from joynexus.training.checkpoint import TEMPORARY, read_checkpoint, remove_leftovers, write_checkpoint
from joynexus.training.export import read_export, write_export
from joynexus.training.losses import LOSSES, LossFunction, LossInputs, LossRows
from joynexus.training.optimizer import TenantOptimizer
from joynexus.training.schedule import check_optimizer, learning_rate
from joynexus.types import Array, Loss

# ---- resume


@pytest.mark.timeout(300)
def test_c80_ten_steps_equal_five_a_checkpoint_a_new_process_and_five(tmp_path: Path) -> None:
    first_half(tmp_path)
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(here / "resume_elsewhere.py"), str(tmp_path)], check=True, env=environment)
    trainer = open_all()
    for module in MODULES:
        results = steps(trainer, module, range(10))
        with np.load(tmp_path / f"{module}.npz") as found:
            resumed = {name: found[name] for name in found.files}
        curve = resumed.pop("curve")
        assert curve.tolist() == [[each.metrics["loss"], each.metrics["lr"]] for each in results[5:]]
        assert are_equal(resumed, everything(trainer, module))


def test_c80_a_checkpoint_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    whole, first, second = engine(), engine(), engine()
    for each in (whole, first, second):
        each.open_slot("a", policy("flow_matching"), seed=0)
    calls = [train_call("a", 0, batch(2, 0)), forward_call("a", 1, batch(3, 1)), forward_call("a", 2, batch(1, 2))]
    calls.append(step_call("a", 3))
    run(whole, *calls)
    run(first, *calls[:2])
    first.save_state("a", tmp_path / "c")
    second.load_state("a", tmp_path / "c")
    assert second.status("a").accumulated_rows == 3
    run(second, *calls[2:])
    assert are_equal(everything(whole, "a"), everything(second, "a"))


def test_c78_the_schedule_steps_with_the_optimizer_not_with_the_micro_batch(tmp_path: Path) -> None:
    trainer, resumed = engine(), engine()
    linear = OptimizerSpec(lr=1e-2, schedule=ScheduleSpec(type="linear", total_steps=10))
    for each in (trainer, resumed):
        each.open_slot("a", policy(), seed=0)
    sequence = 0
    rates = []
    for _ in range(2):
        for micro_batch in range(4):
            run(trainer, forward_call("a", sequence, batch(1, micro_batch)))
            sequence += 1
        rates.append(run(trainer, step_call("a", sequence, linear))[0].metrics["lr"])
        sequence += 1
    assert rates == pytest.approx([1e-2, 0.9e-2])
    assert trainer.status("a").schedule_step == 2
    trainer.save_state("a", tmp_path / "c")
    resumed.load_state("a", tmp_path / "c")
    after = [run(each, train_call("a", sequence, batch(1, 9), optimizer=linear))[0] for each in (trainer, resumed)]
    assert after[0].metrics["lr"] == after[1].metrics["lr"] == pytest.approx(0.8e-2)


def test_c82_a_resumed_slot_keeps_the_statistics_of_its_checkpoint(tmp_path: Path) -> None:
    saved, resumed = engine(), engine()
    normalized = policy(normalization="mean_std")
    saved.open_slot("a", normalized, seed=0, stats=policy_stats(shift=0.1))
    run(saved, train_call("a", 0, batch(2, 1)))
    saved.save_state("a", tmp_path / "c")
    resumed.open_slot("a", normalized, seed=0, stats=policy_stats(shift=5.0))
    resumed.load_state("a", tmp_path / "c")
    kept, original = resumed.snapshot("a").stats, saved.snapshot("a").stats
    assert kept is not None
    assert original is not None
    assert kept.action is not None
    assert original.action is not None
    assert np.array_equal(kept.action.mean, original.action.mean)
    assert (kept.source, kept.action.count) == (original.source, original.action.count)
    for each in (saved, resumed):
        run(each, train_call("a", 1, batch(2, 2)))
    assert are_equal(everything(saved, "a"), everything(resumed, "a"))


def test_c14_a_call_that_was_saved_is_known_in_the_next_process(tmp_path: Path) -> None:
    first, second = engine(), engine()
    for each in (first, second):
        each.open_slot("a", policy(), seed=0)
    bad = batch(1, 3)
    bad.observation.state[:] = np.nan
    calls = [train_call("a", 0, batch(2, 0)), train_call("a", 1, bad)]
    result = run(first, calls[0])[0]
    failure = first.submit(calls[1])
    first.step()
    first.save_state("a", tmp_path / "c")
    second.load_state("a", tmp_path / "c")
    assert second.submit(calls[0]).result(timeout=0) == result
    with pytest.raises(NonFiniteError) as again:
        second.submit(calls[1]).result(timeout=0)
    assert str(again.value) == str(failure.exception(timeout=0))
    with pytest.raises(SequenceConflictError, match="another payload"):
        second.submit(train_call("a", 0, batch(2, 1)))
    assert run(second, train_call("a", 2, batch(1, 4)))[0].optimizer_steps == 2


def test_loading_in_a_live_slot_takes_the_state_back_and_counts_on(tmp_path: Path) -> None:
    trainer = engine()
    trainer.open_slot("a", policy("flow_matching"), seed=0)
    run(trainer, train_call("a", 0, batch(2, 0)))
    trainer.advance_version("a")
    trainer.save_state("a", tmp_path / "c", extra={"note": "here"})
    was = everything(trainer, "a")
    once = run(trainer, train_call("a", 1, batch(2, 1)))[0]
    trainer.advance_version("a")
    assert trainer.load_state("a", tmp_path / "c") == {"note": "here"}
    assert are_equal(everything(trainer, "a"), was)
    assert (trainer.status("a").next_sequence, trainer.status("a").version) == (2, 2)
    again = run(trainer, train_call("a", 2, batch(2, 1)))[0]
    assert again.metrics["loss"] == once.metrics["loss"]


def test_a_call_that_is_overtaken_by_a_load_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, plain = engine(), engine()
    loads = []

    def loading(module: ActionModule, inputs: LossInputs, parameters: object) -> LossRows:
        rows = LossRows(loss=module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator))
        if not loads:
            loads.append(trainer.load_state("a", tmp_path / "c"))
        return rows

    monkeypatch.setitem(LOSSES, "loading", LossFunction(compute=loading))
    for each in (trainer, plain):
        each.open_slot("a", policy("flow_matching"), seed=0)
        run(each, train_call("a", 0, batch(2, 0)))
    trainer.save_state("a", tmp_path / "c")
    run(trainer, train_call("a", 1, batch(2, 1)))
    future = trainer.submit(train_call("a", 2, batch(3, 2), loss=Loss(name="loading")))
    assert trainer.step() == 0
    assert not future.done()
    assert trainer.step() == 1
    run(plain, train_call("a", 1, batch(3, 2)))
    assert are_equal(everything(trainer, "a"), everything(plain, "a"))


# ---- what is in it


def test_c06_checkpoint_and_export_of_one_tenant_hold_its_keys_alone(tmp_path: Path) -> None:
    trainer = engine()
    for index, (tenant, module) in enumerate(zip("abc", MODULES, strict=True)):
        trainer.open_slot(tenant, policy(module), seed=index)
        run(trainer, train_call(tenant, 0, batch(2, index)))
    before = {tenant: parameters(trainer, tenant) for tenant in "ac"}
    checksum = trainer.checksum()
    trainer.save_state("b", tmp_path / "checkpoint")
    write_export(tmp_path / "export", trainer.snapshot("b"), signature=trainer.status("b").signature)
    own = set(parameters(trainer, "b"))
    for folder in ("checkpoint", "export"):
        with safetensors.safe_open(tmp_path / folder / "module.safetensors", "pt") as file:
            assert set(file.keys()) == own
    with safetensors.safe_open(tmp_path / "checkpoint" / "optimizer.safetensors", "pt") as file:
        names = {name.partition("/")[2] for name in file.keys() if "/" in name}  # noqa: SIM118
    assert names == own
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json"}
    assert all(are_equal(parameters(trainer, tenant), before[tenant]) for tenant in "ac")
    assert trainer.checksum() == checksum


def test_a_checkpoint_says_what_made_it(tmp_path: Path) -> None:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=3, stats=policy_stats())
    run(trainer, train_call("a", 0, batch(2, 0)))
    trainer.save_state("a", tmp_path / "c")
    state = json.loads((tmp_path / "c" / "state.json").read_text())
    assert state["optimizer"] == {"type": "adamw", "fused": True, "moments": "float32"}
    assert (state["tenant"], state["seed"], state["optimizer_steps"], state["next_sequence"]) == ("a", 3, 1, 1)
    assert state["policy"]["action_module"]["type"] == "oft"
    assert set(state["sha256"]) == {"module.safetensors", "optimizer.safetensors"}
    assert state["libraries"]["torch"] == str(torch.__version__)
    assert state["stats"]["source"] == "d0.0"


def test_the_kernel_of_adamw_stays_that_of_the_checkpoint(tmp_path: Path) -> None:
    first, second = engine(), engine()
    for each in (first, second):
        each.open_slot("a", policy(), seed=0)
    slot = first._slot("a")
    slot.state.optimizer = TenantOptimizer(slot.state.parameters, fused=False)
    run(first, train_call("a", 0, batch(2, 0)))
    first.save_state("a", tmp_path / "c")
    second.load_state("a", tmp_path / "c")
    assert second._slot("a").state.optimizer.fused is False
    for each in (first, second):
        run(each, train_call("a", 1, batch(2, 1)))
    assert are_equal(everything(first, "a"), everything(second, "a"))


def test_a_machine_without_the_fused_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "c")
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    monkeypatch.setattr(slot_state, "has_fused", lambda parameters: False)
    with caplog.at_level("WARNING"):
        trainer.load_state("a", tmp_path / "c")
    assert "fused AdamW, which is not here" in caplog.text
    assert trainer._slot("a").state.optimizer.fused is False
    assert run(trainer, train_call("a", 1, batch(2, 1)))[0].optimizer_steps == 2


def test_an_export_can_be_read_again(tmp_path: Path) -> None:
    trainer = engine()
    trainer.open_slot("a", policy(normalization="quantile"), seed=0, stats=policy_stats(shift=0.3))
    snapshot = trainer.snapshot("a")
    (tmp_path / "report.json").write_text("{}")
    write_export(tmp_path, snapshot, signature="s")
    write_export(tmp_path, snapshot, signature="s")
    found = read_export(tmp_path)
    assert (found.policy, found.version, found.seed) == (snapshot.policy, 0, 0)
    assert are_equal(dict(found.parameters), dict(snapshot.parameters))
    assert found.stats is not None
    assert found.stats.state is not None
    assert snapshot.stats is not None
    assert snapshot.stats.state is not None
    assert np.array_equal(found.stats.state.q99, snapshot.stats.state.q99)
    assert (tmp_path / "report.json").exists()
    (tmp_path / "module.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=r"module.safetensors: its SHA-256"):
        read_export(tmp_path)


# ---- damage


def saved(folder: Path) -> dict[str, Array]:
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    run(trainer, train_call("a", 0, batch(2, 0)))
    trainer.save_state("a", folder)
    return everything(trainer, "a")


@pytest.mark.parametrize("name", ["module.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    saved(tmp_path / "c")
    path = tmp_path / "c" / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-7])
    else:
        path.unlink()
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    was = everything(trainer, "a")
    with pytest.raises(CheckpointError, match=name):
        trainer.load_state("a", tmp_path / "c")
    assert are_equal(everything(trainer, "a"), was)


@pytest.mark.parametrize(
    ("tenant", "seed", "module", "message"),
    [("b", 0, "oft", "tenant"), ("a", 1, "oft", "seed"), ("a", 0, "gaussian", "policy")],
)
def test_another_runs_checkpoint_is_refused(tmp_path: Path, tenant: str, seed: int, module: str, message: str) -> None:
    saved(tmp_path / "c")
    trainer = engine()
    trainer.open_slot(tenant, policy(module), seed=seed)
    with pytest.raises(CheckpointError, match=f"another run: .'{message}'"):
        trainer.load_state(tenant, tmp_path / "c")


def test_a_crash_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    old = {"module": {"w": torch.ones(2)}}
    write_checkpoint(folder, old, {"n": 1})

    def dies(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt  # the process ends here

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(folder, {"module": {"w": torch.zeros(2)}}, {"n": 2})
    monkeypatch.undo()
    tensors, state = read_checkpoint(folder)
    assert state == {"n": 1}
    assert tensors["module"]["w"].tolist() == [1.0, 1.0]
    assert list(tmp_path.glob(f"{TEMPORARY}*"))
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_refuses_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "file" / "c", {}, {})


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        write_checkpoint(tmp_path / "mine", {}, {})
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


# ---- schedules


def test_learning_rates_by_hand() -> None:
    warm = OptimizerSpec(lr=1.0, schedule=ScheduleSpec(type="constant", warmup_steps=3))
    assert [learning_rate(warm, step, None) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    line = OptimizerSpec(lr=1.0, schedule=ScheduleSpec(type="linear", final_fraction=0.5))
    assert [learning_rate(line, step, 4) for step in (0, 2, 4, 9)] == [1.0, 0.75, 0.5, 0.5]
    cosine = OptimizerSpec(lr=2.0, schedule=ScheduleSpec(type="cosine", warmup_steps=1, total_steps=5))
    assert [learning_rate(cosine, step, 99) for step in (0, 1, 3, 5)] == pytest.approx([1.0, 2.0, 1.0, 0.0], abs=1e-9)
    assert learning_rate(COSINE, 4, 10) == pytest.approx(3e-3 * 0.5 * (1 + math.cos(math.pi / 7)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (OptimizerSpec(betas=(0.9, 1.0)), "betas"),
        (OptimizerSpec(lr=1e9), "lr is"),
        (OptimizerSpec(lr=0.1, weight_decay=20.0), "weight_decay 20.0 is 1 or more"),
        (OptimizerSpec(schedule=ScheduleSpec(type="cosine")), "'cosine' has no end"),
    ],
)
def test_an_optimizer_that_can_not_work_is_refused(spec: OptimizerSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_optimizer(spec, None)
    trainer = engine()
    trainer.open_slot("a", policy(), seed=0)
    with pytest.raises((SpecError, InvalidBatchError), match=message):
        trainer.submit(step_call("a", 0, spec))


def test_the_gradient_is_clipped_per_tenant_by_its_whole_norm() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    bias = torch.nn.Parameter(torch.zeros(2))
    optimizer = TenantOptimizer({"w": weight, "b": bias})
    spec = OptimizerSpec(lr=1.0, betas=(0.0, 0.0), max_grad_norm=1.0)
    norm = optimizer.step({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}, spec, 1.0)
    assert norm == 5.0
    moments = optimizer.tensors()
    assert moments["exp_avg/w"].tolist() == pytest.approx([0.6, 0.0], rel=1e-5)
    assert moments["exp_avg/b"].tolist() == pytest.approx([0.0, 0.8], rel=1e-5)
    assert moments["step/w"] == 1.0


def test_the_order_of_a_gradients_tensors_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 50, 16, 256, 7, 33, 1000)
    gradient = {f"p{index}": torch.randn(size, generator=generator) for index, size in enumerate(sizes)}
    found = set()
    for shift in range(len(sizes)):
        optimizer = TenantOptimizer(
            {name: torch.nn.Parameter(torch.zeros(len(each))) for name, each in gradient.items()}
        )
        names = [*list(gradient)[shift:], *list(gradient)[:shift]]
        found.add(optimizer.step({name: gradient[name].clone() for name in names}, OptimizerSpec(), 1e-3))
    assert len(found) == 1


def test_our_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Parameter(torch.randn(4, 3))
    theirs = torch.nn.Parameter(mine.detach().clone())
    optimizer = TenantOptimizer({"w": mine})
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    spec = OptimizerSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=None)
    for _ in range(5):
        gradient = torch.randn(4, 3)
        optimizer.step({"w": gradient.clone()}, spec, 1e-2)
        theirs.grad = gradient
        reference.step()
    assert torch.equal(mine, theirs)
