"""The PaliGemma behind a π0 checkpoint, whose configuration only names a variant: ``gemma_2b`` with SigLIP So400m.

Sizes: Beyer et al. 2024, https://arxiv.org/abs/2407.07726, and Gemma Team 2024, https://arxiv.org/abs/2403.08295.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joynexus.errors import CheckpointError

EMBEDDING = "model.language_model.embed_tokens.weight"
PATCHES = "model.vision_tower.vision_model.embeddings.patch_embedding.weight"
POSITIONS = "model.vision_tower.vision_model.embeddings.position_embedding.weight"

GEMMA_2B: Mapping[str, Any] = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 257152,
}
SO400M: Mapping[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 2048,
    "projector_hidden_act": "gelu_fast",
    "vision_use_head": False,
}


def paligemma_config(shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """Return the configuration, for tensors of the variant's sizes.

    Args:
        shapes: Of the frozen model's tensors, by transformers' names.
        path: Of the checkpoint, for messages.

    Raises:
        CheckpointError: If the tensors have other sizes: the configuration then has to be given.
    """
    vocabulary, width = shapes.get(EMBEDDING, (0, 0))
    vision, _, patch, _ = shapes.get(PATCHES, (0, 0, 0, 0))
    positions, _ = shapes.get(POSITIONS, (0, 0))
    if (width, vision, patch) != (GEMMA_2B["hidden_size"], SO400M["hidden_size"], SO400M["patch_size"]):
        raise CheckpointError(
            f"{path}: its PaliGemma is {width} wide with a vision tower of {vision}, not the released one. "
            "Give --vlm FOLDER with its config.json and tokenizer."
        )
    return {
        "model_type": "paligemma",
        "hidden_size": width,
        "projection_dim": width,
        "image_token_index": vocabulary,
        "text_config": {**GEMMA_2B, "vocab_size": vocabulary},
        "vision_config": {**SO400M, "image_size": round(positions**0.5) * patch},
    }
