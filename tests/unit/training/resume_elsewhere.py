"""The second half of a run, in a process of its own: ``python resume_elsewhere.py FOLDER``."""

import sys
from pathlib import Path

import numpy as np
from training_world import batch, engine, parameters, policy, run, train_call

from joynexus.specs.algorithm import OptimizerSpec, ScheduleSpec
from joynexus.training.engine import TrainingEngine
from joynexus.types import Array, TrainingResult

MODULES = ("gaussian", "oft", "flow_matching")
COSINE = OptimizerSpec(lr=3e-3, weight_decay=0.01, schedule=ScheduleSpec(type="cosine", warmup_steps=3))


def first_half(folder: Path) -> None:
    trainer = open_all()
    for module in MODULES:
        steps(trainer, module, range(5))
        trainer.save_state(module, folder / module, extra={"cursor": 5})


def second_half(folder: Path) -> tuple[TrainingEngine, dict[str, list[TrainingResult]]]:
    trainer = open_all()
    results = {}
    for module in MODULES:
        cursor = trainer.load_state(module, folder / module)["cursor"]
        assert isinstance(cursor, int)
        results[module] = steps(trainer, module, range(cursor, 10))
    return trainer, results


def open_all() -> TrainingEngine:
    trainer = engine()
    for index, module in enumerate(MODULES):
        trainer.open_slot(module, policy(module), seed=index)
    return trainer


def steps(trainer: TrainingEngine, tenant: str, numbers: range) -> list[TrainingResult]:
    calls = [
        train_call(tenant, step, batch(1 + step % 4, step), optimizer=COSINE, schedule_steps=10) for step in numbers
    ]
    return run(trainer, *calls)


def everything(trainer: TrainingEngine, tenant: str) -> dict[str, Array]:
    state = trainer._slot(tenant).state
    found = {f"parameter/{name}": each for name, each in parameters(trainer, tenant).items()}
    found |= {f"optimizer/{name}": each.numpy().copy() for name, each in state.optimizer.tensors().items()}
    return found | {"generator": state.generator.get_state().numpy()}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    resumed, found = second_half(root)
    for each in MODULES:
        curve = np.array([[result.metrics["loss"], result.metrics["lr"]] for result in found[each]])
        np.savez(root / f"{each}.npz", curve=curve, **everything(resumed, each))
