"""Tiny models, cheap enough for hundreds of forwards in a test."""

from joynexus.specs.vlm_backbones import (
    HfBackboneSpec,
    PaliGemmaBackboneSpec,
    Qwen3VlBackboneSpec,
    Qwen25VlBackboneSpec,
    SmolVlmBackboneSpec,
)

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

TINY_QWEN3_VL = Qwen3VlBackboneSpec(
    init="random",
    seed=7,
    chunk_size=4,
    min_pixels=1024,
    chat_header="user ",
    chat_footer=" ok",
    config={
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "text_config": {
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "initializer_range": 0.2,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.2,
        },
    },
)
"""Qwen3-VL with 3 random language layers of width 32, 4 tokens per camera of 64 x 64 pixels and 2 around them."""

TINY_QWEN2_5_VL = Qwen25VlBackboneSpec(
    init="random",
    seed=7,
    chunk_size=4,
    config={
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "text_config": {
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
            "bos_token_id": None,
            "eos_token_id": None,
            "initializer_range": 0.2,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "window_size": 28,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
    },
)
"""Qwen2.5-VL with 2 random language layers of width 32, windows of one token in the first layer of its tower."""

TINY_HF = HfBackboneSpec(
    init="random",
    seed=7,
    chunk_size=4,
    image_side=32,
    tokens_per_image=4,
    frames_by_row=True,
    image_start="<",
    image_end=">",
    config={
        "model_type": "idefics3",
        "scale_factor": 2,
        "image_token_id": 3,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
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
"""Idefics3 through the library: 2 random language layers of width 32, 4 tokens per camera and 2 around them."""
