"""Backbones in bfloat16: features are half as large, heads stay float32, and neighbours change nothing."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from inference_scenarios import compare
from training_world import (
    FAST,
    MODULES,
    STATE_DIM,
    SUPERVISED,
    are_equal,
    largest_difference,
    parameters,
    run,
    with_arrays,
)
from training_world import batch as small_batch

from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import prepare_prefix
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine
from joynexus.types import ActionChunk, Observation, PredictRequest, TrainingBatch, TrainingCall

pytestmark = pytest.mark.timeout(300)

NAMES = ("smolvlm", "lite")
FEATURE_BOUND = 0.06
"""Relative error of bfloat16 features, in the 2-norm over a batch; 0.035 was measured for lite, 0.016 for SmolVLM."""
LOSS_BOUND = 0.05
"""Relative difference of a loss after some steps."""
ACTION_BOUND = 0.1
"""Of an action, in normalised units."""
NO_STORE: dict[str, Any] = {"device_bytes": 0, "host_bytes": 0}
STEPS = 3


@cache
def backbone_of(name: str, dtype: str) -> Backbone:
    spec = TINY_SMOLVLM if name == "smolvlm" else LiteBackboneSpec(chunk_size=4)
    return load_backbone(spec.model_copy(update={"dtype": dtype}))


def policy(module: str) -> PolicySpec:
    return PolicySpec(
        backbone="tiny",
        observation=ObservationSpec(cameras=("base",), image_size=(32, 32), state_dim=STATE_DIM, max_prompt_tokens=12),
        action=ActionSpec(dim=2, horizon=4, num_action_steps=2, normalization="identity"),
        action_module=MODULES[module],
    )


def observation(rows: int, content: int) -> Observation:
    draw = np.random.default_rng(content)
    return Observation(
        images=draw.integers(0, 256, (rows, 1, 32, 32, 3), dtype=np.uint8),
        image_mask=np.ones((rows, 1), dtype=np.bool_),
        state=draw.standard_normal((rows, STATE_DIM)).astype(np.float32),
        instructions=("pick it",) * rows,
    )


def batch(rows: int, content: int) -> TrainingBatch:
    seen = observation(rows, content)
    return with_arrays(small_batch(rows, content), images=seen.images, state=seen.state, instructions=seen.instructions)


def features(name: str, dtype: str, seen: Observation) -> PrefixFeatures:
    backbone = backbone_of(name, dtype)
    return backbone.prefix(prepare_prefix(backbone, policy("oft"), seen, UNCHANGED).to(backbone.device), "s")


@cache
def is_row_invariant(name: str) -> bool:
    """Probe: whether this machine gives a row in bfloat16 the same features alone and beside others."""
    seen = observation(5, 0)
    together = features(name, "bfloat16", seen)
    alone = [features(name, "bfloat16", seen.rows([row])) for row in range(5)]
    return torch.equal(torch.cat([each.hidden for each in alone]), together.hidden)


def train(name: str, dtype: str, modules: dict[str, str]) -> tuple[TrainingEngine, dict[str, list[float]]]:
    engine = TrainingEngine(backbone_of(name, dtype), TrainingSpec(prefix_store=NO_STORE), backbone_name="tiny")
    losses: dict[str, list[float]] = {tenant: [] for tenant in modules}
    for tenant, module in modules.items():
        engine.open_slot(tenant, policy(module), seed=len(tenant))
    for step in range(STEPS):
        calls = [
            TrainingCall(
                tenant=tenant,
                sequence=step,
                batch=batch(1 + (step + len(tenant)) % 4, 100 * len(tenant) + step),
                loss=SUPERVISED,
                optimizer=FAST,
            )
            for tenant in modules
        ]
        for result in run(engine, *calls):
            losses[result.tenant].append(result.metrics["loss"])
    return engine, losses


@pytest.mark.parametrize("name", NAMES)
def test_features_are_near_those_in_float32(name: str) -> None:
    whole, half = (features(name, dtype, observation(6, 3)) for dtype in ("float32", "bfloat16"))
    assert half.hidden.dtype == torch.bfloat16
    assert half.nbytes - half.pad.nbytes == (whole.nbytes - whole.pad.nbytes) // 2
    for one, other in zip(
        (half.hidden, *half.keys, *half.values), (whole.hidden, *whole.keys, *whole.values), strict=True
    ):
        assert float((one.float() - other).norm() / other.norm()) <= FEATURE_BOUND


@pytest.mark.parametrize("name", NAMES)
def test_training_beside_others_equals_training_alone(name: str) -> None:
    modules = {"a": "oft", "bb": "gaussian", "ccc": "flow_matching"}
    together, losses = train(name, "bfloat16", modules)
    for tenant, module in modules.items():
        alone, own_losses = train(name, "bfloat16", {tenant: module})
        own = own_losses[tenant]
        assert all(each.dtype == np.float32 for each in parameters(alone, tenant).values())
        mine, theirs = parameters(together, tenant), parameters(alone, tenant)
        if is_row_invariant(name):
            assert are_equal(mine, theirs)
            assert losses[tenant] == own
        assert largest_difference(mine, theirs) <= 1e-2
        in_whole = train(name, "float32", {tenant: module})[1][tenant]
        assert own == pytest.approx(in_whole, rel=LOSS_BOUND)


@pytest.mark.parametrize("name", NAMES)
def test_acting_beside_others_equals_acting_alone(name: str) -> None:
    modules = {"a": "oft", "bb": "gaussian", "ccc": "flow_matching", "dddd": "gaussian"}
    trained, _ = train(name, "bfloat16", modules)
    requests = [
        PredictRequest(tenant=tenant, observation=observation(rows, rows), seeds=tuple(range(rows)))
        for rows, tenant in enumerate(modules, start=1)
    ]

    def serve(dtype: str, **spec: Any) -> InferenceEngine:
        engine = InferenceEngine(backbone_of(name, dtype), InferenceSpec(**spec), backbone_name="tiny")
        for tenant in modules:
            engine.set_policy(trained.snapshot(tenant))
        return engine

    together = serve("bfloat16").predict(requests)
    alone, whole = serve("bfloat16", prefix_store=NO_STORE, stack_heads="never"), serve("float32")
    for request, got in zip(requests, together, strict=True):
        (want,), (in_whole,) = alone.predict([request]), whole.predict([request])
        assert isinstance(got, ActionChunk)
        assert got.actions.dtype == np.float32
        compare(got, want, is_exact=is_row_invariant(name), bound=ACTION_BOUND)
        assert isinstance(in_whole, ActionChunk)
        assert float(np.abs(got.actions - in_whole.actions).max()) <= ACTION_BOUND
