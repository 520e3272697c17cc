"""A policy's statistics in LeRobot's processor files: written only where they differ from what is there."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from joynexus.models.formats.lerobot_processors import (
    ACTION,
    NORMALIZER,
    POSTPROCESSOR,
    PREPROCESSOR,
    STATE,
    STATISTICS,
    UNNORMALIZER,
    read_json,
)
from joynexus.models.formats.streaming import TensorFile, tensor_source, write_tensors
from joynexus.types import NormalizationStats, PolicyStats


def write_lerobot_stats(folder: Path, stats: PolicyStats) -> None:
    """Put statistics into the normalisers of both processor files.

    Args:
        folder: With the files; those whose numbers agree already stay as they are, byte for byte.
        stats: The policy's.
    """
    features = {STATE: stats.state, ACTION: stats.action}
    known = {name: each for name, each in features.items() if each is not None}
    for file in (PREPROCESSOR, POSTPROCESSOR):
        content = read_json(folder / file)
        is_changed = False
        for index, step in enumerate(content["steps"]):
            name = step.get("registry_name")
            if name not in (NORMALIZER, UNNORMALIZER):
                continue
            if step.get("state_file") is None:
                step["state_file"] = f"{Path(file).stem}_step_{index}_{name}.safetensors"
                is_changed = True
            _write(folder / str(step["state_file"]), known)
        if is_changed:
            (folder / file).write_text(json.dumps(content, indent=2))


def _write(path: Path, features: Mapping[str, NormalizationStats]) -> None:
    before = _tensors(path)
    after = {**before}
    for feature, stats in features.items():
        is_new = not any(f"{feature}.{each}" in before for each in STATISTICS.values())
        for ours, theirs in STATISTICS.items():
            key, value = f"{feature}.{theirs}", torch.tensor(getattr(stats, ours))
            old = before.get(key)
            if is_new:
                after[key] = value
            elif old is not None and not torch.equal(old.float().reshape(-1), value):
                after[key] = value.to(old.dtype).reshape(old.shape)
    if any(after[name] is not before.get(name) for name in after):
        unfinished = path.with_name(f"{path.name}.new")
        write_tensors(unfinished, {name: tensor_source(each) for name, each in after.items()})
        unfinished.replace(path)


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        return {}
    file = TensorFile(path)
    return {name: file.tensor(name) for name in file.infos}
