"""LeRobot policy folders: SmolVLA, π0 and π0.5 taken apart into frozen model, action module and statistics.

    config.json               type, features, hyperparameters
    model.safetensors         every tensor, under the names below
    policy_*processor.json    normalisation and prompt; their statistics in the ``state_file`` that they name

    model.vlm_with_expert.vlm.X                 backbone  X            SmolVLA
    model.vlm_with_expert.lm_expert.X           policy    lm_expert.X
    model.paligemma_with_expert.paligemma.X     backbone  X            π0, π0.5
    model.paligemma_with_expert.gemma_expert.X  policy    gemma_expert.X
    model.X                                     policy    X
    (language-model heads)                      kept

π0's other layout has no leading ``model.``, and the embedding under the name of the language-model head. Read from
LeRobot 0.6.1, https://github.com/huggingface/lerobot (Apache-2.0).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats import lerobot_families as families
from joynexus.models.formats.imported import ImportedPolicy, Place, some_of
from joynexus.models.formats.lerobot_processors import (
    ACTION,
    MODES,
    POSTPROCESSOR,
    PREPROCESSOR,
    STATE,
    Mode,
    Pipeline,
    read_json,
    read_pipeline,
    read_stats,
)
from joynexus.models.formats.streaming import TensorFile
from joynexus.models.formats.vlm_folder import vlm_folder

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one of LeRobot's policies is taken apart."""

    place: Callable[[str, Mapping[str, Any]], Place | None]
    """Where a tensor goes, by its name and the header; None if nobody knows it."""
    needs: Mapping[str, tuple[Any, ...]]
    """Options and the values of them that are supported."""
    fields: Callable[[families.Source], families.Fields]
    """The fields of both specs."""


FAMILIES: Mapping[str, Family] = {
    "smolvla": Family(place=families.place_smolvla, needs=families.SMOLVLA_NEEDS, fields=families.smolvla_fields),
    "pi0": Family(place=families.place_pi, needs=families.PI_NEEDS, fields=families.pi0_fields),
    "pi05": Family(place=families.place_pi, needs=families.PI_NEEDS, fields=families.pi05_fields),
}


def open_lerobot(path: Path | str, *, vlm: Path | str | None = None) -> ImportedPolicy:
    """Read a LeRobot policy folder; its weights are read later, tensor by tensor.

    Args:
        path: The folder.
        vlm: Folder with configuration and tokenizer of the vision-language model, where the checkpoint names a hub id
            that is not in the local cache.

    Returns:
        The policy.

    Raises:
        CheckpointError: If a file is missing or damaged, or holds tensors that the family lacks.
        SpecError: If an option is not supported, naming file and field.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Give the folder that holds {CONFIG} and {WEIGHTS}.")
    config = read_json(folder / CONFIG)
    name = str(config.get("type"))
    if name not in FAMILIES:
        raise SpecError(f"{folder / CONFIG}: type {name!r}: not supported. Known: {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    _check_options(folder / CONFIG, config, family)
    before, after = read_pipeline(folder / PREPROCESSOR), read_pipeline(folder / POSTPROCESSOR)
    modes = _modes(folder / CONFIG, config)
    tensors = TensorFile(folder / WEIGHTS)
    places = _places(tensors, family)
    found = vlm_folder(folder, named=_vlm_name(config, before), given=None if vlm is None else Path(vlm))
    source = families.Source(
        folder=folder, config=config, tokenizer=_tokenizer(before), tensors=tensors, places=places, vlm=found
    )
    fields = family.fields(source)
    stats = read_stats(before, modes, source=str(folder)) or read_stats(after, modes, source=str(folder))
    return ImportedPolicy(
        project="lerobot",
        family=name,
        tensors=tensors,
        places=places,
        backbone=fields.backbone,
        policy=_with_normalization(fields.policy, modes),
        stats=stats,
        vlm_config=fields.vlm_config,
        vlm_files=found.files(),
        original_files=_originals(folder, before, after) | found.inside(folder),
        layout={"weights": WEIGHTS},
        notes=fields.notes,
    )


def _places(tensors: TensorFile, family: Family) -> dict[str, Place]:
    found = {name: family.place(name, tensors.infos) for name in tensors.infos}
    unknown = [name for name, place in found.items() if place is None]
    if unknown:
        raise CheckpointError(f"{tensors.path}: {len(unknown)} tensors that nobody knows: {some_of(unknown)}.")
    return {name: place for name, place in found.items() if place is not None}


def _check_options(path: Path, config: Mapping[str, Any], family: Family) -> None:
    for name, supported in {**families.COMMON_NEEDS, **family.needs}.items():
        if name in config and config[name] not in supported:
            known = " or ".join(repr(each) for each in supported)
            raise SpecError(f"{path}: {name} {config[name]!r}: not supported, need {known}.")


def _modes(path: Path, config: Mapping[str, Any]) -> dict[str, Mode]:
    mapping = cast("dict[str, str]", config.get("normalization_mapping") or {})
    for kind, mode in mapping.items():
        known = ("IDENTITY",) if kind == "VISUAL" else tuple(MODES)
        if mode not in known:
            raise SpecError(f"{path}: normalization_mapping.{kind} {mode!r}: not supported, need {' or '.join(known)}.")
    return {name: MODES[mapping.get(kind, "IDENTITY")] for name, kind in ((STATE, "STATE"), (ACTION, "ACTION"))}


def _with_normalization(policy: Mapping[str, Any], modes: Mapping[str, Mode]) -> dict[str, Any]:
    """Give the action its mode, and the state its own where it has another."""
    seen = {**policy["observation"]}
    if modes[STATE] != modes[ACTION]:
        seen["normalization"] = modes[STATE]
    return {**policy, "observation": seen, "action": {**policy["action"], "normalization": modes[ACTION]}}


def _tokenizer(before: Pipeline) -> Mapping[str, Any]:
    config = before.config("tokenizer_processor")
    if config is None:
        raise SpecError(f"{before.path}: lacks the step 'tokenizer_processor'. Is it this policy's?")
    if config.get("padding_side", "right") != "right":
        raise SpecError(f"{before.path}: tokenizer_processor.padding_side {config['padding_side']!r}: need 'right'.")
    return config


def _vlm_name(config: Mapping[str, Any], before: Pipeline) -> str:
    return str(config.get("vlm_model_name") or _tokenizer(before).get("tokenizer_name"))


def _originals(folder: Path, before: Pipeline, after: Pipeline) -> dict[str, Path]:
    files = [folder / CONFIG, before.path, after.path, *before.state_files().values(), *after.state_files().values()]
    files += [each for each in (folder / "train_config.json",) if each.is_file()]
    return {each.name: each for each in files}
