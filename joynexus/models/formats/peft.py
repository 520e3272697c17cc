"""A tenant's adapter as a PEFT checkpoint, to be loaded on the family's class of transformers.

adapter_config.json          what PEFT builds the layers from
adapter_model.safetensors    ``base_model.model.PATH.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r], float32

PATH is that of the layer in the class that the backbone is read into (``SmolVLMModel``, ``PaliGemmaModel``, ...), which
has no language-model head::

    model = PeftModel.from_pretrained(SmolVLMModel.from_pretrained(PATH_OF_THE_BACKBONE), FOLDER)
"""

import json
from pathlib import Path
from typing import Any

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.adapters import PREFIX
from joynexus.models.formats.streaming import array_source, write_tensors
from joynexus.specs.backbone import BackboneSpec
from joynexus.types import PolicySnapshot

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Before the names of PEFT's tensors: the adapted model within PEFT's own."""
SUFFIX = ".lora_A.weight"


def write_peft(folder: Path, snapshot: PolicySnapshot, backbone: BackboneSpec | None = None) -> Path:
    """Write a version's adapter. The action module is none of PEFT's; an export of joynexus holds both.

    Args:
        folder: Where to; made if it is not there. It must not hold an adapter yet.
        snapshot: Of a policy with an adapter.
        backbone: The one that it was trained on, to name it in the files; None leaves it open.

    Returns:
        The folder.

    Raises:
        SpecError: If the policy has no adapter.
        CheckpointError: If there is an adapter already, or the disk refuses.
    """
    spec = snapshot.policy.adapter
    if spec is None:
        raise SpecError(
            f"tenant {snapshot.tenant!r}: its policy has no adapter, so there is nothing for PEFT. "
            "Export it as 'joynexus', or train it with 'adapter'."
        )
    named = {
        f"{PEFT_PREFIX}{name.removeprefix(PREFIX)}": array_source(each)
        for name, each in snapshot.parameters.items()
        if name.startswith(PREFIX)
    }
    paths = [name.removeprefix(PEFT_PREFIX).removesuffix(SUFFIX) for name in named if name.endswith(SUFFIX)]
    about = {name: getattr(backbone, name, None) for name in ("path", "revision")}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": about["path"],
        "revision": about["revision"],
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": paths,  # in full: names alone would adapt the vision tower too
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / WEIGHTS, named, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}. Free space or correct the storage.") from error
    return folder
