"""What StarVLA's QwenOFT and QwenGR00T say of themselves, in the fields of our specs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.imported import Place
from joynexus.models.formats.lerobot_processors import Mode
from joynexus.models.formats.qwen_prompt import QwenPrompt
from joynexus.models.formats.streaming import TensorFile
from joynexus.types import PolicyStats

ACTION_TOKEN = "🔍"
DIT_SIZES: Mapping[str, tuple[int, int]] = {"DiT-B": (12, 64), "DiT-L": (32, 48)}
"""Attention heads and their width by the name of the size."""
NEEDS: Mapping[str, tuple[Any, ...]] = {
    "past_action_window_size": (0,),
    "noise_beta_alpha": (1.5,),
    "noise_beta_beta": (1.0,),
    "noise_s": (0.999,),
}
DIT_NEEDS: Mapping[str, tuple[Any, ...]] = {
    "norm_type": ("ada_norm",),
    "positional_embeddings": (None,),
    "interleave_self_attention": (True,),
}
DEFAULT_SIDE = 224
UNSAID = (
    "policy.observation: check cameras, image_size and max_prompt_tokens, which the checkpoint does not say",
    "policy.action.normalization: StarVLA's data code chooses it, not the checkpoint; check it",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the fields are derived from."""

    path: Path
    """Of ``config.yaml``."""
    config: Mapping[str, Any]
    tensors: TensorFile
    places: Mapping[str, Place]
    stats: PolicyStats | None
    prompt: QwenPrompt
    cameras: tuple[str, ...] | None
    normalization: Mode

    def section(self, *names: str) -> Mapping[str, Any]:
        """Return a nested part of the configuration; empty where it is missing."""
        found: Any = self.config
        for name in names:
            found = cast("dict[str, Any]", found).get(name) or {}
        return cast("dict[str, Any]", found)

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a part's tensors by their names there."""
        return {place.name: self.tensors.infos[name].shape for name, place in self.places.items() if place.part == part}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of the head's tensors.

        Raises:
            CheckpointError: If it is missing.
        """
        shape = self.shapes("policy").get(name)
        if shape is None:
            raise CheckpointError(f"{self.tensors.path}: lacks 'action_model.{name}'. Is it a whole checkpoint?")
        return shape

    def count(self, part: str, pattern: str) -> int:
        """Count the layers of a part whose names match ``pattern`` with the index in a group."""
        return len({match[1] for name in self.shapes(part) if (match := re.match(pattern, name))})

    def num_layers(self) -> int:
        """Count the language layers."""
        return self.count("backbone", r"model\.(?:language_model\.)?layers\.(\d+)\.")

    def dtype(self) -> str:
        """Return the type in which most of the frozen model is stored."""
        kinds = [self.tensors.infos[name].dtype for name, place in self.places.items() if place.part == "backbone"]
        return "bfloat16" if kinds.count("BF16") > len(kinds) // 2 else "float32"

    def check(self, where: str, section: Mapping[str, Any], needs: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse options that are not supported.

        Raises:
            SpecError: Naming file and field.
        """
        for name, supported in needs.items():
            if name in section and section[name] not in supported:
                known = " or ".join(repr(each) for each in supported)
                raise SpecError(f"{self.path}: {where}.{name} {section[name]!r}: not supported, need {known}.")

    def horizon(self) -> int:
        """Return the length of a chunk, under its present name or its old one."""
        head = self.section("framework", "action_model")
        horizon = head.get("action_horizon") or (head.get("future_action_window_size") or 0) + 1
        if not isinstance(horizon, int) or horizon < 1:
            raise SpecError(f"{self.path}: framework.action_model.action_horizon {horizon!r}: need a whole number.")
        return horizon


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Fields of the policy, and what a person has to look at."""

    policy: Mapping[str, Any]
    notes: tuple[str, ...]


def oft_fields(run: Run) -> Fields:
    """Describe a QwenOFT policy: an MLP over the hidden states of one action token per step."""
    horizon = run.horizon()
    asked = f" Please predict the next {horizon} robot actions: <action>{ACTION_TOKEN * horizon}<action>."
    state_dim = _state_width(run)
    if not run.section("datasets", "vla_data").get("include_state", True):
        state_dim = 0
    template = _template(run, (" [STATE] {state} [ACTION]" if state_dim else "") + asked)
    module = {
        "type": "oft",
        "reads": "queries",
        "query_tail": run.prompt.tail(template, ACTION_TOKEN),
        "hidden_dim": run.shape("model.fc1.weight")[0],
        "num_layers": run.count("policy", r"model\.mlp_resnet_blocks\.(\d+)\."),
    }
    action_dim = run.shape("model.fc2.weight")[0]
    return _fields(run, module, template=template, state_dim=state_dim, action_dim=action_dim)


def gr00t_fields(run: Run) -> Fields:
    """Describe a QwenGR00T policy: a diffusion transformer that attends to the hidden states of the last layer."""
    head = run.section("framework", "action_model")
    dit = run.section("framework", "action_model", "diffusion_model_cfg")
    run.check("framework.action_model", head, NEEDS)
    run.check("framework.action_model.diffusion_model_cfg", {"interleave_self_attention": False, **dit}, DIT_NEEDS)
    heads, head_dim = DIT_SIZES.get(str(head.get("action_model_type")), (0, 0))
    heads, head_dim = int(dit.get("num_attention_heads", heads)), int(dit.get("attention_head_dim", head_dim))
    width = run.shape("future_tokens.weight")[1]
    if heads * head_dim != width:
        raise SpecError(
            f"{run.path}: framework.action_model: {heads} heads of {head_dim} are not the width {width} of the tensors."
        )
    shapes = run.shapes("policy")
    module = {
        "type": "gr00t",
        "hidden_dim": run.shape("action_decoder.layer1.weight")[0],
        "num_heads": heads,
        "head_dim": head_dim,
        "num_layers": run.count("policy", r"model\.transformer_blocks\.(\d+)\."),
        "num_future_tokens": run.shape("future_tokens.weight")[0],
        "max_steps": shapes.get("position_embedding.weight", (0, 0))[0],
        "num_time_buckets": int(head.get("num_timestep_buckets") or 1000),
        "num_sampling_steps": int(head.get("num_inference_timesteps") or 4),
        "repeated_diffusion_steps": int(head.get("repeated_diffusion_steps") or 4),
    }
    state_dim = shapes.get("state_encoder.layer1.weight", (0, 0))[1]
    action_dim = run.shape("action_decoder.layer2.weight")[0]
    fields = _fields(run, module, template=_template(run, ""), state_dim=state_dim, action_dim=action_dim)
    dropout = float(dit.get("dropout") or 0.0)
    said = (f"framework.action_model.diffusion_model_cfg.dropout {dropout:g}: here it is trained without",)
    return Fields(policy=fields.policy, notes=fields.notes + (said if dropout else ()))


FRAMEWORKS: Mapping[str, Callable[[Run], Fields]] = {"QwenOFT": oft_fields, "QwenGR00T": gr00t_fields}


def _template(run: Run, suffix: str) -> str:
    """Put what the framework appends to the instruction into the prompt that the data set gives."""
    around = str(run.section("datasets", "vla_data").get("CoT_prompt") or "{instruction}")
    if "{instruction}" not in around:
        raise SpecError(f"{run.path}: datasets.vla_data.CoT_prompt {around!r}: lacks '{{instruction}}'.")
    return around.replace("{instruction}", "{instruction}" + suffix)


def _state_width(run: Run) -> int:
    return 0 if run.stats is None or run.stats.state is None else len(run.stats.state.mean)


def _fields(run: Run, module: Mapping[str, Any], *, template: str, state_dim: int, action_dim: int) -> Fields:
    data = run.section("datasets", "vla_data")
    cameras = run.cameras or tuple(cast("list[str]", data.get("obs") or ["camera"]))
    size = data.get("obs_image_size") or data.get("image_size") or data.get("default_image_resolution")
    sides = cast("list[int]", size)[-2:] if size else [DEFAULT_SIDE, DEFAULT_SIDE]
    seen = {
        "cameras": list(cameras),
        "image_size": [int(each) for each in sides],
        "state_dim": state_dim,
        "max_prompt_tokens": run.prompt.bucket(template, state_dim=state_dim),
        "prompt_template": template,
    }
    horizon = run.horizon()
    done = {"dim": action_dim, "horizon": horizon, "num_action_steps": horizon, "normalization": run.normalization}
    return Fields(policy={"observation": seen, "action": done, "action_module": dict(module)}, notes=UNSAID)
