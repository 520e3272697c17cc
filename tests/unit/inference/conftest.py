import numpy as np
import pytest
import torch

from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import build_policy
from joynexus.specs.service import InferenceSpec
from joynexus.specs.tenant import PolicySpec
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.types import Observation, PolicySnapshot, PolicyStats, PredictRequest

MODULES = {
    "oft": {"type": "oft", "hidden_dim": 16, "num_layers": 2, "token_dim": 8},
    "gaussian": {"type": "gaussian", "hidden_dim": 16, "token_dim": 8},
    "flow_matching": {
        "type": "flow_matching",
        "hidden_dim": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_sampling_steps": 3,
    },
    "diffusion": {"type": "diffusion", "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "num_sampling_steps": 3},
    "discrete_tokens": {"type": "discrete_tokens", "hidden_dim": 16, "token_dim": 8, "slot_dim": 4, "num_bins": 8},
}


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(TINY_SMOLVLM)


@pytest.fixture
def make_engine(backbone):
    def make(**spec) -> InferenceEngine:
        return InferenceEngine(backbone, InferenceSpec(**spec), backbone_name="tiny")

    return make


@pytest.fixture
def engine(make_engine):
    return make_engine()


def make_policy(module: str = "oft", *, max_prompt_tokens: int = 8, normalization: str = "identity") -> PolicySpec:
    return PolicySpec.model_validate(
        {
            "backbone": "tiny",
            "observation": {
                "cameras": ["base"],
                "image_size": [32, 32],
                "state_dim": 3,
                "max_prompt_tokens": max_prompt_tokens,
            },
            "action": {"dim": 2, "horizon": 3, "num_action_steps": 1, "normalization": normalization},
            "action_module": MODULES[module],
        }
    )


@pytest.fixture
def snapshot(backbone):
    """Publications: of a freshly initialised module, or of one whose every action is ``constant``."""

    def make(
        tenant: str,
        version: int = 0,
        *,
        module: str = "oft",
        constant: float | None = None,
        seed: int = 0,
        stats: PolicyStats | None = None,
        **policy,
    ) -> PolicySnapshot:
        spec = make_policy(module, **policy)
        parts = build_policy(spec, backbone, seed=seed, stats=stats)
        parameters = {name: each.numpy().copy() for name, each in parts.module.state_dict().items()}
        if constant is not None:
            for name in ("leave.weight", "leave.bias"):
                parameters[name] = np.full_like(parameters[name], constant if name == "leave.bias" else 0.0)
        return PolicySnapshot(
            tenant=tenant, version=version, policy=spec, parameters=parameters, stats=stats, seed=seed
        )

    return make


@pytest.fixture
def request_of():
    """Requests whose rows all differ by ``content``, and are the same for the same content."""

    def make(
        tenant: str,
        content: int = 0,
        *,
        rows: int = 1,
        state: float | None = None,
        version: int | None = None,
        deterministic: bool = False,
    ) -> PredictRequest:
        draw = np.random.default_rng(content)
        states = draw.normal(size=(rows, 3)) if state is None else np.full((rows, 3), state)
        observation = Observation(
            images=draw.integers(0, 256, (rows, 1, 32, 32, 3), dtype=np.uint8),
            image_mask=np.ones((rows, 1), dtype=np.bool_),
            state=states.astype(np.float32),
            instructions=tuple(f"do {content}" for _ in range(rows)),
        )
        return PredictRequest(
            tenant=tenant,
            observation=observation,
            seeds=tuple(100 * content + row for row in range(rows)),
            deterministic=deterministic,
            version=version,
        )

    return make
