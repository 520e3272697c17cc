"""The prefix: what the backbone sees, and the features that it answers with.

K/V are plain tuples of tensors, never a library's cache class, whose interface changes with every release.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from joynexus.errors import InvalidBatchError
from joynexus.types import Array, Arrays, PrefixArrays

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of features that can be shipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBatch:
    """Rows of one schema signature, ready for the backbone once they are on its device."""

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

    def to(self, device: torch.device) -> "PrefixBatch":
        """Return the rows on a device; the way to a GPU is through pinned memory and waits for nothing."""

        def move(rows: Tensor) -> Tensor:
            if device.type != "cuda" or rows.device.type != "cpu":
                return rows.to(device)
            return rows.pin_memory().to(device, non_blocking=True)

        return PrefixBatch(
            images=move(self.images),
            image_mask=move(self.image_mask),
            tokens=move(self.tokens),
            token_mask=move(self.token_mask),
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

    @property
    def is_shippable(self) -> bool:
        """Whether :func:`to_arrays` takes them."""
        return self.hidden.dtype in DTYPES.values()

    def slice(self, start: int, stop: int) -> "PrefixFeatures":
        """Return rows ``start`` to ``stop - 1``, as views."""
        return PrefixFeatures(
            hidden=self.hidden[start:stop],
            pad=self.pad[start:stop],
            keys=tuple(each[start:stop] for each in self.keys),
            values=tuple(each[start:stop] for each in self.values),
            signature=self.signature,
        )

    def pick(self, index: Int64[Tensor, " n"]) -> "PrefixFeatures":
        """Return copies of the rows that an index names."""
        return PrefixFeatures(
            hidden=self.hidden[index],
            pad=self.pad[index],
            keys=tuple(each[index] for each in self.keys),
            values=tuple(each[index] for each in self.values),
            signature=self.signature,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "PrefixFeatures":
        """Return the same rows with a function applied to each tensor, such as ``Tensor.clone``."""
        return PrefixFeatures(
            hidden=change(self.hidden),
            pad=change(self.pad),
            keys=tuple(change(each) for each in self.keys),
            values=tuple(change(each) for each in self.values),
            signature=self.signature,
        )

    def grow(
        self, hidden: Float[Tensor, "b m d"], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> "PrefixFeatures":
        """Return the same rows with ``m`` more positions behind them, none of them padding.

        Args:
            hidden: Of the new positions.
            keys: Per layer, of old and new positions, [b, k, p + m, e].
            values: As the keys.
        """
        return PrefixFeatures(
            hidden=torch.cat([self.hidden, hidden], dim=1),
            pad=torch.cat([self.pad, self.pad.new_zeros(len(self), hidden.shape[1])], dim=1),
            keys=tuple(keys),
            values=tuple(values),
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


def to_arrays(features: PrefixFeatures) -> PrefixArrays:
    """Turn features into arrays that can be shipped; :func:`from_arrays` gives them back bit by bit.

    Args:
        features: On any device, of a type that numpy or a view of 16 bits can hold.

    Returns:
        Copies in host memory, which share nothing with the features.

    Raises:
        InvalidBatchError: If the features are neither float32 nor bfloat16.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    dtype = features.hidden.dtype
    if dtype not in names:
        raise InvalidBatchError(f"features: are {dtype}, only {list(DTYPES)} can be shipped. Set the backbone's dtype.")
    arrays: Arrays = {"hidden": _to_array(features.hidden), "pad": _to_array(features.pad)}
    arrays |= {f"key/{layer}": _to_array(each) for layer, each in enumerate(features.keys)}
    arrays |= {f"value/{layer}": _to_array(each) for layer, each in enumerate(features.values)}
    return PrefixArrays(arrays=arrays, dtype=names[dtype], signature=features.signature)


def from_arrays(arrays: PrefixArrays, device: torch.device) -> PrefixFeatures:
    """Turn shipped arrays into features.

    Args:
        arrays: As :func:`to_arrays` makes them; they may be read-only.
        device: Where the features go.

    Returns:
        Copies in torch's own memory: aligned as if the backbone had just computed them, and free to be changed.

    Raises:
        InvalidBatchError: If an array is missing or has another name, or the numbers another type, than the format's.
    """
    named = arrays.arrays
    layers = sum(name.startswith("key/") for name in named)
    keys, values = ([f"{part}/{layer}" for layer in range(layers)] for part in ("key", "value"))
    if set(named) != {"hidden", "pad", *keys, *values}:
        raise InvalidBatchError(
            f"features: hold {sorted(named)}; need 'hidden', 'pad', and one 'key/N' and 'value/N' per layer."
        )
    dtype = DTYPES.get(arrays.dtype)
    stored = {"float32": "float32", "bfloat16": "uint16"}.get(arrays.dtype)
    wrong = {name: each.dtype.name for name, each in named.items() if name != "pad" and each.dtype.name != stored}
    if dtype is None or wrong or named["pad"].dtype.name != "bool":
        raise InvalidBatchError(
            f"features: dtype {arrays.dtype!r}, pad {named['pad'].dtype}, others {wrong or stored}; need "
            "float32 as float32 or bfloat16 as uint16, and a bool pad."
        )
    return PrefixFeatures(
        hidden=_to_tensor(named["hidden"], dtype, device),
        pad=_to_tensor(named["pad"], torch.bool, device),
        keys=tuple(_to_tensor(named[name], dtype, device) for name in keys),
        values=tuple(_to_tensor(named[name], dtype, device) for name in values),
        signature=arrays.signature,
    )


def _to_array(tensor: Tensor) -> Array:
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return cast("Array", bits.to("cpu", copy=True, memory_format=torch.contiguous_format).numpy())


def _to_tensor(array: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
    copied = torch.tensor(array, device=device)  # not from_numpy: what was shipped is read-only, and aligned anyhow
    return copied.view(dtype) if dtype == torch.bfloat16 else copied
