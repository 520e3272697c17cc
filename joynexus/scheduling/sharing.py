"""Who can go through the backbone in one forward with whom, and what keeps the others apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joynexus.scheduling.plan import TenantPlan
from joynexus.specs.signature import layout_differences


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """One tenant among the others."""

    tenant: str
    shares_with: tuple[str, ...]
    """Tenants whose samples can be in its forwards."""
    differs: Mapping[str, Mapping[str, tuple[Any, Any]]]
    """For each other tenant: the fields of the prefix that differ, with this tenant's value and the other's."""


def sharing(plans: Sequence[TenantPlan]) -> tuple[Sharing, ...]:
    """Compare every plan with every other.

    Args:
        plans: Tenants of one service.

    Returns:
        One entry per plan, in their order.
    """
    entries: list[Sharing] = []
    for plan in plans:
        differs = {other.tenant: _differences(plan, other) for other in plans if other.tenant != plan.tenant}
        entries.append(
            Sharing(
                tenant=plan.tenant,
                shares_with=tuple(name for name, fields in differs.items() if not fields),
                differs={name: fields for name, fields in differs.items() if fields},
            )
        )
    return tuple(entries)


def _differences(first: TenantPlan, second: TenantPlan) -> dict[str, tuple[Any, Any]]:
    # Two names are two resident models with a trainer each, even where both are built from one spec.
    if first.backbone != second.backbone:
        return {"backbone": (first.backbone, second.backbone)}
    return layout_differences(first.layout, second.layout)
