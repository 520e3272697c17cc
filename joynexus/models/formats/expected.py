"""Whether a checkpoint has exactly the tensors that its own configuration needs: checked before anything is written."""

from typing import Any

import torch
import transformers

from joynexus.errors import CheckpointError, JoyNexusError
from joynexus.models.action_module import ModuleDims
from joynexus.models.formats.imported import ImportedPolicy, Part, describe_misfit
from joynexus.specs.registry import load_implementation

Shapes = dict[str, tuple[int, ...]]
RENAMED = (
    ("tower.vision_model.", "tower."),  # PaliGemma's vision tower has one level more on disk
    ("model.visual.", "visual."),  # Qwen2.5-VL has one less
    ("model.language_model.", "model."),
)
"""Where the library's class has other names than its files, which it renames when it loads."""


def check_tensors(imported: ImportedPolicy) -> None:
    """Compare a checkpoint's tensors with those of the frozen model and of the action module.

    Both are built without memory for their numbers.

    Raises:
        CheckpointError: Naming missing, unknown and mis-shaped tensors, a few of each, and how many there are.
        SpecError: If the configuration can't be built.
    """
    problems = _problems(imported, "backbone", _backbone_shapes(imported))
    problems += _problems(imported, "policy", _module_shapes(imported))
    if problems:
        raise CheckpointError(
            f"{imported.tensors.path}: its tensors do not fit its configuration ({imported.family}): "
            f"{'; '.join(problems)}. Is it a whole checkpoint, and is the configuration its own?"
        )


def module_dims_of(imported: ImportedPolicy) -> ModuleDims:
    """Return the sizes that the action module is built for, from configurations alone."""
    text = _config(imported).get_text_config()
    heads, width = int(text.num_attention_heads), int(text.hidden_size)
    head_dim = int(getattr(text, "head_dim", None) or width // heads)
    policy = imported.policy_spec("backbone")
    return ModuleDims(
        prefix_dim=width,
        state_dim=policy.observation.state_dim,
        action_dim=policy.action.dim,
        horizon=policy.action.horizon,
        kv_shape=(int(text.num_hidden_layers), int(text.num_key_value_heads), head_dim),
        num_heads=heads,
    )


def _module_shapes(imported: ImportedPolicy) -> Shapes:
    spec = imported.policy_spec("backbone").action_module
    try:
        with torch.device("meta"):
            module = load_implementation(spec)(spec, module_dims_of(imported))
    except JoyNexusError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{imported.tensors.path.parent}: action module {spec.type!r} can't be built: {error!r}."
        ) from error
    return _shapes(module)


def _backbone_shapes(imported: ImportedPolicy) -> Shapes:
    library: Any = transformers
    config = _config(imported)
    try:
        with torch.device("meta"):
            model = library.AutoModelForImageTextToText.from_config(config)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _unusable(imported, error) from error
    return {name: shape for name, shape in _shapes(model).items() if name != "lm_head.weight"}


def _config(imported: ImportedPolicy) -> Any:  # noqa: ANN401  # a class of transformers
    library: Any = transformers
    try:
        return library.CONFIG_MAPPING[str(imported.vlm_config["model_type"])].from_dict(dict(imported.vlm_config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unusable(imported, error) from error


def _unusable(imported: ImportedPolicy, error: Exception) -> CheckpointError:
    folder = imported.tensors.path.parent
    return CheckpointError(f"{folder}: no model can be built from the configuration of its language model: {error!r}.")


def _problems(imported: ImportedPolicy, part: Part, expected: Shapes) -> list[str]:
    names = imported.names(part)
    found = {_library_name(name): imported.tensors.infos[original].shape for name, original in names.items()}
    told = {_library_name(name): repr(original) for name, original in names.items()}
    return describe_misfit({_library_name(name): each for name, each in expected.items()}, found, name=told)


def _library_name(name: str) -> str:
    for old, new in RENAMED:
        name = name.replace(old, new, 1)
    return name


def _shapes(module: torch.nn.Module) -> Shapes:
    return {name: tuple(each.shape) for name, each in module.state_dict().items()}
