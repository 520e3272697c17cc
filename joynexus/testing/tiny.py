"""Tiny models, cheap enough for hundreds of forwards in a test."""

from joynexus.specs.vlm_backbones import PaliGemmaBackboneSpec, SmolVlmBackboneSpec

TINY_SMOLVLM = SmolVlmBackboneSpec(
    init="random",
    seed=7,
    chunk_size=4,
    config={
        "scale_factor": 2,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.2,
        },
    },
)
"""SmolVLM with 2 random language layers of width 32, 4 tokens per camera, and a byte-level tokenizer."""

TINY_PALIGEMMA = PaliGemmaBackboneSpec(
    init="random",
    seed=7,
    chunk_size=4,
    config={
        "projection_dim": 32,
        "text_config": {
            "model_type": "gemma",
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
)
"""PaliGemma with 2 random language layers of width 32, 4 tokens per camera, and a byte-level tokenizer."""
