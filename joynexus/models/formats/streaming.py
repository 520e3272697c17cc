"""Safetensors files, read and written tensor by tensor: a file of many gigabytes takes a few megabytes of memory.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}, space-padded
    the rest  the tensors' bytes, without gaps

Format: https://github.com/huggingface/safetensors. Nothing in it is code, and nothing is trusted: a header that is too
long, overlaps, leaves gaps or reaches past the end of the file is refused before anything is read by it.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from joynexus.errors import CheckpointError
from joynexus.types import Array

MAX_HEADER_BYTES = 100_000_000
"""The reference reader's own limit."""
METADATA = "__metadata__"
"""Entry of a header that is no tensor."""
BLOCK_BYTES = 4 << 20
"""Bytes that are held at once while tensors are copied from file to file."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types that checkpoints of policies hold; others are refused."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {each: name for name, each in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """What a header says of one tensor."""

    dtype: str
    """As safetensors names it, such as ``F32``."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.num_elements * DTYPES[self.dtype].itemsize


Blocks = Callable[[], Iterable[bytes | memoryview]]
"""Gives the bytes of one tensor, in blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """One tensor to write."""

    info: TensorInfo
    blocks: Blocks


class TensorFile:
    """A safetensors file whose header has been read and checked. Holds no open file."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: If the file can't be read, or its header does not describe it.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if length > min(MAX_HEADER_BYTES, size - 8):
                    raise _refused(path, f"its header would have {length} bytes, the file has {size}")
                self.header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Check the path.") from error
        self._data_begins = 8 + length
        self.infos, self._offsets, data_bytes = read_header(path, self.header)
        """By name, in the order of their bytes in the file."""
        if data_bytes != size - self._data_begins:
            raise _refused(
                path, f"its tensors have {data_bytes} bytes, the file {size - self._data_begins}: it was cut"
            )

    def blocks(self, name: str) -> Iterator[bytes]:
        """Read the bytes of one tensor, at most ``BLOCK_BYTES`` at once."""
        left = self.infos[name].nbytes
        with self.path.open("rb") as file:
            file.seek(self._data_begins + self._offsets[name])
            while left:
                block = file.read(min(left, BLOCK_BYTES))
                if not block:
                    raise _refused(self.path, f"it ends within tensor {name!r}")
                left -= len(block)
                yield block

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, in memory of its own."""
        info = self.infos[name]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=DTYPES[info.dtype])
        content = bytearray(info.nbytes)
        at = 0
        for block in self.blocks(name):
            content[at : at + len(block)] = block
            at += len(block)
        return torch.frombuffer(content, dtype=DTYPES[info.dtype]).reshape(info.shape)

    def source(self, name: str) -> TensorSource:
        """Return a tensor as something to write elsewhere."""
        return TensorSource(info=self.infos[name], blocks=lambda: self.blocks(name))


def read_header(path: Path, header: bytes) -> tuple[dict[str, TensorInfo], dict[str, int], int]:
    """Read and check a header.

    Args:
        path: Of the file that it is from, for messages.
        header: Its JSON.

    Returns:
        Tensors by name in the order of their bytes, where each begins behind the header, and where the last one ends.

    Raises:
        CheckpointError: If tensors overlap, leave gaps, or have another size than their shape.
    """
    parsed = [(name, *_entry(path, name, each)) for name, each in _parse(path, header).items() if name != METADATA]
    infos: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, begin, stop, info in sorted(parsed, key=lambda each: (each[1], each[2])):
        if begin != end or stop - begin != info.nbytes:
            raise _refused(
                path, f"tensor {name!r} is at bytes {begin} to {stop}, its place is {end} to {end + info.nbytes}"
            )
        infos[name], offsets[name], end = info, begin, stop
    return infos, offsets, end


def tensor_source(tensor: Tensor, dtype: str | None = None) -> TensorSource:
    """Return a tensor in memory as something to write, in another type if one is given.

    It is converted and copied when it is written, not before.
    """
    name = dtype or DTYPE_NAMES[tensor.dtype]
    info = TensorInfo(dtype=name, shape=tuple(tensor.shape))

    def blocks() -> Iterator[memoryview]:
        if info.nbytes:
            plain = tensor.detach().to(device="cpu", dtype=DTYPES[name]).contiguous().reshape(-1)
            yield plain.view(torch.uint8).numpy().data

    return TensorSource(info=info, blocks=blocks)


def array_source(array: Array) -> TensorSource:
    """Return an array in memory as something to write; nothing is copied."""
    dtype = DTYPE_NAMES[torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype]

    def blocks() -> Iterator[memoryview]:
        if array.size:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    return TensorSource(info=TensorInfo(dtype=dtype, shape=tuple(array.shape)), blocks=blocks)


def write_tensors(
    path: Path,
    sources: Mapping[str, TensorSource],
    *,
    metadata: Mapping[str, str] | None = None,
    header: bytes | None = None,
    progress: Callable[[int], None] | None = None,
) -> str:
    """Write a safetensors file, one tensor after the other, and wait until the disk has it.

    Args:
        path: Of a new file; the caller renames it or its folder when all is written.
        sources: By name, in the order of their bytes in the file.
        metadata: Strings to put into the header.
        header: A header to write as it is; it has to describe ``sources``.
        progress: Called with the number of bytes of each block that was written.

    Returns:
        The SHA-256 of the file.

    Raises:
        CheckpointError: If the disk refuses, or a source gives another number of bytes than it said.
    """
    written_header = _header(sources, metadata) if header is None else header
    digest = hashlib.sha256()
    try:
        with path.open("xb") as file:
            for block in (len(written_header).to_bytes(8, "little"), written_header):
                file.write(block)
                digest.update(block)
            for name, source in sources.items():
                written = 0
                for block in source.blocks():
                    file.write(block)
                    digest.update(block)
                    written += len(block)
                    if progress is not None:
                        progress(len(block))
                if written != source.info.nbytes:
                    raise CheckpointError(f"{path}: tensor {name!r}: {written} bytes, need {source.info.nbytes}.")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}. Free space or correct the storage.") from error
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hash a file in blocks.

    Raises:
        OSError: If it can't be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _header(sources: Mapping[str, TensorSource], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    at = 0
    for name, source in sources.items():
        end = at + source.info.nbytes
        entries[name] = {"dtype": source.info.dtype, "shape": list(source.info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("it names a key twice")
        return found

    try:
        entries = json.loads(header, object_pairs_hook=no_twice)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"its header is no JSON object: {error}") from error
    if not isinstance(entries, dict):
        raise _refused(path, "its header is no JSON object")
    return cast("dict[str, Any]", entries)


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, TensorInfo]:  # noqa: ANN401  # a JSON value
    try:
        dtype, shape, (begin, stop) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"tensor {name!r} lacks dtype, shape or data_offsets") from error
    numbers = (*shape, begin, stop)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise _refused(path, f"tensor {name!r} has shape {list(shape)} at {begin!r} to {stop!r}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} is {dtype}. Known types: {', '.join(DTYPES)}.")
    return begin, stop, TensorInfo(dtype=dtype, shape=shape)


def _refused(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: is no safetensors file, or is damaged: {reason}. Copy it again.")
