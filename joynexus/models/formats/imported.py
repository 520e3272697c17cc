"""A checkpoint of another project, taken apart: what is frozen, what the tenant trains, and how both go together again.

Every tensor of the checkpoint has one place: ``backbone`` (transformers' own names), ``policy`` (the action module's
names) or ``kept`` (its own name): what neither uses, such as language-model heads, but an export has to give back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.streaming import DTYPES, TensorFile, TensorSource, tensor_source
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.messages import describe_errors
from joynexus.specs.registry import component_types
from joynexus.specs.tenant import PolicySpec
from joynexus.types import PolicyStats

Part = Literal["backbone", "policy", "kept"]
NAMED_KEYS = 4
"""Keys that an error names; of the others it gives the number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor of the checkpoint is put."""

    part: Part
    name: str
    """In that part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedPolicy:
    """A checkpoint of another project whose header, configuration and statistics have been read and checked."""

    project: Literal["lerobot", "starvla"]
    family: str
    """As the project names it, such as ``pi05`` or ``QwenOFT``."""
    tensors: TensorFile
    places: Mapping[str, Place]
    """Of every tensor, by its name in the checkpoint, in the order of the file."""
    backbone: Mapping[str, Any]
    """Fields of the backbone's spec, without ``path``."""
    policy: Mapping[str, Any]
    """Fields of the policy's spec, without ``backbone``."""
    stats: PolicyStats | None
    """None where the checkpoint has none: those of the first dataset are taken."""
    vlm_config: Mapping[str, Any]
    """Configuration of the vision-language model, as transformers has it."""
    vlm_files: Sequence[Path]
    """Tokenizer files."""
    original_files: Mapping[str, Path]
    """Files that an export gives back as they are, by their path in the checkpoint's folder."""
    layout: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the project's own export has to know."""
    notes: Sequence[str] = ()
    """What a person has to check in the files that are written."""

    def policy_spec(self, backbone: str) -> PolicySpec:
        """Return the policy on a backbone of this name.

        Raises:
            SpecError: If the checkpoint asks for something that its family can't be here.
        """
        try:
            return PolicySpec.model_validate({"backbone": backbone, **self.policy})
        except ValidationError as error:
            raise self._misfit(error, PolicySpec) from error

    def backbone_spec(self, path: Path | str) -> BackboneSpec:
        """Return the backbone, loaded from a folder.

        Raises:
            SpecError: As :meth:`policy_spec`.
        """
        kind = component_types("backbones")[str(self.backbone["type"])]
        try:
            spec = kind.model_validate({**self.backbone, "path": str(path)})
        except ValidationError as error:
            raise self._misfit(error, kind) from error
        assert isinstance(spec, BackboneSpec)
        return spec

    def _misfit(self, error: ValidationError, kind: Any) -> SpecError:  # noqa: ANN401  # a spec class
        lines = "; ".join(describe_errors(error, kind).lines)
        return SpecError(f"{self.tensors.path.parent}: {self.family} checkpoint can't be used here: {lines}")

    def names(self, part: Part) -> dict[str, str]:
        """Return the tensors of a part: name there to name in the checkpoint, in the order of the file."""
        return {place.name: name for name, place in self.places.items() if place.part == part}

    def module_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read the action module's tensors one by one, by parameter name, in the checkpoint's type."""
        return self._read("policy")

    def backbone_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read the frozen model's tensors one by one, by transformers' names, in the checkpoint's type."""
        return self._read("backbone")

    def _read(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        for name, original in self.names(part).items():
            yield name, self.tensors.tensor(original)

    def sources(self, part: Part) -> dict[str, TensorSource]:
        """Return a part's tensors as something to write; the policy's in float32, in which tenants train."""
        if part != "policy":
            return {name: self.tensors.source(original) for name, original in self.names(part).items()}
        return {name: float32_source(self.tensors, original) for name, original in self.names(part).items()}


def float32_source(tensors: TensorFile, name: str) -> TensorSource:
    """Return a tensor to be written in float32; every float32, float16 and bfloat16 survives the way back bit for bit.

    Raises:
        CheckpointError: If its type has numbers that float32 lacks.
    """
    info = tensors.infos[name]
    if info.dtype == "F32":
        return tensors.source(name)
    if DTYPES[info.dtype] not in (torch.float16, torch.bfloat16):
        raise CheckpointError(
            f"{tensors.path}: tensor {name!r} is {info.dtype}; modules train in float32. Convert the checkpoint first."
        )
    empty = tensor_source(torch.empty(info.shape, dtype=torch.float32, device="meta"))

    def blocks() -> Iterator[bytes | memoryview]:
        yield from tensor_source(tensors.tensor(name), "F32").blocks()

    return TensorSource(info=empty.info, blocks=blocks)


def some_of(names: Sequence[str]) -> str:
    """Name a few keys, and say how many there are."""
    shown = ", ".join(names[:NAMED_KEYS])
    return shown if len(names) <= NAMED_KEYS else f"{shown} and {len(names) - NAMED_KEYS} more"


def describe_misfit(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, name: Mapping[str, str]
) -> list[str]:
    """Compare tensors with those that are needed.

    Args:
        expected: Shapes by name.
        found: Likewise.
        name: Names to tell, by name; others tell themselves.

    Returns:
        One phrase for the missing, one for those that nobody knows, one for those of another shape.
    """
    missing = [name.get(each, each) for each in expected if each not in found]
    extra = [name.get(each, each) for each in found if each not in expected]
    other = [
        f"{name.get(each, each)} is {list(found[each])}, need {list(shape)}"
        for each, shape in expected.items()
        if each in found and found[each] != shape
    ]
    problems = [f"{len(missing)} missing: {some_of(missing)}"] if missing else []
    problems += [f"{len(extra)} that nobody knows: {some_of(extra)}"] if extra else []
    return problems + ([f"{len(other)} of another shape: {some_of(other)}"] if other else [])
