"""The prefix: what the backbone sees, and the features that it answers with.

K/V are plain tuples of tensors, never a library's cache class, whose interface changes with every release.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBatch:
    """Rows of one schema signature, ready for the backbone; on its device."""

    images: UInt8[Tensor, "b c h w 3"]
    image_mask: Bool[Tensor, "b c"]
    """False where a camera gave no frame."""
    tokens: Int64[Tensor, "b l"]
    """Token ids, padded to the bucket of the signature."""
    token_mask: Bool[Tensor, "b l"]
    """True at real tokens."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, start: int, stop: int) -> "PrefixBatch":
        """Return rows ``start`` to ``stop - 1``."""
        return PrefixBatch(
            images=self.images[start:stop],
            image_mask=self.image_mask[start:stop],
            tokens=self.tokens[start:stop],
            token_mask=self.token_mask[start:stop],
        )

    def pick(self, index: Int64[Tensor, " n"]) -> "PrefixBatch":
        """Return copies of the rows that an index names."""
        return PrefixBatch(
            images=self.images[index],
            image_mask=self.image_mask[index],
            tokens=self.tokens[index],
            token_mask=self.token_mask[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixFeatures:
    """What the frozen backbone answers: no gradient flows into it."""

    hidden: Float[Tensor, "b p d"]
    """Last hidden states, image tokens before text tokens."""
    pad: Bool[Tensor, "b p"]
    """True at positions to ignore (padding, missing cameras); never pool over them."""
    keys: tuple[Float[Tensor, "b k p e"], ...] = ()
    """Per layer, after rotary embedding; empty where the backbone has no K/V to share."""
    values: tuple[Float[Tensor, "b k p e"], ...] = ()
    signature: str
    """Schema signature that the features were computed under."""

    def __len__(self) -> int:
        return self.hidden.shape[0]

    @property
    def length(self) -> int:
        """Prefix positions, padding included."""
        return self.hidden.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in (self.hidden, self.pad, *self.keys, *self.values))

    def slice(self, start: int, stop: int) -> "PrefixFeatures":
        """Return rows ``start`` to ``stop - 1``, as views."""
        return PrefixFeatures(
            hidden=self.hidden[start:stop],
            pad=self.pad[start:stop],
            keys=tuple(each[start:stop] for each in self.keys),
            values=tuple(each[start:stop] for each in self.values),
            signature=self.signature,
        )

    @staticmethod
    def concatenate(parts: "Sequence[PrefixFeatures]") -> "PrefixFeatures":
        """Stack rows of one signature."""
        return PrefixFeatures(
            hidden=torch.cat([part.hidden for part in parts]),
            pad=torch.cat([part.pad for part in parts]),
            keys=tuple(torch.cat(layer) for layer in zip(*(part.keys for part in parts), strict=True)),
            values=tuple(torch.cat(layer) for layer in zip(*(part.values for part in parts), strict=True)),
            signature=parts[0].signature,
        )
