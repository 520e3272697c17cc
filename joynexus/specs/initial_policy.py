"""The folder that a policy starts from: whether it is there and is this policy's, told from its JSON alone."""

import json
from pathlib import Path
from typing import Any, cast

from joynexus.errors import SpecError
from joynexus.specs.tenant import PolicySpec

POLICY_FILE = "policy.json"
FIXED = (
    ("action", "dim"),
    ("action", "horizon"),
    ("action", "normalization"),
    ("observation", "state_dim"),
    ("observation", "normalization"),
    ("action_module", "type"),
)
"""Fields that the tensors and the statistics are bound to."""


def check_init_from(policy: PolicySpec, *, owner: str) -> None:
    """Refuse a policy whose ``init_from`` is missing, or is of another policy.

    Args:
        policy: With an absolute ``init_from``, or none.
        owner: The tenant, for messages.

    Raises:
        SpecError: Saying which.
    """
    if policy.init_from is None:
        return
    path = Path(policy.init_from) / POLICY_FILE
    where = f"tenant {owner!r}: policy.init_from {policy.init_from!r}"
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(
            f"{where}: no {POLICY_FILE} can be read there ({error.strerror}). Give a folder that 'joynexus import' or "
            "'joynexus export' has written; on a cluster, one that every node sees under this path."
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: {POLICY_FILE} is no JSON: {error}. Export it again.") from error
    found = cast("dict[str, Any]", content).get("policy") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise SpecError(f"{where}: {POLICY_FILE} names no policy. Export it again.")
    mine = policy.model_dump(mode="json")
    different = [
        f"{part}.{field} is {_value(mine, part, field)!r}, there {_value(found, part, field)!r}"
        for part, field in FIXED
        if _value(mine, part, field) != _value(found, part, field)
    ]
    if different:
        raise SpecError(f"{where}: is of another policy: {'; '.join(different)}. Take its values, or another folder.")


def _value(policy: Any, part: str, field: str) -> object:  # noqa: ANN401  # a JSON object
    inner = cast("dict[str, Any]", policy).get(part)
    return cast("dict[str, Any]", inner).get(field) if isinstance(inner, dict) else None
