"""Learning-rate schedules: pure functions of the optimizer step, so that a resume can't jump."""

import math

from joynexus.errors import SpecError
from joynexus.specs.algorithm import OptimizerSpec

MAX_LR = 100.0
"""Largest learning rate taken; with decay below 1 it bounds an AdamW update, so that no finite gradient overflows."""


def learning_rate(spec: OptimizerSpec, step: int, schedule_steps: int | None) -> float:
    """Learning rate of one optimizer step.

    Args:
        spec: Peak rate and schedule.
        step: Optimizer steps already applied under this schedule; micro-batches do not count.
        schedule_steps: Step at which the decay ends, where the schedule leaves it to the workload.

    Returns:
        The rate. The warm-up rises linearly from 0, which it leaves at once: step ``i`` of ``warmup_steps`` has
        ``lr * (i + 1) / (warmup_steps + 1)``, and the first step after it has the peak.
    """
    schedule = spec.schedule
    if step < schedule.warmup_steps:
        return spec.lr * (step + 1) / (schedule.warmup_steps + 1)
    total = schedule.total_steps or schedule_steps
    if schedule.type == "constant" or total is None:
        return spec.lr
    length = max(total - schedule.warmup_steps, 1)
    done = min((step - schedule.warmup_steps) / length, 1.0)
    left = 1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * (schedule.final_fraction + (1.0 - schedule.final_fraction) * left)


def check_optimizer(spec: OptimizerSpec, schedule_steps: int | None) -> None:
    """Refuse an optimizer whose update could overflow, or whose schedule has no end.

    Args:
        spec: The optimizer.
        schedule_steps: Length of the schedule, where the spec leaves it to the workload.

    Raises:
        SpecError: Naming the field, its value and what to do.
    """
    if max(spec.betas) >= 1.0:
        raise SpecError(f"optimizer: betas are {spec.betas}, a moment with beta 1 never moves. Give values below 1.")
    if spec.lr > MAX_LR:
        raise SpecError(f"optimizer: lr is {spec.lr}. Give at most {MAX_LR}.")
    if spec.lr * spec.weight_decay >= 1.0:
        raise SpecError(
            f"optimizer: lr {spec.lr} times weight_decay {spec.weight_decay} is 1 or more, which turns the sign of "
            "every parameter at each step. Lower one of them."
        )
    schedule = spec.schedule
    if schedule.type != "constant" and schedule.total_steps is None and schedule_steps is None:
        raise SpecError(
            f"optimizer: schedule {schedule.type!r} has no end. Set schedule.total_steps, or the call's schedule_steps."
        )
