"""What work costs on a device: seconds as data, given or fitted to measurements."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCosts:
    """Seconds of a device for each kind of work; each is a fixed part and a part per row (one observation)."""

    name: str
    source: str
    """Where the numbers come from, in a sentence."""
    prefix_fixed_s: float
    """Of one forward of the backbone, whatever its rows: launches, and reading the weights once."""
    prefix_row_s: float
    """Of one further row in it."""
    chunk_rows: int
    """Rows of the backbone's largest forward; larger batches are several forwards."""
    pads: bool = True
    """Whether a forward is filled up to a power of two, as the product's chunks of fixed shape are."""
    lookup_row_s: float = 0.0
    """Finding a stored row and copying it into the batch."""
    carry_row_s: float = 0.0
    """Bringing a row of features that came with a trajectory to the device."""
    train_fixed_s: float
    """Loss, backward and what is around them, of one tenant's call, without the optimizer."""
    train_row_s: float
    optimizer_s: float
    """One optimizer step of one tenant."""
    act_fixed_s: float
    """One tenant's action module in one batch of predictions."""
    act_row_s: float
    row_bytes: int
    """Features of one row."""
    frame_bytes: int = 0
    """Camera images of one row."""
    hop_byte_s: float = 0.0
    """Of the wall time that one byte takes from one process to the next."""

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if isinstance(value, int | float)}
        wrong = {name: value for name, value in numbers.items() if not 0 <= value < float("inf")}
        if wrong or self.chunk_rows < 1:
            found = wrong or {"chunk_rows": self.chunk_rows}
            raise ValueError(f"costs {self.name!r}: {found}. Give seconds of 0 or more, and rows of 1 or more.")

    def encode_s(self, rows: int) -> float:
        """Seconds to encode ``rows`` prefixes in as few forwards as possible; 0 for none."""
        whole, rest = divmod(rows, self.chunk_rows)
        seconds = whole * self._forward_s(self.chunk_rows)
        return seconds + (self._forward_s(rest) if rest else 0.0)

    def _forward_s(self, rows: int) -> float:
        run = min(1 << (rows - 1).bit_length(), self.chunk_rows) if self.pads else rows
        return self.prefix_fixed_s + run * self.prefix_row_s

    def train_s(self, rows: int) -> float:
        """Seconds of one tenant's loss, backward and optimizer step, features given."""
        return self.train_fixed_s + rows * self.train_row_s + self.optimizer_s

    def act_s(self, rows: int) -> float:
        """Seconds of one tenant's action module on its rows of a batch."""
        return self.act_fixed_s + rows * self.act_row_s

    def unpadded(self) -> "DeviceCosts":
        """Return the costs of somebody who does not keep shapes fixed, as a conventional framework does not."""
        return dataclasses.replace(self, pads=False)


GPU_NODE = DeviceCosts(
    name="8-GPU node",
    source=(
        "assumed, not measured: one H200-like GPU, a 2-B-parameter VLM in bfloat16 with 300 prefix tokens: 2 x 2e9 x "
        "300 = 1.2 TFLOP a row at 400 TFLOP/s is 3 ms; a forward of 28 eager layers is bound by launches below 15 ms; "
        "0.1-B-parameter action modules on hidden states: 15 ms for loss and backward, 8 ms to act, 1.5 ms for AdamW; "
        "features of 300 x 2048 bfloat16, moved at 25 GB/s to a GPU and 1.5 GB/s between processes"
    ),
    prefix_fixed_s=0.015,
    prefix_row_s=0.003,
    chunk_rows=16,
    lookup_row_s=0.00001,
    carry_row_s=0.00005,
    train_fixed_s=0.015,
    train_row_s=0.0001,
    optimizer_s=0.0015,
    act_fixed_s=0.008,
    act_row_s=0.00002,
    row_bytes=300 * 2048 * 2,
    frame_bytes=224 * 224 * 3,
    hop_byte_s=1 / 1.5e9,
)
"""Default: what a node with 8 large GPUs may cost. Replace it by measurements with ``--costs``."""


def from_fields(fields: Mapping[str, Any], name: str) -> DeviceCosts:
    """Make costs of plain values; what has no default must be there.

    Raises:
        ValueError: If fields are unknown or missing.
    """
    values: dict[str, Any] = {"name": name, "source": f"measured, from {name}", **fields}
    known = {each.name: each for each in dataclasses.fields(DeviceCosts)}
    needed = {each.name for each in known.values() if each.default is dataclasses.MISSING}
    unknown, missing = sorted(set(values) - set(known)), sorted(needed - set(values))
    if unknown or missing:
        raise ValueError(f"{name}: costs lack {missing} and have unknown {unknown}. Known are {sorted(known)}.")
    return DeviceCosts(**values)
