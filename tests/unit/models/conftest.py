"""One tiny backbone for all, and a policy to go with it."""

import pytest
import torch

from joynexus.models.backbone import load_backbone
from joynexus.specs.tenant import PolicySpec
from joynexus.testing.tiny import TINY_SMOLVLM

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny():
    return load_backbone(TINY_SMOLVLM)


@pytest.fixture
def policy():
    return PolicySpec.model_validate(
        {
            "backbone": "tiny",
            "observation": {
                "cameras": ["base", "wrist"],
                "image_size": [32, 48],
                "state_dim": 3,
                "max_prompt_tokens": 24,
                "prompt_template": "do {instruction} now",
            },
            "action": {"dim": 2, "horizon": 4, "num_action_steps": 2, "normalization": "identity"},
            "action_module": {"type": "oft", "hidden_dim": 16, "token_dim": 4},
        }
    )
