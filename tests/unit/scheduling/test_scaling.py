from dataclasses import replace

import pytest

from joynexus.scheduling.scaling import RolloutLoad, ScalingRule, desired_workers

CALM = RolloutLoad(
    workers=2, lane_depth=5, lane_capacity=10, trainer_hungry_s=0.0, lane_full_s=0.0, since_change_s=60.0
)
HUNGRY = replace(CALM, lane_depth=0, trainer_hungry_s=5.0)
FULL = replace(CALM, lane_depth=10, lane_full_s=60.0)


def wanted(load: RolloutLoad, minimum: int = 1, maximum: int = 4) -> int:
    return desired_workers(load, minimum=minimum, maximum=maximum)


def test_a_hungry_trainer_and_an_empty_lane_add_a_worker():
    assert wanted(HUNGRY) == 3
    assert wanted(replace(HUNGRY, workers=4)) == 4


def test_a_lane_that_stays_full_takes_one_away():
    assert wanted(FULL) == 1
    assert wanted(replace(FULL, workers=1)) == 1


@pytest.mark.parametrize(
    "load",
    [
        CALM,
        replace(CALM, trainer_hungry_s=100.0),  # data waits: the trainer is not hungry for want of workers
        replace(HUNGRY, trainer_hungry_s=1.0),
        replace(FULL, lane_full_s=10.0),
        replace(HUNGRY, since_change_s=3.0),
        replace(FULL, since_change_s=3.0),
    ],
)
def test_anything_else_leaves_the_number(load):
    assert wanted(load) == load.workers


def test_the_bounds_hold_at_once_whatever_the_load():
    assert wanted(replace(HUNGRY, workers=0, since_change_s=0.0), minimum=2) == 2
    assert wanted(replace(CALM, workers=9, since_change_s=0.0)) == 4


def test_a_steady_load_does_not_make_it_swing():
    """Three workers just feed the trainer: growth stops there, and the number is not changed back and forth."""
    rule = ScalingRule()
    workers, depth, changes, last_change, hungry, full = 1, 0.0, [], 0.0, 0.0, 0.0
    for second in range(600):
        depth = min(10.0, max(0.0, depth + workers - 3.0))
        hungry = hungry + 1.0 if depth == 0 and workers < 3 else 0.0
        full = full + 1.0 if depth >= 9 else 0.0
        load = RolloutLoad(
            workers=workers,
            lane_depth=int(depth),
            lane_capacity=10,
            trainer_hungry_s=hungry,
            lane_full_s=full,
            since_change_s=second - last_change,
        )
        target = desired_workers(load, minimum=1, maximum=8, rule=rule)
        if target != workers:
            workers, last_change = target, float(second)
            changes.append(target)
    assert changes == [2, 3]
