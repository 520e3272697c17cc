"""What LeRobot's SmolVLA, π0 and π0.5 say of themselves, in the fields of our specs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from joynexus.errors import CheckpointError, SpecError
from joynexus.models.formats.imported import Place
from joynexus.models.formats.lerobot_processors import ACTION, STATE, read_json
from joynexus.models.formats.paligemma_sizes import paligemma_config
from joynexus.models.formats.streaming import TensorFile
from joynexus.models.formats.vlm_folder import VlmFolder

COMMON_NEEDS: Mapping[str, tuple[Any, ...]] = {
    "n_obs_steps": (1,),
    "use_peft": (False,),
    "rtc_config": (None,),
}
SMOLVLA_NEEDS: Mapping[str, tuple[Any, ...]] = {
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
    "attention_mode": ("cross_attn",),
}
PI_NEEDS: Mapping[str, tuple[Any, ...]] = {
    "use_relative_actions": (False,),
    "time_sampling_beta_alpha": (1.5,),
    "time_sampling_beta_beta": (1.0,),
    "time_sampling_scale": (0.999,),
    "time_sampling_offset": (0.001,),
}

SMOLVLM, EXPERT = "vlm_with_expert.vlm.", "vlm_with_expert."
PALIGEMMA, GEMMA = "paligemma_with_expert.paligemma.", "paligemma_with_expert."
HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
NUM_HEADS = 8
"""Of both variants that a configuration can name; LeRobot's own code has this number written in."""
CAMERA = re.compile(r"^observation\.(images\.|image$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What the fields are derived from."""

    folder: Path
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    """Configuration of the preprocessor's tokenizer step."""
    tensors: TensorFile
    places: Mapping[str, Place]
    vlm: VlmFolder

    def number(self, name: str) -> int:
        """Read a whole number of the configuration."""
        value = self.config.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{self.folder / 'config.json'}: {name} is {value!r}, need a whole number.")
        return value

    def real(self, name: str) -> float:
        """Read a number of the configuration."""
        value = self.config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SpecError(f"{self.folder / 'config.json'}: {name} is {value!r}, need a number.")
        return float(value)

    def max_tokens(self) -> int:
        """Read the length that prompts are padded or cut to."""
        length = self.tokenizer.get("max_length")
        if not isinstance(length, int) or isinstance(length, bool):
            raise SpecError(f"{self.folder}: tokenizer_processor.max_length is {length!r}, need a whole number.")
        return length

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a part's tensors by their names there."""
        return {place.name: self.tensors.infos[name].shape for name, place in self.places.items() if place.part == part}

    def num_layers(self, part: str, pattern: str) -> int:
        """Count the layers of a part whose names match ``pattern`` with the index in a group."""
        found = {int(match[1]) for name in self.shapes(part) if (match := re.match(pattern, name))}
        if found != set(range(len(found))) or not found:
            raise CheckpointError(f"{self.tensors.path}: its layers {pattern!r} are {sorted(found)}, need 0, 1, 2, ...")
        return len(found)

    def dtype(self) -> str:
        """Return the type in which most of the frozen model is stored."""
        kinds = [self.tensors.infos[name].dtype for name, place in self.places.items() if place.part == "backbone"]
        return "bfloat16" if kinds.count("BF16") > len(kinds) // 2 else "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Fields of both specs, without normalisation, and what a person has to look at."""

    backbone: Mapping[str, Any]
    policy: Mapping[str, Any]
    vlm_config: Mapping[str, Any]
    notes: tuple[str, ...] = ()


# ---- where the tensors go


def place_smolvla(name: str, header: Mapping[str, Any]) -> Place | None:
    """Place a tensor of SmolVLA."""
    del header
    if not name.startswith("model."):
        return None
    own = name.removeprefix("model.")
    if own.startswith(SMOLVLM):
        inner = own.removeprefix(SMOLVLM)
        return Place(part="kept", name=name) if inner == HEAD else Place(part="backbone", name=inner)
    return Place(part="policy", name=own.removeprefix(EXPERT))


def place_pi(name: str, header: Mapping[str, Any]) -> Place | None:
    """Place a tensor of π0 or π0.5, in either layout."""
    own = name.removeprefix("model.")
    if own.startswith(PALIGEMMA):
        inner = own.removeprefix(PALIGEMMA)
        if inner != HEAD:
            return Place(part="backbone", name=inner)
        embedding = f"{name.removesuffix(HEAD)}{EMBEDDING}"  # tied: the other layout stores it under the head's name
        return Place(part="kept", name=name) if embedding in header else Place(part="backbone", name=EMBEDDING)
    if own == f"{GEMMA}gemma_expert.{HEAD}":
        return Place(part="kept", name=name)
    return Place(part="policy", name=own.removeprefix(GEMMA))


# ---- what both specs say


def smolvla_fields(source: Source) -> Fields:
    """Describe a SmolVLA policy."""
    config, path = source.config, source.folder / "config.json"
    if source.vlm.config is None:
        raise CheckpointError(f"{source.vlm.tokenizer}: lacks config.json of the vision-language model. Add it.")
    layers = source.num_layers("backbone", r"model\.text_model\.layers\.(\d+)\.")
    vlm_config = read_json(source.vlm.config)
    text = {**cast("dict[str, Any]", vlm_config.get("text_config") or {}), "num_hidden_layers": layers}
    cut = int(config.get("num_vlm_layers", 0))
    if cut > 0 and cut != layers:
        raise CheckpointError(f"{path}: num_vlm_layers is {cut}, {source.tensors.path.name} has {layers} layers.")
    length = int(config.get("prefix_length", -1))
    backbone = {
        "type": "smolvlm",
        "dtype": source.dtype(),
        "num_layers": layers,
        "embedding_scale": "sqrt_dim",
        "rope_base": 10000.0,
        "image_special_tokens": bool(config.get("add_image_special_tokens", False)),
        # LeRobot's prefix holds the state token too; ours gets it later, behind the padding.
        "pad_prefix_to": length - 1 if length > 0 else None,
    }
    module = {
        "type": "smolvla",
        "num_layers": source.num_layers("policy", r"lm_expert\.layers\.(\d+)\."),
        "width_multiplier": source.real("expert_width_multiplier"),
        "self_attn_every_n_layers": source.number("self_attn_every_n_layers"),
        "max_state_dim": source.number("max_state_dim"),
        "max_action_dim": source.number("max_action_dim"),
        "norm_eps": float(text.get("rms_norm_eps", 1e-6)),
        "min_period": source.real("min_period"),
        "max_period": source.real("max_period"),
        "num_sampling_steps": source.number("num_steps"),
    }
    side = int(cast("dict[str, Any]", vlm_config.get("vision_config") or {}).get("image_size", 0))
    _check_resizing(source, "resize_imgs_with_padding", side)
    policy, notes = _policy(source, module, template="{instruction}\n", cleanup="final_newline", side=side)
    return Fields(backbone=backbone, policy=policy, vlm_config={**vlm_config, "text_config": text}, notes=notes)


def pi0_fields(source: Source) -> Fields:
    """Describe a π0 policy."""
    module = {"type": "pi0", **_pi_module(source), "max_state_dim": source.number("max_state_dim")}
    return _pi_fields(source, module, template="{instruction}\n", cleanup="final_newline")


def pi05_fields(source: Source) -> Fields:
    """Describe a π0.5 policy."""
    template = "Task: {instruction}, State: {state};\nAction: "
    return _pi_fields(source, {"type": "pi05", **_pi_module(source)}, template=template, cleanup="one_line")


def _pi_module(source: Source) -> dict[str, Any]:
    shapes = source.shapes("policy")
    query, key, gate = (
        shapes.get(f"gemma_expert.model.layers.0.{each}.weight", (0, 0))
        for each in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    if 0 in (*query, *key, *gate) or query[0] % NUM_HEADS or key[0] % (query[0] // NUM_HEADS):
        raise CheckpointError(
            f"{source.tensors.path}: layer 0 of gemma_expert has q_proj {list(query)}, k_proj {list(key)}, gate_proj "
            f"{list(gate)}: no expert of {NUM_HEADS} heads. Is it a whole checkpoint?"
        )
    head_dim = query[0] // NUM_HEADS
    return {
        "num_layers": source.num_layers("policy", r"gemma_expert\.model\.layers\.(\d+)\."),
        "hidden_dim": gate[1],
        "mlp_dim": gate[0],
        "num_heads": NUM_HEADS,
        "num_kv_heads": key[0] // head_dim,
        "head_dim": head_dim,
        "max_action_dim": source.number("max_action_dim"),
        "min_period": source.real("min_period"),
        "max_period": source.real("max_period"),
        "num_sampling_steps": source.number("num_inference_steps"),
    }


def _pi_fields(source: Source, module: Mapping[str, Any], *, template: str, cleanup: str) -> Fields:
    vlm_config = (
        read_json(source.vlm.config)
        if source.vlm.config is not None
        else paligemma_config(source.shapes("backbone"), source.tensors.path)
    )
    backbone = {"type": "paligemma", "dtype": source.dtype()}
    rows, _ = source.shapes("backbone").get(EMBEDDING, (0, 0))  # LeRobot leaves out some that the released model has
    text = {**cast("dict[str, Any]", vlm_config.get("text_config") or {}), "vocab_size": rows}
    vlm_config = {**vlm_config, "text_config": text}
    side = int(cast("dict[str, Any]", vlm_config.get("vision_config") or {}).get("image_size", 0))
    _check_resizing(source, "image_resolution", side)
    policy, notes = _policy(source, module, template=template, cleanup=cleanup, side=side)
    return Fields(backbone=backbone, policy=policy, vlm_config=vlm_config, notes=notes)


def _policy(
    source: Source, module: Mapping[str, Any], *, template: str, cleanup: str, side: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    path = source.folder / "config.json"
    inputs, outputs = (_features(path, source.config, each) for each in ("input_features", "output_features"))
    cameras = {_camera(path, name): shape for name, (kind, shape) in inputs.items() if kind == "VISUAL"}
    states = [name for name, (kind, _) in inputs.items() if kind != "VISUAL"]
    if states != [STATE] or list(outputs) != [ACTION]:
        raise SpecError(
            f"{path}: input_features {states}, output_features {list(outputs)}: not supported, "
            f"need cameras, {STATE!r} and {ACTION!r}."
        )
    sizes = {shape[1:] for shape in cameras.values() if len(shape) == 3}  # noqa: PLR2004  # channels, height, width
    size = sizes.pop() if len(sizes) == 1 else (side, side)
    notes = () if not sizes else ("policy.observation.image_size: the cameras differ in size; this is the model's",)
    seen = {
        "cameras": list(cameras),
        "image_size": list(size),
        "state_dim": inputs[STATE][1][0],
        "max_prompt_tokens": source.max_tokens(),
        "prompt_template": template,
        "instruction_cleanup": cleanup,
    }
    done = {
        "dim": outputs[ACTION][1][0],
        "horizon": source.number("chunk_size"),
        "num_action_steps": source.number("n_action_steps"),
    }
    return {"observation": seen, "action": done, "action_module": dict(module)}, notes


def _check_resizing(source: Source, option: str, side: int) -> None:
    """Frames are fitted into the vision tower's own square; a model trained with another one sees other pixels."""
    if source.config.get(option) != [side, side]:
        raise SpecError(
            f"{source.folder / 'config.json'}: {option} {source.config.get(option)!r}: not supported, "
            f"need the vision tower's {[side, side]}."
        )


def _features(path: Path, config: Mapping[str, Any], name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        features = cast("dict[str, dict[str, Any]]", config[name])
        return {key: (str(each["type"]), tuple(int(x) for x in each["shape"])) for key, each in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path}: {name}: need an object of features with type and shape: {error!r}.") from error


def _camera(path: Path, feature: str) -> str:
    """Turn ``observation.images.top`` into ``top``, in letters that a name may have."""
    name = re.sub(r"[^a-z0-9_-]+", "_", CAMERA.sub("", feature).lower() or "image").strip("_-")
    if not CAMERA.match(feature) or not name:
        raise SpecError(f"{path}: input_features.{feature}: not supported, need 'observation.images.NAME'.")
    return name
