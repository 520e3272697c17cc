"""Where the configuration and the tokenizer of a checkpoint's vision-language model are. Nothing is downloaded."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from joynexus.errors import CheckpointError

CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
"""What is copied beside the weights, where it is there."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these makes a tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VlmFolder:
    """What was found."""

    config: Path | None
    """Configuration file; None where the family has to know it."""
    tokenizer: Path
    """Folder of the tokenizer's files."""

    def files(self) -> list[Path]:
        """Return the tokenizer's files."""
        return [file for each in TOKENIZER_FILES if (file := self.tokenizer / each).is_file()]

    def inside(self, checkpoint: Path) -> dict[str, Path]:
        """Return all files that are in the checkpoint's own folder, by their path in it."""
        found = [*self.files(), *([] if self.config is None else [self.config])]
        return {str(each.relative_to(checkpoint)): each for each in found if each.is_relative_to(checkpoint)}


def vlm_folder(checkpoint: Path, *, named: str, given: Path | None) -> VlmFolder:
    """Find configuration and tokenizer.

    Looked at, in this order: the folder that was given; the folder that the checkpoint names, relative to its own; the
    checkpoint's ``tokenizer/`` with ``paligemma_config.json`` beside it; the local cache of the hub.

    Args:
        checkpoint: Its folder.
        named: Folder or hub id that the checkpoint names.
        given: Folder to take in its place.

    Raises:
        CheckpointError: If there is no tokenizer, saying what to give.
    """
    beside_it = [checkpoint / named, checkpoint / "tokenizer"]
    folders = [given] if given is not None else [*beside_it, _cached(named)]
    beside = checkpoint / "paligemma_config.json"
    for folder in folders:
        if folder is None or not any((folder / each).is_file() for each in TOKENIZERS):
            continue
        config = next((each for each in (folder / CONFIG, beside) if each.is_file()), None)
        return VlmFolder(config=config, tokenizer=folder)
    where = f"in {given}" if given is not None else f"in {checkpoint / named}, nor in the local cache of the hub"
    raise CheckpointError(
        f"{checkpoint}: it names the vision-language model {named!r}, whose tokenizer is not {where}. "
        "Give --vlm FOLDER: a folder with its config.json and tokenizer files; weights are not needed."
    )


def _cached(named: str) -> Path | None:
    for each in TOKENIZERS:
        try:
            found = try_to_load_from_cache(named, each)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None
