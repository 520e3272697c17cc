"""StarVLA run folders: the frameworks QwenOFT and QwenGR00T taken apart into frozen Qwen-VL, head and statistics.

    config.yaml                            framework, sizes, prompt
    checkpoints/steps_N_model.safetensors  every tensor, under the names below
    dataset_statistics.json                by robot: action and state, with a mask of the dimensions it is applied to

    qwen_vl_interface.model.X  backbone  X
    action_model.X             policy    X
    (language-model head)      kept

Read from StarVLA 1.0.1, https://github.com/starVLA/starVLA (MIT).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.imported import ImportedPolicy, Place, some_of
from joynexus.models.formats.lerobot_processors import Mode, read_json
from joynexus.models.formats.qwen_prompt import QwenPrompt
from joynexus.models.formats.starvla_frameworks import FRAMEWORKS, Run
from joynexus.models.formats.starvla_statistics import read_statistics
from joynexus.models.formats.streaming import TensorFile
from joynexus.models.formats.vlm_folder import vlm_folder
from joynexus.specs.documents import read_documents

CONFIG, CHECKPOINTS, STATISTICS = "config.yaml", "checkpoints", "dataset_statistics.json"
VLM, HEAD, MODULE = "qwen_vl_interface.model.", "lm_head.weight", "action_model."
BACKBONES = ("qwen3_vl", "qwen2_5_vl")
"""Backbones by the ``model_type`` of the model's configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StarVlaOptions:
    """What a StarVLA checkpoint does not say of itself."""

    vlm: Path | None = None
    """Folder with configuration and tokenizer; None: the one that the configuration names."""
    robot: str | None = None
    """Key of the statistics; None: the only one."""
    cameras: tuple[str, ...] | None = None
    """Cameras in their order; None: those of ``datasets.vla_data.obs``."""
    normalization: Mode = "min_max"
    """Which statistics the data was normalised with: StarVLA has that in its data code, not in the checkpoint."""


def open_starvla(path: Path | str, *, options: StarVlaOptions | None = None) -> ImportedPolicy:
    """Read a StarVLA run; its weights are read later, tensor by tensor.

    Args:
        path: The run's folder, or one of its checkpoints where it has several.
        options: What the checkpoint does not say.

    Returns:
        The policy.

    Raises:
        CheckpointError: If a file is missing or damaged, or holds tensors that the framework lacks.
        SpecError: If an option is not supported, naming file and field.
    """
    given = options or StarVlaOptions()
    folder, weights = _find(Path(path))
    config = _read_config(folder / CONFIG)
    framework = cast("dict[str, Any]", config.get("framework") or {})
    name = str(framework.get("name") or framework.get("framework_py"))
    if name not in FRAMEWORKS:
        raise SpecError(f"{folder / CONFIG}: framework.name {name!r}: not supported. Known: {', '.join(FRAMEWORKS)}.")
    tensors = TensorFile(weights)
    named = str(cast("dict[str, Any]", framework.get("qwenvl") or {}).get("base_vlm"))
    found = vlm_folder(folder, named=named, given=given.vlm)
    if found.config is None:
        raise CheckpointError(f"{found.tokenizer}: lacks config.json of the vision-language model. Add it.")
    vlm_config = read_json(found.config)
    kind = str(vlm_config.get("model_type"))
    if kind not in BACKBONES:
        raise SpecError(f"{found.config}: model_type {kind!r}: not supported. Known: {', '.join(BACKBONES)}.")
    places = _places(tensors, kind)
    robot, stats = read_statistics(folder / STATISTICS, given.robot)
    run = Run(
        path=folder / CONFIG,
        config=config,
        tensors=tensors,
        places=places,
        stats=stats,
        prompt=QwenPrompt.read(found.tokenizer),
        cameras=given.cameras,
        normalization=given.normalization,
    )
    fields = FRAMEWORKS[name](run)
    return ImportedPolicy(
        project="starvla",
        family=name,
        tensors=tensors,
        places=places,
        backbone={"type": kind, "dtype": run.dtype(), "hidden_state": "last_layer", **_processor(found.tokenizer)},
        policy=fields.policy,
        stats=stats,
        vlm_config=_with_layers(vlm_config, run.num_layers()),
        vlm_files=found.files(),
        original_files={each: folder / each for each in (CONFIG, STATISTICS) if (folder / each).is_file()}
        | found.inside(folder),
        layout={"weights": str(weights.relative_to(folder)), "robot": robot},
        notes=fields.notes,
    )


def _find(path: Path) -> tuple[Path, Path]:
    """Find the run's folder and the one checkpoint that is meant."""
    if path.suffix == ".safetensors":
        return path.parent.parent, path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder. Give the folder that holds {CONFIG} and {CHECKPOINTS}/.")
    found = sorted((path / CHECKPOINTS).glob("*.safetensors"))
    if len(found) == 1:
        return path, found[0]
    if found:
        names = some_of([each.name for each in found])
        raise CheckpointError(f"{path}: {len(found)} checkpoints: {names}. Give the path of one.")
    others = some_of([each.name for each in (path / CHECKPOINTS).glob("*.pt")])
    hint = f", only {others}, whose format can run code. Save them as safetensors first" if others else ""
    raise CheckpointError(f"{path}: no {CHECKPOINTS}/*.safetensors{hint or '. Is it a run of StarVLA?'}")


def _read_config(path: Path) -> dict[str, Any]:
    documents = read_documents(path)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise SpecError(f"{path}: need one mapping. Is it StarVLA's configuration?")
    return cast("dict[str, Any]", documents[0])


def _places(tensors: TensorFile, kind: str) -> dict[str, Place]:
    places: dict[str, Place] = {}
    unknown: list[str] = []
    for name in tensors.infos:
        inner = name.removeprefix(VLM)
        if inner == HEAD:
            places[name] = Place(part="kept", name=name)
        elif inner != name:
            places[name] = Place(part="backbone", name=_name_on_disk(inner, kind))
        elif name.startswith(MODULE):
            places[name] = Place(part="policy", name=name.removeprefix(MODULE))
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"{tensors.path}: {len(unknown)} tensors that nobody knows: {some_of(unknown)}.")
    return places


def _name_on_disk(name: str, kind: str) -> str:
    """Return the name under which the library looks for a tensor in a file: Qwen2.5-VL's is older than its class."""
    if kind != "qwen2_5_vl":
        return name
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def _with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Put the number of language layers into a configuration; Qwen2.5-VL's own has no part for the language model."""
    if "text_config" not in config:
        return {**config, "num_hidden_layers": count}
    return {**config, "text_config": {**config["text_config"], "num_hidden_layers": count}}


def _processor(folder: Path) -> dict[str, Any]:
    """Read how frames are resized and scaled, as far as the processor's configuration says it."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return {}
    config: Mapping[str, Any] = read_json(path)
    size = cast("dict[str, Any]", config.get("size") or {})
    fields = {
        "min_pixels": config.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": config.get("max_pixels") or size.get("longest_edge"),
        "image_mean": config.get("image_mean"),
        "image_std": config.get("image_std"),
    }
    return {name: value for name, value in fields.items() if value is not None}
