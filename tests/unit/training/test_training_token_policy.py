"""Policy gradients on binned action tokens: from a replica's answers through PPO to a better policy."""

from itertools import count

import numpy as np
import pytest
from training_world import backbone, drain, engine, observation, policy

from joynexus.inference.engine import InferenceEngine
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.service import InferenceSpec
from joynexus.types import Loss, PredictRequest, TrainingBatch, TrainingCall

ROWS = 32


def test_ppo_moves_a_policy_to_what_is_rewarded() -> None:
    """The reward is high where all numbers of the chunk are near 0.5."""
    trainer, replica = engine(), InferenceEngine(backbone(), InferenceSpec(), backbone_name="tiny")
    trainer.open_slot("a", policy("discrete_tokens"), seed=0, stats=None)
    seen = observation(ROWS, np.random.default_rng(0))
    rewards, sequence = [], count()
    for iteration in range(12):
        trainer.advance_version("a")
        replica.set_policy(trainer.snapshot("a"))
        seeds = tuple(1000 * iteration + row for row in range(ROWS))
        (chunk,) = replica.predict([PredictRequest(tenant="a", observation=seen, seeds=seeds)])
        assert chunk.log_prob is not None
        assert chunk.value is not None
        reward = -np.abs(chunk.actions - 0.5).mean(axis=(1, 2))
        rewards.append(float(reward.mean()))
        extras = {
            "advantages": ((reward - reward.mean()) / (reward.std() + 1e-6)).astype(np.float32),
            "returns": reward.astype(np.float32),
            "old_log_prob": chunk.log_prob,
            "old_value": chunk.value,
            **{f"trace/{name}": each for name, each in chunk.trace.items()},
        }
        batch = TrainingBatch(
            observation=seen,
            actions=chunk.actions,
            action_is_pad=np.zeros(chunk.actions.shape[:2], dtype=np.bool_),
            sample_ids=tuple(str(row) for row in range(ROWS)),
            extras=extras,
        )
        for epoch in range(4):
            call = TrainingCall(
                tenant="a",
                sequence=next(sequence),
                batch=batch,
                loss=Loss(name="ppo"),
                optimizer=OptimizerSpec(lr=1e-2),
            )
            future = trainer.submit(call)
            drain(trainer)
            metrics = future.result().metrics
            if epoch == 0:  # the trainer scores the replica's decisions as the replica did
                assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
