"""The names that users write are pinned: adding one is a decision, and removing one breaks somebody's file."""

import json
from pathlib import Path

import pytest

from joynexus.specs.service import ServiceSpec
from joynexus.specs.tenant import TenantSpec

SNAPSHOT = Path(__file__).with_name("public_names.json")


def public_names() -> dict[str, list[str]]:
    """Every spec that a file can hold, with its keys; ``*`` marks those that have no default."""
    names: dict[str, list[str]] = {}
    for root in (TenantSpec, ServiceSpec):
        schema = root.model_json_schema()
        for name, each in {root.__name__: schema, **schema["$defs"]}.items():
            required = set(each.get("required", []))
            keys = each.get("properties", {})
            names[name] = sorted(f"{key}*" if key in required else key for key in keys)
    return dict(sorted(names.items()))


def test_the_names_are_those_of_the_snapshot():
    assert public_names() == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("root", [TenantSpec, ServiceSpec])
def test_every_field_is_described(root):
    schema = root.model_json_schema()
    plain = {"type", "policy", "dataset", "environment", "algorithm", "observation", "action", "action_module"}
    plain |= {"training", "inference", "queue", "health", "storage", "quotas", "rollout", "prefix_store", "resources"}
    undescribed = [
        f"{name}.{key}"
        for name, each in schema["$defs"].items()
        for key, field in each.get("properties", {}).items()
        if "description" not in field and key not in plain
    ]
    assert undescribed == []
