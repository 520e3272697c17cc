"""Features that come with a call, in place of encoding its rows again.

A tenant brings them, so they are checked, they serve that tenant's call alone, and nothing of them is ever put where
another tenant could find it: a hash of the frames proves nothing about features that somebody else computed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.models.backbone import Backbone
from joynexus.models.prefix import PrefixFeatures, from_arrays
from joynexus.specs.tenant import PolicySpec
from joynexus.types import Array, PrefixArrays, TrainingBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFeatures:
    """Features of some rows of a batch, or of all."""

    features: PrefixFeatures
    rows: Bool[Array, " b"]
    """Which rows of the batch they are of, in order."""

    def merge(self, others: PrefixFeatures) -> PrefixFeatures:
        """Return the features of all rows, in the order of the batch.

        Args:
            others: Of the other rows, in order.
        """
        order = np.argsort(np.concatenate([np.flatnonzero(self.rows), np.flatnonzero(~self.rows)]))
        index = torch.from_numpy(order).to(others.hidden.device)
        return PrefixFeatures.concatenate([self.features, others]).pick(index)


def given_features(batch: TrainingBatch, policy: PolicySpec, signature: str, backbone: Backbone) -> GivenFeatures:
    """Bring a batch's features to the device.

    Args:
        batch: With features.
        policy: The slot's.
        signature: The slot's schema signature.
        backbone: What would encode the rows otherwise.

    Returns:
        The features of the rows that bring some.

    Raises:
        InvalidBatchError: If they were computed under another signature, or do not have the backbone's type and shapes.
        NonFiniteError: If one holds NaN or infinity.
    """
    arrays = batch.features
    assert arrays is not None
    rows = np.ones(len(batch), dtype=np.bool_) if batch.featured is None else batch.featured
    _check_kind(arrays, policy, signature, backbone)
    features = from_arrays(arrays if rows.all() else arrays.rows(np.flatnonzero(rows)), backbone.device)
    finite = torch.stack(
        [torch.isfinite(each).flatten(1).all(dim=1) for each in (features.hidden, *features.keys, *features.values)]
    ).all(dim=0)
    if not bool(finite.all()):
        first = batch.sample_ids[int(np.flatnonzero(rows)[int((~finite).nonzero()[0])])]
        raise NonFiniteError(
            f"features: {int((~finite).sum())} of {len(features)} rows hold NaN or infinity, first in sample "
            f"{first!r}. Send the frames in their place, and look at what computed them."
        )
    return GivenFeatures(features=features, rows=rows)


def _check_kind(arrays: PrefixArrays, policy: PolicySpec, signature: str, backbone: Backbone) -> None:
    """Refuse features that this slot's backbone can't have given."""
    if arrays.signature != signature:
        raise InvalidBatchError(
            f"features: were computed under signature {arrays.signature!r}, the slot's is {signature!r}. "
            "Take those that a replica of the same backbone gave for the same policy."
        )
    if arrays.dtype != backbone.spec.dtype:
        raise InvalidBatchError(
            f"features: are {arrays.dtype}, the backbone's are {backbone.spec.dtype}. Send them as they were given."
        )
    seen = policy.observation
    length = backbone.prefix_length(len(seen.cameras), seen.image_size, seen.max_prompt_tokens)
    layers, heads, width = backbone.kv_shape
    need = {"hidden": (length, backbone.hidden_dim), "pad": (length,)}
    need |= {f"{part}/{layer}": (heads, length, width) for part in ("key", "value") for layer in range(layers)}
    found = {name: each.shape[1:] for name, each in arrays.arrays.items()}
    wrong = sorted(name for name in {*need, *found} if need.get(name) != found.get(name))
    if wrong:
        shown = ", ".join(f"{name} {found.get(name, 'missing')} for {need.get(name, 'none')}" for name in wrong[:3])
        raise InvalidBatchError(f"features: {len(wrong)} arrays do not have the backbone's shapes: {shown}.")
