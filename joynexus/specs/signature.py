"""The schema signature: which prefixes may share one forward of the backbone.

Canonical JSON of all that changes the prefix or its layout, hashed with SHA-256, so that the same specs give the
same signature in every process and on every platform. The names of the cameras are not in it: a frozen backbone
sees slots, not names, and a LIBERO tenant and a ManiSkill tenant with two cameras each do share a forward.
"""

import hashlib
import json
from typing import Any, cast

from pydantic import JsonValue

from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.base import Spec
from joynexus.specs.tenant import ObservationSpec


class PrefixLayout(Spec):
    """All that two samples must have in common to go through the backbone in one forward."""

    backbone: dict[str, JsonValue]
    """The backbone's identity: family, weights, revision, dtype, chunk size, processor revision."""
    num_cameras: int
    image_size: tuple[int, int] | None
    """None where there are no cameras."""
    preprocessing: str = "uint8-hwc/1"
    """How frames enter: revision of the common part; the family's own is in its processor revision."""
    prompt_template: str
    max_prompt_tokens: int
    mask_layout: str = "bidirectional-prefix/1"
    history: int = 1
    """Observations per prefix."""
    state_dim: int | None
    """Only where the state enters the prefix: through the backbone, or in the prompt."""
    state_bins: int | None = None
    """Only where the prompt holds the state."""
    instruction_cleanup: str | None = None
    """None where instructions are taken as they are."""

    @property
    def signature(self) -> str:
        """Schema signature: 64 hexadecimal digits."""
        fields = self.model_dump(mode="json")
        described = {name: each for name, each in fields.items() if name not in _LATER or each is not None}
        return hashlib.sha256(canonical_json(described).encode()).hexdigest()


_LATER = ("state_bins", "instruction_cleanup")
"""Fields that came later: where they say nothing, signatures stay what they were before them."""


def canonical_json(value: object) -> str:
    """Serialise with sorted keys, no spaces and ASCII only: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def prefix_layout(backbone: BackboneSpec, observation: ObservationSpec) -> PrefixLayout:
    """Describe the prefix of a policy.

    Args:
        backbone: The resident backbone.
        observation: What the policy looks at.

    Returns:
        The layout, whose ``signature`` is the policy's schema signature.
    """
    return PrefixLayout(
        backbone=backbone.identity(),
        num_cameras=len(observation.cameras),
        image_size=observation.image_size if observation.cameras else None,
        prompt_template=observation.prompt_template,
        max_prompt_tokens=observation.max_prompt_tokens,
        mask_layout=backbone.mask_layout,
        state_dim=observation.state_dim if backbone.state_in_prefix or observation.state_in_prompt else None,
        state_bins=observation.state_bins if observation.state_in_prompt else None,
        instruction_cleanup=None if observation.instruction_cleanup == "none" else observation.instruction_cleanup,
    )


def layout_differences(first: PrefixLayout, second: PrefixLayout) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two layouts differ, by dotted path, with both values."""
    return _differences(first.model_dump(mode="json"), second.model_dump(mode="json"), "")


def _differences(first: Any, second: Any, path: str) -> dict[str, tuple[Any, Any]]:  # noqa: ANN401  # JSON values
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return {} if first == second else {path: (first, second)}
    mine, other = cast("dict[str, Any]", first), cast("dict[str, Any]", second)
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*mine, *other}):
        found |= _differences(mine.get(key), other.get(key), f"{path}.{key}" if path else key)
    return found
