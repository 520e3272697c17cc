"""How long Qwen-VL prompts are, in tokens: what a policy's token bucket and its action queries have to know."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from joynexus.errors import CheckpointError

FOOTER = "<|im_end|>\n<|im_start|>assistant\n"
"""What the chat template puts behind a prompt; it is in the prompt's token bucket."""
INSTRUCTION_TOKENS = 64
"""Room for the instruction."""
STATE_TOKENS = 4
"""Of one number of a state in bins, and the blank before it."""
BUCKET = 16
"""Buckets are multiples of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenPrompt:
    """A tokenizer, for counting."""

    tokenizer: Tokenizer
    path: Path

    @staticmethod
    def read(folder: Path) -> "QwenPrompt":
        """Read ``tokenizer.json``.

        Raises:
            CheckpointError: If it is missing or damaged.
        """
        path = folder / "tokenizer.json"
        try:
            return QwenPrompt(tokenizer=Tokenizer.from_file(str(path)), path=path)
        except Exception as error:  # tokenizers raises Exception itself
            raise CheckpointError(f"{path}: no tokenizer: {error}. Give --vlm FOLDER with a whole one.") from error

    def bucket(self, template: str, *, state_dim: int) -> int:
        """Return the token bucket for a template with room for an instruction and a state."""
        fixed = template.replace("{instruction}", "").replace("{state}", "")
        needed = len(self._ids(fixed + FOOTER)) + INSTRUCTION_TOKENS
        needed += STATE_TOKENS * state_dim if "{state}" in template else 0
        return -(-needed // BUCKET) * BUCKET

    def tail(self, template: str, token: str) -> int:
        """Count the tokens behind the last ``token`` of a prompt, to the end of its bucket.

        Raises:
            CheckpointError: If ``token`` is none of the tokenizer's.
        """
        ids = self._ids(template + FOOTER)
        wanted = self._ids(token)[0]
        if wanted not in ids:
            raise CheckpointError(f"{self.path}: its tokenizer splits the action token {token!r}. Is it this model's?")
        return ids[::-1].index(wanted)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
