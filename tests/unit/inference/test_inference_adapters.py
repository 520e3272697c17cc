from dataclasses import replace

import numpy as np
import pytest
import torch

from joynexus.errors import CheckpointError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import load_backbone
from joynexus.models.policy import build_policy
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.service import InferenceSpec
from joynexus.specs.vla_modules import SmolVlaModuleSpec
from joynexus.testing.model_contracts import is_blas_row_stable
from joynexus.testing.tiny import TINY_SMOLVLM

ADAPTERS = {"a": AdapterSpec(rank=4), "b": None, "c": AdapterSpec(rank=2, targets=("q_proj", "up_proj")), "d": None}

SMOLVLA = SmolVlaModuleSpec(num_layers=2, max_state_dim=4, max_action_dim=5, num_sampling_steps=3)


@pytest.fixture
def adapted(backbone, snapshot):
    """Publications whose adapters change something."""

    def make(tenant: str, version: int = 0, *, seed: int = 0, module: str = "oft"):
        made = snapshot(tenant, version, seed=seed, module=module)
        policy = made.policy.model_copy(update={"adapter": ADAPTERS[tenant]})
        draw, own = np.random.default_rng(seed), {}
        for path, layer in backbone.adapter_layers().items() if policy.adapter else ():
            if path.rsplit(".", 1)[-1] in policy.adapter.targets:
                shapes = ((policy.adapter.rank, layer.in_features), (layer.out_features, policy.adapter.rank))
                for part, shape in zip("AB", shapes, strict=True):
                    own[f"adapter.{path}.lora_{part}.weight"] = draw.normal(size=shape, scale=0.3).astype(np.float32)
        return replace(made, policy=policy, parameters={**made.parameters, **own})

    return make


def same(one, other):
    if is_blas_row_stable():
        return np.array_equal(one.actions, other.actions)
    return np.allclose(one.actions, other.actions, atol=1e-5)


def test_rows_of_several_adapters_and_of_none_act_as_alone(make_engine, adapted, request_of, backbone):
    published = {tenant: adapted(tenant, seed=ord(tenant)) for tenant in ADAPTERS}
    requests = [request_of(tenant, index // 4, rows=1 + index % 3) for index, tenant in enumerate("abcdabcd")]
    together = make_engine()
    for each in published.values():
        together.set_policy(each)
    before = backbone.num_encoded
    answers = together.predict(requests)
    rows = sum(len(each.observation) for each in requests if ADAPTERS[each.tenant])
    assert backbone.num_encoded - before >= rows
    for request, answer in zip(requests, answers, strict=True):
        alone = make_engine()
        alone.set_policy(published[request.tenant])
        assert same(answer, alone.predict([request])[0])


def test_an_adapter_changes_what_its_tenant_does_and_nobody_else(make_engine, adapted, snapshot, request_of):
    engine, plain = make_engine(), make_engine()
    for each in (adapted("a"), adapted("b")):
        engine.set_policy(each)
    for each in (snapshot("a"), snapshot("b")):
        plain.set_policy(each)
    requests = [request_of("a", 1), request_of("b", 1)]
    found, before = engine.predict(requests), plain.predict(requests)
    assert not np.allclose(found[0].actions, before[0].actions, atol=1e-4)
    assert np.array_equal(found[1].actions, before[1].actions)


def test_a_version_carries_its_adapter(engine, adapted, request_of):
    engine.set_policy(adapted("a", 0, seed=1))
    first = engine.predict([request_of("a", 1)])[0]
    engine.set_policy(adapted("a", 1, seed=2))
    second, base = engine.predict([request_of("a", 1), request_of("a", 1, version=0)])
    assert (second.policy_version, base.policy_version) == (1, 0)
    assert not np.allclose(first.actions, second.actions)
    assert np.array_equal(first.actions, base.actions)
    parts = engine._policies.find("a").parts
    assert not any(each.requires_grad for each in parts.tensors().values())
    assert torch.equal(parts.tensors()["leave.bias"], parts.module.state_dict()["leave.bias"])


def test_what_a_module_pushes_through_the_layers_passes_the_adapter_too(make_engine, adapted, request_of):
    """SmolVLA's state token: as on a backbone into whose weights the adapter is merged."""
    made = adapted("a")
    policy = made.policy.model_copy(update={"action_module": SMOLVLA})
    own = {name: torch.from_numpy(each) for name, each in made.parameters.items() if name.startswith("adapter.")}
    merged = load_backbone(TINY_SMOLVLM)
    for path, layer in merged.adapter_layers().items():
        if f"adapter.{path}.lora_A.weight" in own:
            a, b = (own[f"adapter.{path}.lora_{part}.weight"] for part in "AB")
            layer.weight.data += policy.adapter.scale * b @ a
    parts = build_policy(policy, merged, seed=0, stats=None)
    module = {name: each.numpy().copy() for name, each in parts.module.state_dict().items()}
    adapted_engine, merged_engine = make_engine(), InferenceEngine(merged, InferenceSpec(), backbone_name="tiny")
    adapted_engine.set_policy(
        replace(made, policy=policy, parameters={**module, **{name: each.numpy() for name, each in own.items()}})
    )
    merged_engine.set_policy(replace(made, policy=policy.model_copy(update={"adapter": None}), parameters=module))
    (one,), (other,) = (each.predict([request_of("a", 1, rows=2)]) for each in (adapted_engine, merged_engine))
    np.testing.assert_allclose(one.actions, other.actions, rtol=1e-3, atol=1e-4)


def test_its_features_are_neither_kept_nor_shipped(engine, adapted, request_of):
    for tenant in "ab":
        engine.set_policy(adapted(tenant))
    requests = [replace(request_of(tenant, 1), with_features=True) for tenant in "ab"]
    for _ in range(2):
        answers = engine.predict(requests)
    assert [each.features is None for each in answers] == [True, False]
    usage = engine.usage()
    assert usage.prefixes["a"] == {"encoded": 2, "reused": 0, "carried": 0}
    assert usage.prefixes["b"] == {"encoded": 1, "reused": 1, "carried": 0}


def test_a_version_without_its_adapter_is_refused(engine, adapted):
    whole = adapted("a")
    module = {name: each for name, each in whole.parameters.items() if not name.startswith("adapter.")}
    with pytest.raises(CheckpointError, match="adapter: 8 tensors are missing"):
        engine.set_policy(replace(whole, parameters=module))
