"""The way from a rollout to the update on it, with and without the features that the replica has computed."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.core import world
from benchmarks.core.world import Scene, Trainer
from benchmarks.harness import Options, clock_for, measure_paired
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone
from joynexus.specs.service import InferenceSpec, PrefixStoreSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.types import ActionChunk, Loss, Observation, PredictRequest, PrefixArrays, TrainingBatch

PPO = Loss(name="ppo")
CONVENTIONAL, REUSE, APART, SHARED = (
    "isolated, conventional",
    "isolated, with our own reuse",
    "shared, features not carried",
    "shared",
)
ONE_CAMERA = Scene(name="one camera", cameras=1, side=256, text_tokens=12)
NO_STORE = PrefixStoreSpec(device_bytes=0, host_bytes=0)
Decisions = Mapping[str, Sequence[Observation]]
"""What each tenant's policy looks at, decision by decision."""


class Learner:
    """A replica and a trainer for some tenants: they roll out one decision after the other, then learn from them."""

    def __init__(
        self, backbone: Backbone, policies: Mapping[str, PolicySpec], *, is_reusing: bool, is_carrying: bool, seed: int
    ) -> None:
        self.trainer = Trainer(backbone, policies, is_reusing=is_reusing, seed=seed)
        self._replica = InferenceEngine(backbone, InferenceSpec(prefix_store=NO_STORE), backbone_name=world.BACKBONE)
        self._is_carrying = is_carrying
        for tenant in policies:
            self._replica.set_policy(self.trainer.engine.snapshot(tenant))

    def run(self, decisions: Decisions, epochs: int) -> None:
        """Act, then make the epochs of one PPO update, each a minibatch of all decisions."""
        tenants = self.trainer.tenants
        chunks: dict[str, list[ActionChunk]] = {tenant: [] for tenant in tenants}
        for index in range(len(decisions[tenants[0]])):
            requests = [
                PredictRequest(
                    tenant=tenant,
                    observation=decisions[tenant][index],
                    seeds=(index,),
                    with_features=self._is_carrying,
                )
                for tenant in tenants
            ]
            for tenant, answer in zip(tenants, self._replica.predict(requests), strict=True):
                assert isinstance(answer, ActionChunk), answer
                chunks[tenant].append(answer)
        batches = {tenant: experience(decisions[tenant], chunks[tenant]) for tenant in tenants}
        for _ in range(epochs):
            self.trainer.step(batches, loss=PPO)


def experience(observations: Sequence[Observation], chunks: Sequence[ActionChunk]) -> TrainingBatch:
    """Make a PPO minibatch of decisions; advantages and returns are drawn, since nothing was simulated."""
    rows = len(chunks)
    draw = np.random.default_rng(rows)
    features = [chunk.features for chunk in chunks if chunk.features is not None]
    return TrainingBatch(
        observation=Observation.concatenate(observations),
        actions=np.concatenate([chunk.actions for chunk in chunks]),
        action_is_pad=np.zeros((rows, world.HORIZON), dtype=np.bool_),
        sample_ids=tuple(str(row) for row in range(rows)),
        extras={
            "advantages": draw.standard_normal(rows, dtype=np.float32),
            "returns": draw.standard_normal(rows, dtype=np.float32),
            "old_log_prob": np.concatenate([chunk.log_prob for chunk in chunks if chunk.log_prob is not None]),
            "old_value": np.concatenate([chunk.value for chunk in chunks if chunk.value is not None]),
        }
        | {f"trace/{name}": np.concatenate([chunk.trace[name] for chunk in chunks]) for name in chunks[0].trace},
        features=PrefixArrays.concatenate(features) if features else None,
    )


def rollout_rows(
    backbone: Backbone,
    *,
    tenants: int,
    decisions: int,
    rounds: int,
    options: Options,
    epochs: Sequence[int] = (1, 4),
) -> list[dict[str, Any]]:
    """Measure rollout and update together, for few and many epochs.

    Args:
        backbone: Under replica and trainer.
        tenants: How many.
        decisions: Of each tenant in one rollout.
        rounds: Of the measurement.
        options: Seed and device.
        epochs: Of the update; one measurement each.

    Returns:
        A row for each number of epochs.
    """
    policies = dict.fromkeys(world.names(tenants), world.policy(ONE_CAMERA, world.HEADS["gaussian"]))
    seen = {
        tenant: [
            world.observation(ONE_CAMERA, 1, seed=options.seed + 500 + 100 * index + step) for step in range(decisions)
        ]
        for index, tenant in enumerate(policies)
    }
    return [_measure(backbone, policies, seen, count, rounds, options) for count in epochs]


def _measure(
    backbone: Backbone,
    policies: Mapping[str, PolicySpec],
    seen: Decisions,
    epochs: int,
    rounds: int,
    options: Options,
) -> dict[str, Any]:
    single, seed = world.without_dummies(backbone, 1), options.seed
    sides: dict[str, list[Learner]] = {}

    def apart(*, is_reusing: bool) -> list[Learner]:
        return [
            Learner(single, {name: each}, is_reusing=is_reusing, is_carrying=is_reusing, seed=seed)
            for name, each in policies.items()
        ]

    builds: dict[str, Callable[[], list[Learner]]] = {
        CONVENTIONAL: lambda: apart(is_reusing=False),
        REUSE: lambda: apart(is_reusing=True),
        APART: lambda: [Learner(backbone, policies, is_reusing=True, is_carrying=False, seed=seed)],
        SHARED: lambda: [Learner(backbone, policies, is_reusing=True, is_carrying=True, seed=seed)],
    }

    def prepare(side: str) -> None:
        sides[side] = builds[side]()

    def run(side: str) -> None:
        for learner in sides[side]:
            learner.run(seen, epochs)

    for learner in builds[SHARED]():
        learner.run(seen, 1)
    works = {side: (lambda side=side: run(side)) for side in builds}
    paired = measure_paired(works, clock_for(options.device), rounds=rounds, warmups=0, prepare=prepare)
    trained = sides[SHARED][0].trainer
    row = {
        "epochs": epochs,
        "decisions": len(next(iter(seen.values()))),
        **{f"{side}, s": paired.typical(side) for side in works},
        "over conventional": paired.ratio(CONVENTIONAL, SHARED).median,
        "over reuse": paired.ratio(REUSE, SHARED).median,
        "by carrying": paired.ratio(APART, SHARED).median,
        "encoded per sample": trained.encoded / trained.samples,
        "difference": world.largest_difference(trained, [each.trainer for each in sides[CONVENTIONAL]]),
    }
    print(f"rollout, {epochs} epochs: {row['over conventional']:.2f} times", file=sys.stderr, flush=True)
    return row
