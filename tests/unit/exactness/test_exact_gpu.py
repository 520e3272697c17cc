"""On a GPU: a tenant's numbers beside others equal those alone to the bit, because every forward has a fixed shape.

The bound is 0. It rests on two things: the backbone always runs chunks of ``chunk_size`` rows, and a module always
``ACCELERATOR_ROWS``, short ones padded; and a kernel computes each row of one shape in the same way, wherever it
stands. A smaller chunk, or a stack of modules, is used only where it was tried on the same device and found equal.
Between devices, or between a GPU and a CPU, numbers differ by rounding: within 1e-4 for features of this tiny model.
"""

import numpy as np
import pytest
import torch
from inference_scenarios import Ask, Tenant, compare, request_of, snapshot
from training_world import MODULES, are_equal, batch, parameters, policy, run, train_call
from training_world import backbone as cpu_backbone

from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import prepare_prefix
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.training.engine import TrainingEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

NO_STORE = {"device_bytes": 0, "host_bytes": 0}
BETWEEN_DEVICES = 1e-4


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return load_backbone(TINY_SMOLVLM.model_copy(update={"dtype": request.param}), "cuda")


def train(backbone: Backbone, tenants: dict[str, str], steps: int = 5) -> TrainingEngine:
    engine = TrainingEngine(backbone, TrainingSpec(prefix_store=NO_STORE), backbone_name="tiny")
    for tenant, module in tenants.items():
        engine.open_slot(tenant, policy(module), seed=int(tenant))
    for step in range(steps):
        calls = [train_call(each, step, batch(1 + (step + int(each)) % 5, 100 * int(each) + step)) for each in tenants]
        run(engine, *calls)
    return engine


def test_training_beside_others_equals_training_alone(backbone: Backbone) -> None:
    tenants = {str(index): (*MODULES, *MODULES)[index] for index in range(6)}
    together = train(backbone, tenants)
    for tenant, module in tenants.items():
        assert are_equal(parameters(together, tenant), parameters(train(backbone, {tenant: module}), tenant))


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_acting_beside_others_equals_acting_alone(backbone: Backbone, mode: str) -> None:
    tenants = [Tenant(f"t{index}", module, None, 12) for index, module in enumerate([*MODULES, *MODULES])]
    rows = (1, 7, 16, 17, 2, 33)
    asks = [Ask(0, i, rows[i], deterministic=False, asks_base=False, fault=None, publishes=False) for i in range(6)]

    def serve(present: list[Tenant]) -> InferenceEngine:
        spec = InferenceSpec(prefix_store=NO_STORE, stack_heads=mode)
        engine = InferenceEngine(backbone, spec, backbone_name="tiny")
        for tenant in present:
            engine.set_policy(snapshot(tenant, 1))
        return engine

    requests = [request_of(tenant, ask) for tenant, ask in zip(tenants, asks, strict=True)]
    for tenant, request, got in zip(tenants, requests, serve(tenants).predict(requests), strict=True):
        (want,) = serve([tenant]).predict([request])
        compare(got, want, is_exact=True)


def test_features_are_near_those_of_a_cpu() -> None:
    gpu, spec = load_backbone(TINY_SMOLVLM, "cuda"), policy()
    seen = batch(5, 1).observation
    here = cpu_backbone().prefix(prepare_prefix(cpu_backbone(), spec, seen, UNCHANGED), "s").hidden
    there = gpu.prefix(prepare_prefix(gpu, spec, seen, UNCHANGED).to(gpu.device), "s").hidden.cpu()
    np.testing.assert_allclose(there, here, rtol=BETWEEN_DEVICES, atol=BETWEEN_DEVICES)
