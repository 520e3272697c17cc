"""LeRobot's processor pipelines: which steps a policy's inputs and actions go through, and their statistics.

``policy_preprocessor.json`` and ``policy_postprocessor.json`` list steps; a step with tensors names its file in
``state_file``, whose number differs from policy to policy. The statistics are in the normaliser's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.streaming import TensorFile
from joynexus.types import Array, NormalizationStats, PolicyStats

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER, UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
STATE, ACTION = "observation.state", "action"
MAX_JSON_BYTES = 16 << 20

Mode = Literal["mean_std", "min_max", "quantile", "identity"]
MODES: Mapping[str, Mode] = {
    "MEAN_STD": "mean_std",
    "MIN_MAX": "min_max",
    "QUANTILES": "quantile",
    "IDENTITY": "identity",
}
STATISTICS: Mapping[str, str] = {
    "mean": "mean",
    "std": "std",
    "minimum": "min",
    "maximum": "max",
    "q01": "q01",
    "q99": "q99",
}
"""LeRobot's names of our statistics."""
NEEDED: Mapping[Mode, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("minimum", "maximum"),
    "quantile": ("q01", "q99"),
    "identity": (),
}
NEUTRAL: Mapping[str, float] = {
    "mean": 0.0,
    "std": 1.0,
    "minimum": -1.0,
    "maximum": 1.0,
    "q01": -1.0,
    "q99": 1.0,
}
"""What leaves a number as it is; stands for statistics that a checkpoint lacks and its mode does not read."""

KNOWN_STEPS = (
    "rename_observations_processor",
    "to_batch_processor",
    "smolvla_new_line_processor",
    "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "tokenizer_processor",
    "device_processor",
    NORMALIZER,
    UNNORMALIZER,
    "relative_actions_processor",
    "absolute_actions_processor",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One processor file."""

    path: Path
    content: Mapping[str, Any]

    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps in their order."""
        return cast("list[dict[str, Any]]", self.content["steps"])

    def config(self, name: str) -> Mapping[str, Any] | None:
        """Return the configuration of the first step of this name; None where there is none."""
        found = (step for step in self.steps() if step.get("registry_name") == name)
        step = next(found, None)
        return None if step is None else cast("dict[str, Any]", step.get("config") or {})

    def state_files(self) -> dict[int, Path]:
        """Return the files of tensors by the index of their step.

        Raises:
            CheckpointError: If one is not in the folder of the checkpoint.
        """
        found: dict[int, Path] = {}
        for index, step in enumerate(self.steps()):
            name = step.get("state_file")
            if name is None:
                continue
            file = self.path.parent / str(name)
            if Path(str(name)).name != name or not file.is_file():
                raise CheckpointError(f"{self.path}: steps[{index}].state_file {name!r}: no such file beside it.")
            found[index] = file
        return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size.

    Raises:
        CheckpointError: If it is missing, too large or no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes, no configuration. Is it this file?")
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Is its folder a whole checkpoint?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON: {error}. Copy it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object. Copy it again.")
    return cast("dict[str, Any]", content)


def read_pipeline(path: Path) -> Pipeline:
    """Read a processor file and refuse steps that would change numbers in a way that nothing here does.

    Raises:
        CheckpointError: If it can't be read.
        SpecError: Naming the step.
    """
    pipeline = Pipeline(path=path, content=read_json(path))
    steps: object = pipeline.content.get("steps")
    if not isinstance(steps, list) or not all(isinstance(each, dict) for each in cast("list[object]", steps)):
        raise CheckpointError(f"{path}: 'steps' is no list of objects. Copy it again.")
    for index, step in enumerate(pipeline.steps()):
        name, config = step.get("registry_name"), cast("dict[str, Any]", step.get("config") or {})
        if name not in KNOWN_STEPS:
            raise SpecError(f"{path}: steps[{index}] {name!r}: not supported. Known: {', '.join(KNOWN_STEPS)}.")
        if name in ("relative_actions_processor", "absolute_actions_processor") and config.get("enabled"):
            raise SpecError(f"{path}: steps[{index}].config.enabled: relative actions are not supported.")
        if config.get("rename_map"):
            raise SpecError(f"{path}: steps[{index}].config.rename_map: not supported. Rename the dataset's features.")
    return pipeline


def read_stats(pipeline: Pipeline, modes: Mapping[str, Mode], *, source: str) -> PolicyStats | None:
    """Read the statistics of state and action from a pipeline's normaliser.

    Args:
        pipeline: With a step ``normalizer_processor``, or ``unnormalizer_processor``.
        modes: Of ``observation.state`` and ``action``.
        source: Where they are from, for messages.

    Returns:
        None where it has none at all.

    Raises:
        CheckpointError: If the mode of a feature needs statistics that are missing.
    """
    steps = pipeline.steps()
    files = [
        file
        for index, file in pipeline.state_files().items()
        if steps[index].get("registry_name") in (NORMALIZER, UNNORMALIZER)
    ]
    if not files:
        return None
    tensors = TensorFile(files[0])
    found = {name: _feature(tensors, name, mode) for name, mode in modes.items()}
    if not any(found.values()):
        return None
    return PolicyStats(state=found.get(STATE), action=found.get(ACTION), source=source)


def _feature(tensors: TensorFile, feature: str, mode: Mode) -> NormalizationStats | None:
    vectors: dict[str, Array] = {}
    for ours, theirs in STATISTICS.items():
        if f"{feature}.{theirs}" in tensors.infos:
            vectors[ours] = tensors.tensor(f"{feature}.{theirs}").float().reshape(-1).numpy()
    if not vectors:
        return None
    missing = [STATISTICS[each] for each in NEEDED[mode] if each not in vectors]
    if missing:
        raise CheckpointError(f"{tensors.path}: {feature} lacks {missing}, which normalisation {mode!r} needs.")
    widths = {len(each) for each in vectors.values()}
    if len(widths) != 1:
        raise CheckpointError(f"{tensors.path}: the statistics of {feature} differ in length: {sorted(widths)}.")
    (width,) = widths
    filled = {name: vectors.get(name, np.full(width, NEUTRAL[name], dtype=np.float32)) for name in STATISTICS}
    count = f"{feature}.count"
    return NormalizationStats(
        **filled, count=int(tensors.tensor(count).reshape(-1)[0]) if count in tensors.infos else 0
    )
