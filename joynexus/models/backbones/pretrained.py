"""Models of transformers from a folder, the hub or an explicit config, and their tokenizers as prompt tables."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers

from joynexus.errors import SpecError
from joynexus.models.prefix import DTYPES
from joynexus.models.tokens import ByteTokenizer, PromptTable
from joynexus.specs.vlm_backbones import VlmBackboneSpec

DOWNLOADS = "JOYNEXUS_ALLOW_DOWNLOADS"
"""Environment variable: set to 1 where a hub id may be downloaded; otherwise it has to be in the local cache."""
SPECIAL_TOKENS = ("fake_image_token", "global_image_token", "image_token")
"""Tokens that a family puts around images, by the tokenizer's own names."""
SHOWN = 3
"""Names of an error's list that are spelt out."""


def build_model(spec: VlmBackboneSpec, *, model_class: str, config_class: str) -> tuple[Any, PromptTable]:
    """Build the model that a spec describes, on the CPU, with its tokenizer.

    Args:
        spec: Says where from, and in which type.
        model_class: Name in transformers of the class that checkpoints are read into; it has no language-model head.
        config_class: Name in transformers of its config, for ``init: random``; ``AutoConfig`` where the config names
            its ``model_type`` itself.

    Returns:
        The model, cut to the first ``num_layers`` language layers, and the table of its prompts. torch's global
        random state is left as it was.

    Raises:
        SpecError: If nothing is found at ``path``, if its weights are not those of the class, or if the spec asks
            for more layers than there are.
    """
    model, prompts = _random(spec, config_class) if spec.init == "random" else _pretrained(spec, model_class)
    _keep_layers(spec, model)
    return model, prompts


def _random(spec: VlmBackboneSpec, config_class: str) -> tuple[Any, PromptTable]:
    library: Any = transformers
    make = library.AutoConfig.for_model if config_class == "AutoConfig" else getattr(library, config_class)
    config = make(**(spec.config or {}))
    tokenizer = ByteTokenizer()
    vocabulary = int(config.get_text_config().vocab_size)
    if vocabulary < tokenizer.num_tokens:
        raise SpecError(
            f"{spec.type}: config.text_config.vocab_size is {vocabulary}; the byte-level tokenizer of 'init: random' "
            f"has {tokenizer.num_tokens} ids. Take at least that."
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)
        model = library.AutoModel.from_config(config, dtype=DTYPES[spec.dtype], attn_implementation="sdpa")
    return model, PromptTable(tokenizer.encode, pad_id=tokenizer.pad_id, special_ids=tokenizer.special_ids)


def _pretrained(spec: VlmBackboneSpec, model_class: str) -> tuple[Any, PromptTable]:
    library: Any = transformers
    where: dict[str, Any] = {"local_files_only": os.environ.get(DOWNLOADS) != "1"}
    if spec.path is None or not Path(spec.path).is_dir():
        where["revision"] = spec.revision
    try:
        model, info = getattr(library, model_class).from_pretrained(
            spec.path, dtype=DTYPES[spec.dtype], attn_implementation="sdpa", output_loading_info=True, **where
        )
        tokenizer = _tokenizer(spec.path, where)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{spec.type}: cannot load {spec.path!r}: {error} Give a folder with config, weights and tokenizer; "
            f"a hub id is downloaded only where {DOWNLOADS}=1."
        ) from error
    _check_keys(spec, info)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def encode(prompt: str) -> list[int]:
        return tokenizer(prompt)["input_ids"]

    found = {name: getattr(tokenizer, f"{name}_id", None) for name in SPECIAL_TOKENS}
    special_ids = {name: int(each) for name, each in found.items() if each is not None}
    return model, PromptTable(encode, pad_id=pad_id, special_ids=special_ids)


def _tokenizer(path: str | None, where: dict[str, Any]) -> Any:  # noqa: ANN401
    """Load a tokenizer as its ``tokenizer.json`` says, where there is one.

    Left to itself the library takes the class that the config names, and some of these put their own splitting rules in
    place of the file's.
    """
    library: Any = transformers
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    described = library.utils.cached_file(path, "tokenizer.json", **where, **quiet)
    loader = library.AutoTokenizer if described is None else library.PreTrainedTokenizerFast
    return loader.from_pretrained(path, **where)


def _check_keys(spec: VlmBackboneSpec, info: dict[str, Any]) -> None:
    """Refuse weights that are not exactly the class's, but for the head of the language model."""
    missing = sorted(info["missing_keys"])
    extra = sorted(name for name in info["unexpected_keys"] if not name.startswith("lm_head."))
    if missing or extra:
        found = [f"lacks {len(missing)} weights, such as {missing[:SHOWN]}"] if missing else []
        found += [f"has {len(extra)} that the model does not know, such as {extra[:SHOWN]}"] if extra else []
        raise SpecError(f"{spec.type}: {spec.path!r} {' and '.join(found)}. Take a whole checkpoint of this family.")


def _keep_layers(spec: VlmBackboneSpec, model: Any) -> None:  # noqa: ANN401  # transformers' classes are untyped
    text = getattr(model, "text_model", None) or model.language_model
    kept = len(text.layers)
    if spec.num_layers is None:
        return
    if spec.num_layers > kept:
        raise SpecError(f"{spec.type}: num_layers is {spec.num_layers}, the model has {kept}. Take at most {kept}.")
    text.layers = text.layers[: spec.num_layers]
