"""Version 0 of a policy: drawn from the seed, or taken from the folder that ``init_from`` names."""

from pathlib import Path

from joynexus.errors import CheckpointError
from joynexus.models.adapters import PREFIX
from joynexus.models.backbone import Backbone
from joynexus.models.policy import build_policy
from joynexus.models.policy_parts import PolicyParts
from joynexus.specs.initial_policy import check_init_from
from joynexus.specs.tenant import PolicySpec
from joynexus.training.export import open_export
from joynexus.types import PolicyStats


def initial_version(
    policy: PolicySpec, backbone: Backbone, *, seed: int, stats: PolicyStats | None, owner: str
) -> tuple[PolicyParts, PolicyStats | None]:
    """Build version 0.

    The statistics of ``init_from`` come first, whatever the dataset's are: its module was trained on what they
    normalise.

    Args:
        policy: What to build.
        backbone: The one that it names.
        seed: Of what is drawn.
        stats: The dataset's; taken where the policy brings none.
        owner: The tenant, for messages.

    Returns:
        The parts, and the statistics that they normalise with.

    Raises:
        SpecError: As :func:`joynexus.models.policy.build_policy`, or if ``init_from`` is not here or of another policy.
        CheckpointError: If its files are damaged or do not fit the policy.
    """
    if policy.init_from is None:
        return build_policy(policy, backbone, seed=seed, stats=stats), stats
    check_init_from(policy, owner=owner)
    start = open_export(Path(policy.init_from))
    own = stats if start.stats is None else start.stats
    parts = build_policy(policy, backbone, seed=seed, stats=own)
    tensors = start.module_state()
    if not any(name.startswith(PREFIX) for name in tensors):  # a new adapter on a module that had none
        tensors |= {name: each for name, each in parts.tensors().items() if name.startswith(PREFIX)}
    try:
        parts.load(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"tenant {owner!r}: policy.init_from {policy.init_from!r}: its tensors do not fit the policy: {error}. "
            "Take the action module of its policy.json."
        ) from error
    return parts, own
