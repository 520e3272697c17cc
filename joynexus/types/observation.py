"""What a policy looks at, and what the backbone makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from joynexus.errors import InvalidBatchError
from joynexus.types.arrays import Array, Arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Rows of what a policy looks at."""

    images: UInt8[Array, "b c h w 3"]
    """Cameras in the policy's order; ``c`` is 0 for a policy without vision. ``h`` and ``w`` are 0 where the frames
    were left out, because prefix features travel in their place; see :meth:`without_frames`."""
    image_mask: Bool[Array, "b c"]
    """False where a camera gave no frame; the frame is then ignored."""
    state: Float32[Array, "b s"]
    """Raw, not normalised."""
    instructions: tuple[str, ...]
    """One per row."""

    def __len__(self) -> int:
        return len(self.instructions)

    def rows(self, index: Sequence[int] | slice | Array) -> "Observation":
        """Return the rows that an index, a list of indices or a slice picks."""
        picked = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)]
        return Observation(
            images=self.images[picked],
            image_mask=self.image_mask[picked],
            state=self.state[picked],
            instructions=tuple(self.instructions[int(each)] for each in picked),
        )

    @staticmethod
    def concatenate(parts: "Sequence[Observation]") -> "Observation":
        """Stack the rows of several observations of one shape."""
        return Observation(
            images=np.concatenate([part.images for part in parts]),
            image_mask=np.concatenate([part.image_mask for part in parts]),
            state=np.concatenate([part.state for part in parts]),
            instructions=tuple(text for part in parts for text in part.instructions),
        )

    @property
    def has_frames(self) -> bool:
        """Whether what the cameras gave is here; True for a policy without vision, which lacks nothing."""
        return self.images.shape[1] == 0 or self.images.shape[2] > 0

    def without_frames(self) -> "Observation":
        """Return the same rows with frames of no pixels: to be learnt from only together with prefix features."""
        rows, cameras = self.images.shape[:2]
        if cameras == 0:
            return self  # nothing to leave out: the rows still stack with those of a neighbour that has its frames
        return Observation(
            images=np.zeros((rows, cameras, 0, 0, 3), dtype=np.uint8),
            image_mask=self.image_mask,
            state=self.state,
            instructions=self.instructions,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.images.nbytes + self.image_mask.nbytes + self.state.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixArrays:
    """Prefix features as numpy arrays, to be shipped; :mod:`joynexus.models.prefix` converts both ways, exactly.

    Whoever receives them uses them for the tenant that sent them alone: nothing proves what they were computed from.
    """

    arrays: Arrays
    """``hidden`` [b, p, d], ``pad`` [b, p], and per layer ``key/0`` .. and ``value/0`` .. [b, k, p, e]; the numbers of
    ``bfloat16`` as uint16 of the same bits."""
    dtype: str
    """Of the features: ``float32`` or ``bfloat16``."""
    signature: str
    """Schema signature that they were computed under."""

    def __len__(self) -> int:
        return len(self.arrays["hidden"])

    def rows(self, index: Sequence[int] | slice | Array) -> "PrefixArrays":
        """Return copies of the rows that an index, a list of indices or a slice picks."""
        picked = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)]
        arrays = {name: each[picked] for name, each in self.arrays.items()}
        return PrefixArrays(arrays=arrays, dtype=self.dtype, signature=self.signature)

    @staticmethod
    def concatenate(parts: "Sequence[PrefixArrays]") -> "PrefixArrays":
        """Stack the rows of several features of one kind.

        Raises:
            InvalidBatchError: If they differ in signature, dtype, names or shapes.
        """
        first = parts[0]
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            raise InvalidBatchError(
                f"features: of {len(kinds)} kinds, signatures {sorted({part.signature for part in parts})}. "
                "Stack those of one policy and one backbone."
            )
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays}
        return PrefixArrays(arrays=arrays, dtype=first.dtype, signature=first.signature)

    def zeros(self, rows: int) -> "PrefixArrays":
        """Return rows of the same kind that hold nothing but zeros."""
        arrays = {name: np.zeros((rows, *each.shape[1:]), dtype=each.dtype) for name, each in self.arrays.items()}
        return PrefixArrays(arrays=arrays, dtype=self.dtype, signature=self.signature)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        exponent = np.uint16(0x7F80)  # of bfloat16: all ones in what is not finite
        numbers = [each for name, each in self.arrays.items() if name != "pad"]
        if self.dtype == "bfloat16":
            return not any(((each & exponent) == exponent).any() for each in numbers)
        return all(bool(np.isfinite(each).all()) for each in numbers)

    @property
    def kind(self) -> tuple[object, ...]:
        """Signature, dtype, and the names, types and shapes of one row's arrays: only equal kinds can be stacked."""
        shapes = sorted((name, each.dtype.str, each.shape[1:]) for name, each in self.arrays.items())
        return (self.signature, self.dtype, *shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in self.arrays.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewSpec:
    """Which frames a policy wants."""

    cameras: tuple[str, ...]
    """In the policy's order; empty renders nothing."""
    image_size: tuple[int, int]
    """Height and width in pixels."""


def broadcast_instructions(instructions: str | Sequence[str], rows: int) -> tuple[str, ...]:
    """Give every row its instruction: one string serves all, a sequence must have one per row.

    Raises:
        ValueError: If a sequence has another length than ``rows``.
    """
    if isinstance(instructions, str):
        return (instructions,) * rows
    if len(instructions) != rows:
        raise ValueError(f"{len(instructions)} instructions for {rows} rows. Give one per row, or one string for all.")
    return tuple(instructions)
