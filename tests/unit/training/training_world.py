"""What the training tests share: a tiny backbone, policies, batches, trajectories, and ways to run them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.backbones import smolvlm  # here, so that the slow import is no test's
from joynexus.specs.action_module import (
    ActionModuleSpec,
    FlowMatchingModuleSpec,
    GaussianModuleSpec,
    OftModuleSpec,
)
from joynexus.specs.algorithm import OptimizerSpec, PpoSpec
from joynexus.specs.data import ManiSkillH5Spec
from joynexus.specs.environment import GymSpec
from joynexus.specs.more_modules import DiffusionModuleSpec, DiscreteTokensModuleSpec
from joynexus.specs.service import TrainingSpec
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec, RlSpec, RolloutSpec, SftSpec, TenantSpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.types import (
    NEVER_STALE,
    Array,
    LaneItem,
    Loss,
    NormalizationStats,
    Observation,
    PolicyStats,
    TrainingBatch,
    TrainingCall,
    TrainingResult,
    Trajectory,
)

torch.set_num_threads(1)

SUPERVISED = Loss(name="supervised")
FAST = OptimizerSpec(lr=3e-3)
STATE_DIM, ACTION_DIM, HORIZON = 3, 2, 4
MODULES: dict[str, ActionModuleSpec] = {
    "gaussian": GaussianModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=16),
    "oft": OftModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=16),
    "flow_matching": FlowMatchingModuleSpec(hidden_dim=16, num_layers=1, num_heads=2),
    "diffusion": DiffusionModuleSpec(hidden_dim=16, num_layers=1, num_heads=2, num_sampling_steps=3),
    "discrete_tokens": DiscreteTokensModuleSpec(
        hidden_dim=16, token_dim=4, max_prefix_tokens=16, slot_dim=4, num_bins=8
    ),
}
INSTRUCTIONS = ("pick it", "push it", "lift", "open box")


@cache
def backbone() -> Backbone:
    loaded = load_backbone(TINY_SMOLVLM)
    assert isinstance(loaded, smolvlm.SmolVlmBackbone)
    return loaded


def policy(module: str | ActionModuleSpec = "oft", **changes: Any) -> PolicySpec:
    spec = MODULES[module] if isinstance(module, str) else module
    return PolicySpec(
        backbone="tiny",
        observation=ObservationSpec(
            cameras=("base",), image_size=(16, 16), state_dim=STATE_DIM, max_prompt_tokens=changes.get("tokens", 12)
        ),
        action=ActionSpec(
            dim=ACTION_DIM, horizon=HORIZON, num_action_steps=2, normalization=changes.get("normalization", "identity")
        ),
        action_module=spec,
    )


def engine(**changes: Any) -> TrainingEngine:
    return TrainingEngine(backbone(), TrainingSpec(**changes), backbone_name="tiny")


def observation(rows: int, rng: np.random.Generator) -> Observation:
    return Observation(
        images=rng.integers(0, 256, (rows, 1, 16, 16, 3), dtype=np.uint8),
        image_mask=np.ones((rows, 1), dtype=np.bool_),
        state=rng.standard_normal((rows, STATE_DIM)).astype(np.float32),
        instructions=tuple(INSTRUCTIONS[int(each)] for each in rng.integers(0, len(INSTRUCTIONS), rows)),
    )


def batch(rows: int, seed: int, *, extras: Mapping[str, Array] | None = None) -> TrainingBatch:
    rng = np.random.default_rng(seed)
    pad = np.zeros((rows, HORIZON), dtype=np.bool_)
    pad[0, HORIZON - int(rng.integers(0, 3)) :] = True
    return TrainingBatch(
        observation=observation(rows, rng),
        actions=rng.uniform(-0.9, 0.9, (rows, HORIZON, ACTION_DIM)).astype(np.float32),
        action_is_pad=pad,
        sample_ids=tuple(f"{seed}/{row}" for row in range(rows)),
        extras=extras or {},
    )


def with_arrays(original: TrainingBatch, **arrays: Any) -> TrainingBatch:
    """The same batch with other actions, state, action_is_pad or extras."""
    seen = original.observation
    return TrainingBatch(
        observation=Observation(
            images=arrays.get("images", seen.images),
            image_mask=seen.image_mask,
            state=arrays.get("state", seen.state),
            instructions=arrays.get("instructions", seen.instructions),
        ),
        actions=arrays.get("actions", original.actions),
        action_is_pad=arrays.get("action_is_pad", original.action_is_pad),
        sample_ids=original.sample_ids,
        extras=arrays.get("extras", original.extras),
    )


def train_call(tenant: str, sequence: int, data: TrainingBatch, **changes: Any) -> TrainingCall:
    """``train_batch``: forward, backward and optimizer step."""
    return TrainingCall(
        tenant=tenant,
        sequence=sequence,
        batch=data,
        loss=changes.get("loss", SUPERVISED),
        optimizer=changes.get("optimizer", FAST),
        schedule_steps=changes.get("schedule_steps"),
    )


def forward_call(tenant: str, sequence: int, data: TrainingBatch, loss: Loss = SUPERVISED) -> TrainingCall:
    return TrainingCall(tenant=tenant, sequence=sequence, batch=data, loss=loss)


def step_call(tenant: str, sequence: int, optimizer: OptimizerSpec = FAST, **changes: Any) -> TrainingCall:
    return TrainingCall(tenant=tenant, sequence=sequence, optimizer=optimizer, **changes)


def drain(trainer: TrainingEngine) -> None:
    while trainer.has_work:
        trainer.step()


def run(trainer: TrainingEngine, *calls: TrainingCall) -> list[TrainingResult]:
    """Submit calls, run all of them, and return their results."""
    futures = [trainer.submit(call) for call in calls]
    drain(trainer)
    return [future.result(timeout=0) for future in futures]


def parameters(trainer: TrainingEngine, tenant: str) -> dict[str, Array]:
    return dict(trainer.snapshot(tenant).parameters)


def largest_difference(first: Mapping[str, Array], second: Mapping[str, Array]) -> float:
    assert first.keys() == second.keys()
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def are_equal(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@cache
def blas_is_row_invariant() -> bool:
    """Probe: whether a row's features are to the bit the same alone and beside others."""
    trainer = engine(prefix_store={"device_bytes": 0, "host_bytes": 0})
    alone, beside = engine(prefix_store={"device_bytes": 0, "host_bytes": 0}), trainer
    for each in (alone, beside):
        each.open_slot("a", policy(), seed=1)
    beside.open_slot("b", policy(), seed=2)
    run(alone, train_call("a", 0, batch(3, 5)))
    run(beside, train_call("b", 0, batch(4, 6)), train_call("a", 0, batch(3, 5)))
    return are_equal(parameters(alone, "a"), parameters(beside, "a"))


