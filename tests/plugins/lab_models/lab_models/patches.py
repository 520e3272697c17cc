"""Step 2 of the backbone: the frozen model."""

import torch
from torch import nn

from joynexus.models.backbone import Backbone
from joynexus.models.chunks import FixedChunks
from joynexus.models.prefix import DTYPES, PrefixFeatures
from joynexus.models.tokens import ByteTokenizer, PromptTable


class PatchesBackbone(Backbone):
    """No keys and values, so nothing can be pushed through it behind a prefix."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.hidden_dim = spec.width
        draw, dtype = torch.Generator().manual_seed(spec.seed), DTYPES[spec.dtype]
        self.of_patches = nn.Parameter(torch.randn(3 * spec.patch**2, spec.width, generator=draw).to(dtype))
        self.of_tokens = nn.Parameter(torch.randn(ByteTokenizer.num_tokens, spec.width, generator=draw).to(dtype))
        self.num_encoded = 0
        tokenizer = ByteTokenizer()
        self._prompts = PromptTable(tokenizer.encode, pad_id=tokenizer.pad_id)
        self._chunks = FixedChunks(self._encode, spec.chunk_size)

    @classmethod
    def load(cls, spec, device):
        return cls(spec).to(device)

    @property
    def num_forwards(self):
        return self._chunks.num_forwards

    def tokenize(self, prompts, max_tokens):
        ids, mask = self._prompts.rows(prompts, max_tokens)
        return ids.to(self.device), mask.to(self.device)

    @torch.no_grad()
    def prefix(self, batch, signature):
        (hidden,) = self._chunks.run((batch.images, batch.tokens))
        patches = hidden.shape[1] - batch.tokens.shape[1]
        missing = ~batch.image_mask
        per_camera = patches // missing.shape[1] if missing.shape[1] else 0
        self.num_encoded += len(batch)
        return PrefixFeatures(
            hidden=hidden,
            pad=torch.cat([missing.repeat_interleave(per_camera, dim=1), ~batch.token_mask], dim=1),
            signature=signature,
        )

    def extend(self, prefix, tokens):
        raise NotImplementedError("patches: has no keys and values to attend to.")

    def _encode(self, rows):
        images, tokens = rows
        side, (height, width) = self.spec.patch, images.shape[2:4]
        pixels = images.to(self.of_patches.dtype) / 127.5 - 1
        cut = pixels.unflatten(3, (width // side, side)).unflatten(2, (height // side, side))
        patches = cut.transpose(3, 4).flatten(4).flatten(1, 3)  # [b, cameras * rows * columns, 3 * side**2]
        return (torch.cat([patches @ self.of_patches, self.of_tokens[tokens]], dim=1),)
