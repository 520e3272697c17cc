import copy
from typing import Any

import pytest

from joynexus.errors import SpecError, UnknownComponentError
from joynexus.specs.loading import parse_service, parse_tenant

REMOVE = object()


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The same values with one entry set, or taken away."""
    data = copy.deepcopy(data)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    target: Any = data
    for part in parents:
        target = target[part]
    if value is REMOVE:
        del target[last]
    else:
        target[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("policy.observation.camras", ["a"], "policy.observation.camras: unknown key. Did you mean 'cameras'?"),
        (
            "policy.colour",
            1,
            "policy.colour: unknown key. Known: action, action_module, adapter, backbone, init_from,",
        ),
        ("workloads.0.optimizer", {"lrr": 1}, "workloads[0].optimizer.lrr: unknown key. Did you mean 'lr'?"),
        ("workloads.1.environment.tsk", 1, "workloads[1].environment.tsk: unknown key. Did you mean 'task'?"),
        ("workloads.1.algorithm.ppo", 1, "workloads[1].algorithm.ppo: unknown key. Known: clip_high, "),
        ("workloads.1.rl", 1, "workloads[1].rl: unknown key. Known: algorithm, "),
        ("policy.observation.state_dim", REMOVE, "policy.observation.state_dim: missing. Add it: Width of the state"),
        ("workloads.1.environment.task", REMOVE, "workloads[1].environment.task: missing. Add it: Gymnasium id"),
        ("policy.action.normalization", REMOVE, "policy.action.normalization: missing. Add it: Of the actions"),
        (
            "policy.action.normalization",
            "quantle",
            "policy.action.normalization: must be 'mean_std', 'min_max', 'quantile' or 'identity', found 'quantle'.",
        ),
        ("priority", 3, "priority: must be 'low', 'normal' or 'high', found 3. Take one of them."),
        (
            "policy.action_module.type",
            "flow",
            "policy.action_module.type: unknown type 'flow'. Did you mean 'flow_matching'? Known: diffusion, ",
        ),
        ("workloads.1.algorithm.type", "ppoo", "workloads[1].algorithm.type: unknown type 'ppoo'. Did you mean 'ppo'?"),
        ("workloads.1.algorithm.type", REMOVE, "workloads[1].algorithm.type: missing. Add one of: ppo."),
        ("workloads.0.dataset.type", "h5", "workloads[0].dataset.type: unknown type 'h5'. Known: maniskill_h5"),
        ("workloads.2.type", "eval", "workloads[2].type: unknown type 'eval'. Did you mean 'evaluation'? Known: "),
        ("workloads.2.type", REMOVE, "workloads[2].type: missing. Add one of: evaluation, rl, sft."),
        ("workloads.2", 7, "workloads[2]: must be a mapping, found 7. Write 'key: value' pairs beneath it."),
        ("workloads", {"type": "sft"}, "workloads: must be a list, found {'type': 'sft'}. Write [a, b]"),
        ("policy", None, "policy: must be a mapping, found None."),
        ("policy.action.dim", 0, "policy.action.dim: must be at least 1, found 0. Raise it."),
        ("policy.action.dim", 7.5, "policy.action.dim: must be a whole number, found 7.5. Write digits alone."),
        ("policy.action.dim", "seven", "policy.action.dim: must be a whole number, found 'seven'."),
        ("weight", 0, "weight: must be more than 0, found 0. Raise it."),
        ("weight", 5000, "weight: must be at most 1000, found 5000. Lower it."),
        ("weight", float("nan"), "weight: must be a finite number, found nan."),
        ("workloads.0.optimizer", {"lr": "fast"}, "workloads[0].optimizer.lr: must be a number, found 'fast'."),
        ("policy.observation.image_size", [8, 128], "policy.observation.image_size[0]: must be at least 16, found 8."),
        ("policy.observation.image_size", [128], "policy.observation.image_size[1]: missing. Add it."),
        ("policy.observation.image_size", [128] * 3, "policy.observation.image_size: must be of length 2 or less"),
        ("policy.observation.cameras", "base", "policy.observation.cameras: must be a list, found 'base'."),
        ("policy.observation.cameras", ["a", "a"], "policy.observation: cameras ['a', 'a'] name one camera twice."),
        ("policy.action.num_action_steps", 9, "policy.action: num_action_steps 9 is more than horizon 8."),
        ("tenant", "Pick Cube", "tenant: must be a name of 1 to 63 lower-case letters"),
        ("tenant", "../escape", "tenant: must be a name of 1 to 63 lower-case letters"),
        ("tenant", 5, "tenant: must be text, found 5. Put it in quotes."),
        ("workloads.0.dataset.path", 5, "workloads[0].dataset.path: must be text, found 5."),
        (
            "workloads.1.environment.resources",
            {"custom": {"env": "x"}},
            "workloads[1].environment.resources.custom.env: ",
        ),
        ("workloads.1.rollout", {"min_workers": 3}, "workloads[1].rollout: max_workers 1 is less than min_workers 3."),
        (
            "policy.action_module",
            {"type": "oft"},
            "workloads[1]: ppo needs log-probability and value, which action_mod",
        ),
    ],
)
def test_each_mistake_is_one_line_with_path_value_and_remedy(tenant_data, path, value, line):
    with pytest.raises(SpecError) as caught:
        parse_tenant(changed(tenant_data(), path, value), "job.yaml")
    message = str(caught.value)
    assert message.startswith(f"job.yaml: {line}")
    assert len(message.splitlines()) == 1
    assert message.endswith((".", "?"))
    assert "pydantic" not in message


def test_a_misspelt_required_key_is_one_mistake(tenant_data):
    data = tenant_data()
    data["tennant"] = data.pop("tenant")
    with pytest.raises(SpecError) as caught:
        parse_tenant(data, "job.yaml")
    assert str(caught.value) == "job.yaml: tennant: unknown key. Did you mean 'tenant'?"


def test_all_mistakes_are_named_at_once(tenant_data):
    data = changed(changed(tenant_data(), "policy.action.dim", 0), "workloads.1.environment.tusk", 1)
    with pytest.raises(SpecError) as caught:
        parse_tenant(data, "job.yaml")
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "policy.action.dim",
        "workloads[1].environment.tusk",
    ]


def test_an_unregistered_component_has_its_own_class(tenant_data):
    with pytest.raises(UnknownComponentError):
        parse_tenant(changed(tenant_data(), "policy.action_module.type", "dit"), "job.yaml")
    with pytest.raises(SpecError) as caught:
        parse_tenant(changed(tenant_data(), "seed", -1), "job.yaml")
    assert type(caught.value) is SpecError


@pytest.mark.parametrize(
    ("backbones", "line"),
    [
        ({}, "backbones: must be of length 1 or more, found {}. Add what is missing."),
        ({"a": {"type": "lit"}}, "backbones.a.type: unknown type 'lit'. Did you mean 'lite'? Known: hf, lite, pali"),
        ({"a": {"type": "lite", "width": 1}}, "backbones.a.width: must be at least 16, found 1. Raise it."),
        ({"A": {"type": "lite"}}, "backbones.A: must be a name of 1 to 63 lower-case letters"),
        ({"a": {"type": "smolvlm"}}, "backbones.a: init: pretrained needs 'path' and no 'config'."),
    ],
)
def test_a_service_is_told_the_same_way(backbones, line):
    with pytest.raises(SpecError) as caught:
        parse_service({"backbones": backbones}, "service.yaml")
    assert str(caught.value).startswith(f"service.yaml: {line}")


def test_a_long_value_is_cut(tenant_data):
    with pytest.raises(SpecError) as caught:
        parse_tenant(tenant_data(policy=list(range(1000))), "job.yaml")
    assert len(str(caught.value)) < 200