def assert_same(first: Mapping[str, Array], second: Mapping[str, Array]) -> None:
    """Equal to the bit where this machine's BLAS allows it, else within 1e-6."""
    if blas_is_row_invariant():
        assert are_equal(first, second), largest_difference(first, second)
    assert largest_difference(first, second) <= 1e-6


def stats(dim: int, *, shift: float = 0.0) -> NormalizationStats:
    ramp = np.arange(dim, dtype=np.float32)
    return NormalizationStats(
        mean=ramp * np.float32(0.1) + np.float32(shift),
        std=ramp * np.float32(0.3) + np.float32(1.0),
        minimum=ramp - np.float32(3.0),
        maximum=ramp + np.float32(3.0),
        q01=ramp - np.float32(2.0),
        q99=ramp + np.float32(2.0),
        count=100,
    )


def policy_stats(*, shift: float = 0.0) -> PolicyStats:
    return PolicyStats(state=stats(STATE_DIM, shift=shift), action=stats(ACTION_DIM, shift=shift), source=f"d{shift}")


# ---- tenants with workloads


def sft_tenant(name: str = "a", *, module: str = "oft", **changes: Any) -> TenantSpec:
    workload = SftSpec(
        dataset=ManiSkillH5Spec(path="unused.h5"),
        num_steps=changes.get("num_steps", 6),
        batch_size=2,
        gradient_accumulation=changes.get("gradient_accumulation", 1),
        optimizer=changes.get("optimizer", FAST),
    )
    return TenantSpec(
        tenant=name,
        seed=changes.get("seed", 0),
        checkpoint_every=changes.get("checkpoint_every", 2),
        policy=policy(module),
        workloads=(workload,),
    )


def rl_tenant(name: str = "a", **changes: Any) -> TenantSpec:
    workload = RlSpec(
        algorithm=PpoSpec(
            num_epochs=changes.get("num_epochs", 2),
            minibatch_size=changes.get("minibatch_size", 4),
            optimizer=changes.get("optimizer", FAST),
            **changes.get("algorithm", {}),
        ),
        environment=GymSpec(id="Fake-v0"),
        rollout=RolloutSpec(
            episodes_per_iteration=changes.get("episodes", 3), max_staleness=changes.get("max_staleness", 1)
        ),
        num_iterations=changes.get("num_iterations", 3),
    )
    return TenantSpec(tenant=name, seed=changes.get("seed", 0), policy=policy("gaussian"), workloads=(workload,))


def sft_item(tenant: str, ordinal: int, *, workload: int = 0, rows: int = 2) -> LaneItem:
    return LaneItem(
        item_id=f"{tenant}/{workload}/{ordinal}",
        tenant=tenant,
        workload=workload,
        ordinal=ordinal,
        policy_version=NEVER_STALE,
        payload=batch(rows, 1000 + ordinal),
    )


def trajectory(tenant: str, episode: int, *, length: int = 3, version: int = 0, **changes: Any) -> Trajectory:
    rng = np.random.default_rng(7000 + episode)
    return Trajectory(
        trajectory_id=changes.get("trajectory_id", f"0-{episode:06d}-0"),
        tenant=tenant,
        episode=episode,
        seed=episode,
        initial_state=episode,
        observation=observation(length, rng),
        actions=rng.uniform(-0.9, 0.9, (length, HORIZON, ACTION_DIM)).astype(np.float32),
        num_steps=np.full(length, 2, dtype=np.int64),
        rewards=changes.get("rewards", rng.standard_normal(length).astype(np.float32)),
        log_prob=changes.get("log_prob", rng.uniform(-9.0, -7.0, length).astype(np.float32)),
        values=changes.get("values", rng.standard_normal(length).astype(np.float32)),
        trace={"pre_tanh": rng.standard_normal((length, HORIZON, ACTION_DIM)).astype(np.float32) * np.float32(0.5)},
        policy_versions=np.full(length, version, dtype=np.int64),
        terminated=changes.get("terminated", bool(episode % 2)),
        truncated=changes.get("truncated", not episode % 2),
        final_value=changes.get("final_value", 0.0 if episode % 2 else 0.5),
        success_once=bool(episode % 2),
        success_at_end=bool(episode % 2),
    )


def rl_item(tenant: str, episode: int, *, workload: int = 0, version: int = 0, **changes: Any) -> LaneItem:
    payload = trajectory(tenant, episode, version=version, **changes)
    return LaneItem(
        item_id=changes.get("item_id", f"{tenant}/{workload}/{payload.trajectory_id}"),
        tenant=tenant,
        workload=workload,
        ordinal=episode,
        policy_version=version,
        payload=payload,
    )


def names(values: Sequence[LaneItem]) -> list[str]:
    return [value.item_id for value in values]
