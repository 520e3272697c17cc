"""Prompts to token ids: fixed buckets, never a silent cut, and a memory of what was tokenised before."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from joynexus.errors import InvalidBatchError

REMEMBERED_PROMPTS = 4096
"""Distinct prompts per backbone; a control loop sends one instruction thousands of times."""


class PromptTable:
    """Token ids of prompts, padded on the right to the bucket of the policy."""

    def __init__(
        self, encode: Callable[[str], Sequence[int]], *, pad_id: int, special_ids: Mapping[str, int] | None = None
    ) -> None:
        """Wrap a tokenizer.

        Args:
            encode: Token ids of one prompt, special tokens included.
            pad_id: Id that fills a bucket.
            special_ids: Ids of special tokens by the tokenizer's own names for them, such as ``global_image_token``.
        """
        self.special_ids = dict(special_ids or {})
        self.pad_id = pad_id

        def ids(prompt: str) -> tuple[int, ...]:
            return tuple(encode(prompt))

        self._ids = lru_cache(maxsize=REMEMBERED_PROMPTS)(ids)

    def ids(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of one prompt."""
        return self._ids(prompt)

    def rows(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Return ids and mask of each prompt, on the CPU.

        Raises:
            InvalidBatchError: If a prompt has more than ``max_tokens`` tokens.
        """
        ids = torch.full((len(prompts), max_tokens), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(prompts), max_tokens, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            found = self._ids(prompt)
            if len(found) > max_tokens:
                shown = prompt if len(prompt) <= 80 else f"{prompt[:77]}..."  # noqa: PLR2004
                raise InvalidBatchError(
                    f"prompt {shown!r}: it has {len(found)} tokens, the policy's bucket max_prompt_tokens is "
                    f"{max_tokens}. Shorten the instruction or raise max_prompt_tokens."
                )
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
            mask[row, : len(found)] = True
        return ids, mask


class ByteTokenizer:
    """UTF-8 bytes behind eight special ids: a tokenizer that needs no file."""

    num_tokens = 264
    pad_id = 0
    begin_id = 1
    num_special = 8
    special_ids: ClassVar[Mapping[str, int]] = {"fake_image_token": 2, "image_token": 3, "global_image_token": 4}

    def encode(self, prompt: str) -> list[int]:
        """Return the beginning-of-text id and one id per byte."""
        return [self.begin_id, *(byte + self.num_special for byte in prompt.encode())]
