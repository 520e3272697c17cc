"""What the core benchmarks train: random backbones of several sizes, policies, batches, and a tenant's-eye trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.core.qwen3_vl import QWEN3_VL_2B, TINY, Qwen3VlBackbone, Qwen3VlSpec
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.prefix import PrefixBatch
from joynexus.specs.action_module import (
    ActionModuleSpec,
    FlowMatchingModuleSpec,
    GaussianModuleSpec,
    OftModuleSpec,
)
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.service import PrefixStoreSpec, TrainingSpec
from joynexus.specs.tenant import ActionSpec, ObservationSpec, PolicySpec
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec
from joynexus.training.engine import TrainingEngine
from joynexus.training.optimizer import Moments
from joynexus.types import Arrays, Loss, Observation, TrainingBatch, TrainingCall, TrainingResult

BACKBONE = "benchmark"
STATE_DIM, ACTION_DIM, HORIZON = 8, 7, 16
STORE_BYTES = 8 << 30
"""Room for all that a benchmark encodes: what is measured is reuse, not eviction."""
GPU_CHUNK = 8
"""Rows of a full chunk on a GPU, which fills smaller ones up: as many as wait together in most points."""
SUPERVISED = Loss(name="supervised")
HEADS: dict[str, ActionModuleSpec] = {
    "oft": OftModuleSpec(max_prefix_tokens=1024, token_dim=8),
    "flow_matching": FlowMatchingModuleSpec(),
    "gaussian": GaussianModuleSpec(max_prefix_tokens=1024, token_dim=8),
}
SMOLVLM = {"3M": (192, 6, 128, 2), "15M": (384, 8, 256, 3), "37M": (576, 8, 384, 4)}
"""Width and layers of the language model, then of the vision tower."""
SIZES = (*SMOLVLM, "qwen3vl-2b", "qwen3vl-tiny")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a policy sees; both backbones turn 32 by 32 pixels into a token."""

    name: str
    cameras: int
    side: int
    """Height and width of a frame in pixels."""
    text_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return self.cameras * (self.side // 32) ** 2 + self.text_tokens


SHORT = Scene(name="short", cameras=1, side=64, text_tokens=12)
MIDDLE = Scene(name="middle", cameras=2, side=128, text_tokens=32)
LONG = Scene(name="long", cameras=2, side=256, text_tokens=48)


def load(size: str, scene: Scene, *, device: str, seed: int, chunk_size: int | None = None) -> Backbone:
    """Build a random backbone of one of :data:`SIZES`, for frames of a scene."""
    chunk = {} if chunk_size is None else {"chunk_size": chunk_size}
    spec: BackboneSpec
    if size.startswith("qwen3vl"):
        chunk = chunk or {"chunk_size": GPU_CHUNK}
        config, dtype = (TINY, "float32") if size.endswith("tiny") else (QWEN3_VL_2B, "bfloat16")
        spec = Qwen3VlSpec.model_validate({"config": config, "dtype": dtype, "seed": seed, **chunk})
    else:
        spec = SmolVlmBackboneSpec.model_validate(
            {"init": "random", "seed": seed, "config": _smolvlm(size, scene), **chunk}
        )
    return load_backbone(spec, device)


def without_dummies(backbone: Backbone, rows: int) -> Backbone:
    """Return the backbone as somebody alone would run it: forwards of just the rows that there are.

    The product fills chunks up where a machine rounds small batches otherwise, as GPUs do. A baseline does not.
    """
    return backbone.with_chunk(rows) if isinstance(backbone, Qwen3VlBackbone) else backbone


def policy(scene: Scene, module: ActionModuleSpec) -> PolicySpec:
    """Return a policy that looks at a scene."""
    return PolicySpec(
        backbone=BACKBONE,
        observation=ObservationSpec(
            cameras=tuple(f"camera{index}" for index in range(scene.cameras)),
            image_size=(scene.side, scene.side),
            state_dim=STATE_DIM,
            max_prompt_tokens=scene.text_tokens,
            prompt_template="{instruction}",
        ),
        action=ActionSpec(dim=ACTION_DIM, horizon=HORIZON, num_action_steps=8, normalization="identity"),
        action_module=module,
    )


def observation(scene: Scene, rows: int, *, seed: int) -> Observation:
    """Draw frames and states."""
    draw = np.random.default_rng(seed)
    return Observation(
        images=draw.integers(0, 256, (rows, scene.cameras, scene.side, scene.side, 3), dtype=np.uint8),
        image_mask=np.ones((rows, scene.cameras), dtype=np.bool_),
        state=draw.standard_normal((rows, STATE_DIM), dtype=np.float32),
        instructions=tuple("push cube" if row % 2 else "pick cube" for row in range(rows)),
    )


def batch(scene: Scene, rows: int, *, seed: int) -> TrainingBatch:
    """Draw a micro-batch."""
    draw = np.random.default_rng(seed + 1_000_000)
    return TrainingBatch(
        observation=observation(scene, rows, seed=seed),
        actions=draw.uniform(-0.9, 0.9, (rows, HORIZON, ACTION_DIM)).astype(np.float32),
        action_is_pad=np.zeros((rows, HORIZON), dtype=np.bool_),
        sample_ids=tuple(f"{seed}/{row}" for row in range(rows)),
    )


def stacked(parts: Sequence[PrefixBatch]) -> PrefixBatch:
    """Join rows of several tenants."""
    return PrefixBatch(
        images=torch.cat([part.images for part in parts]),
        image_mask=torch.cat([part.image_mask for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        token_mask=torch.cat([part.token_mask for part in parts]),
    )


class Trainer:
    """The product's training engine with some tenants' slots, driven without Ray."""

    def __init__(
        self,
        backbone: Backbone,
        policies: Mapping[str, PolicySpec],
        *,
        is_reusing: bool,
        seed: int,
        moments: Moments = "float32",
    ) -> None:
        """Open a slot per tenant.

        Args:
            backbone: May be shared by several trainers that are not used at once.
            policies: By tenant.
            is_reusing: Whether the prefix store has room; without it every prefix is encoded again.
            seed: Of the modules; tenant i of the name ``tenant<i>`` adds i.
            moments: Type that AdamW's moments are kept in.
        """
        room = STORE_BYTES if is_reusing else 0
        spec = TrainingSpec(
            slots=len(policies),
            device_bytes=1 << 40,
            max_group_samples=1024,
            moments=moments,
            prefix_store=PrefixStoreSpec(device_bytes=room, host_bytes=0),
        )
        self.engine = TrainingEngine(backbone, spec, backbone_name=BACKBONE)
        self._sequence = dict.fromkeys(policies, 0)
        self.encoded = 0
        """Prefixes that went through the backbone."""
        self.samples = 0
        """Rows that were learnt from."""
        for name, each in policies.items():
            self.engine.open_slot(name, each, seed=seed + int(name.removeprefix("tenant")))

    @property
    def tenants(self) -> list[str]:
        """Names of those that are trained here."""
        return list(self._sequence)

    def step(self, batches: Mapping[str, TrainingBatch], *, loss: Loss = SUPERVISED) -> list[TrainingResult]:
        """Make a whole training step, forward, backward and optimizer, for each tenant that has a batch."""
        futures = [
            self.engine.submit(
                TrainingCall(
                    tenant=tenant,
                    sequence=self._sequence[tenant],
                    batch=each,
                    loss=loss,
                    optimizer=OptimizerSpec(),
                ),
                is_repeatable=False,
            )
            for tenant, each in batches.items()
        ]
        for tenant in batches:
            self._sequence[tenant] += 1
        while self.engine.has_work:
            self.engine.step()
        results = [future.result(timeout=0) for future in futures]
        self.encoded += sum(result.encoded for result in results)
        self.samples += sum(len(each) for each in batches.values())
        return results

    def parameters(self, tenant: str) -> Arrays:
        """Return a copy of a tenant's parameters."""
        return dict(self.engine.snapshot(tenant).parameters)


def isolated(backbone: Backbone, policies: Mapping[str, PolicySpec], *, is_reusing: bool, seed: int) -> list[Trainer]:
    """Give each tenant a trainer of its own."""
    return [Trainer(backbone, {name: each}, is_reusing=is_reusing, seed=seed) for name, each in policies.items()]


def names(count: int) -> list[str]:
    """Return the names of some tenants."""
    return [f"tenant{index}" for index in range(count)]


def largest_difference(shared: Trainer, alone: Sequence[Trainer]) -> float:
    """Return the largest distance of a parameter trained beside others from the same one trained alone."""
    worst = 0.0
    for trainer in alone:
        for tenant in trainer.tenants:
            mine, other = trainer.parameters(tenant), shared.parameters(tenant)
            worst = max(worst, *(float(np.abs(mine[name] - other[name]).max()) for name in mine))
    return worst


def tensor_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest distance between numbers of two lists of tensors."""
    return max(float((mine.float() - other.float()).abs().max()) for mine, other in zip(first, second, strict=True))


def _smolvlm(size: str, scene: Scene) -> dict[str, object]:
    width, layers, vision_width, vision_layers = SMOLVLM[size]
    return {
        "scale_factor": 2,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 264,
            "hidden_size": width,
            "intermediate_size": width * 8 // 3 // 8 * 8,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
            "num_key_value_heads": width // 192,
            "head_dim": 64,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "hidden_size": vision_width,
            "intermediate_size": 4 * vision_width,
            "num_hidden_layers": vision_layers,
            "num_attention_heads": vision_width // 64,
            "image_size": max(scene.side, 64),
            "patch_size": 16,
        },
    }
