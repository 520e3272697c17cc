"""What every backbone and every action module has to keep, whoever wrote it.

Give :func:`check_backbone` or :func:`check_action_module` a spec; the first promise that is broken is raised as an
``AssertionError`` that says which one. Third parties run them in their own tests.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from joynexus.errors import InvalidBatchError
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.pauses import visited
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.specs.backbone import BackboneSpec
from joynexus.testing.model_inputs import fake_prefix_batch

SIGNATURE = "signature of the check"


def require(kept: bool, promise: str) -> None:  # noqa: FBT001  # reads like assert
    """Raise ``AssertionError`` with the promise unless it was kept."""
    if not kept:
        raise AssertionError(promise)


@contextmanager
def no_global_randomness(what: str) -> Generator[None]:
    """Check that a block leaves the global generators of torch and numpy as they were.

    Python's own is not looked at: run-time type checkers draw from it.
    """
    before = torch.get_rng_state(), repr(np.random.get_state())
    yield
    require(torch.equal(before[0], torch.get_rng_state()), f"{what} draws from torch's global generator")
    require(before[1] == repr(np.random.get_state()), f"{what} draws from numpy's global generator")


def is_blas_row_stable() -> bool:
    """Whether, on this machine, a row of a linear layer is the same to the last bit in batches of 4 rows and more."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(64, 256, generator=generator), torch.randn(256, 256, generator=generator)
    whole = functional.linear(rows, weight)
    return all(torch.equal(functional.linear(rows[:size], weight), whole[:size]) for size in (4, 8, 16, 32))


def check_backbone(spec: BackboneSpec, device: torch.device | str = "cpu") -> None:
    """Check all promises of a backbone; see :class:`joynexus.models.backbone.Backbone`.

    Args:
        spec: A small instance: a few dozen rows are encoded.
        device: Where to build it.

    Raises:
        AssertionError: Saying which promise is broken.
    """
    with no_global_randomness("load"):
        backbone = load_backbone(spec, device)
    before = backbone.checksum()
    require(before == load_backbone(spec, device).checksum(), "loading one spec twice gives different weights")
    check_frozen(backbone)
    check_tokenizer(backbone)
    check_features(backbone)
    check_rows_independent(backbone)
    check_padding_ignored(backbone)
    check_extend(backbone)
    check_pauses(backbone)
    require(backbone.checksum() == before, "using the backbone changes its weights or buffers")
    check_frozen(backbone)


def check_frozen(backbone: Backbone) -> None:
    """Check that nothing can train the backbone, also after ``train()``."""
    require(not any(each.requires_grad for each in backbone.parameters()), "a parameter requires grad")
    backbone.train()
    require(not any(each.training for each in backbone.modules()), "train() wakes a module of the backbone")


def check_tokenizer(backbone: Backbone) -> None:
    """Check padding on one side, independence of neighbours, and the refusal of long prompts."""
    with no_global_randomness("tokenize"):
        ids, mask = backbone.tokenize(["pick the cube", "push"], 24)
    require(ids.shape == mask.shape == (2, 24), f"ids and mask are {ids.shape} and {mask.shape}, the bucket is 24")
    steps = mask.long().diff(dim=1)
    one_sided = bool((steps <= 0).all()) or bool((steps >= 0).all())
    require(bool(mask.any(dim=1).all()) and one_sided, "real tokens do not stand together on one side of their bucket")
    alone, _ = backbone.tokenize(["push"], 24)
    require(torch.equal(alone[0], ids[1]), "the tokens of a prompt depend on the prompts beside it")
    try:
        backbone.tokenize(["cube " * 64], 24)
    except InvalidBatchError:
        return
    raise AssertionError("a prompt that is longer than the bucket is not refused with InvalidBatchError")


def check_features(backbone: Backbone) -> None:
    """Check layout, dtype, size, counters and the absence of gradient of what ``prefix`` answers."""
    batch = fake_prefix_batch(backbone, 3)
    encoded = backbone.num_encoded
    with no_global_randomness("prefix"):
        features = backbone.prefix(batch, SIGNATURE)
    side = batch.images.shape[2]
    length = backbone.prefix_length(2, (side, side), batch.tokens.shape[1])
    found = tuple(features.hidden.shape)
    require(found == (3, length, backbone.hidden_dim), f"hidden is {found}, prefix_length says {length}")
    require(features.signature == SIGNATURE, "the features carry another signature")
    require(backbone.num_encoded == encoded + 3, "num_encoded does not count the real rows")
    require(bool(features.hidden.isfinite().all()), "hidden states are not finite")
    expected = torch.float32 if backbone.spec.dtype == "float32" else torch.bfloat16
    tensors = (features.hidden, *features.keys, *features.values)
    require(all(each.dtype == expected for each in tensors), f"a feature is not {expected}")
    require(not any(each.requires_grad for each in tensors), "a feature requires grad")
    require(
        not any(each.is_inference() for each in tensors), "features are inference tensors; no head can train on them"
    )
    require(len(features.keys) == len(features.values), "there are not as many keys as values")
    layers, heads, width = backbone.kv_shape
    shapes = {tuple(each.shape) for each in (*features.keys, *features.values)}
    is_true = len(features.keys) == layers and shapes <= {(3, heads, length, width)}
    require(is_true, f"kv_shape says {backbone.kv_shape}, there are {len(features.keys)} layers of {shapes}")
    tail = features.pad[:, -batch.tokens.shape[1] :]
    require(torch.equal(tail, ~batch.token_mask), "the text's bucket is not at the end of the prefix, or not marked")
    lead, images = features.pad[:, : -batch.tokens.shape[1]].tensor_split([backbone.num_lead_tokens], dim=1)
    require(not bool(lead.any()), "what is in front of the frames is marked as padding")
    missing = (~batch.image_mask).repeat_interleave(images.shape[1] // 2, dim=1)
    require(
        torch.equal(images, missing), "the frames do not stand in front of the text, or a missing one is not marked"
    )
    estimate = backbone.spec.prefix_bytes(2, (side, side), batch.tokens.shape[1]) * 3
    close = features.nbytes / 2 <= estimate <= features.nbytes * 2
    require(close, f"prefix_bytes says {estimate}, the features have {features.nbytes}")


def check_rows_independent(backbone: Backbone) -> None:
    """Check that neighbours, their order and their number can't change a row: to the last bit, or within 1e-6."""
    rows = backbone.spec.chunk_size + 3
    batch = fake_prefix_batch(backbone, rows)
    whole = backbone.prefix(batch, SIGNATURE)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(backbone.device)
    shuffled = backbone.prefix(batch.pick(order), SIGNATURE)
    for place in range(rows):
        row = int(order[place])
        _require_same(whole.slice(row, row + 1), shuffled.slice(place, place + 1), "on the order of the rows")
    for row in (0, rows - 1):
        alone = backbone.prefix(batch.rows(row, row + 1), SIGNATURE)
        _require_same(whole.slice(row, row + 1), alone, "on the rows beside it")


def check_padding_ignored(backbone: Backbone) -> None:
    """Check that masked frames and masked tokens, whatever they hold, change no feature that may be read."""
    batch = fake_prefix_batch(backbone, 2)
    clean = backbone.prefix(batch, SIGNATURE)
    images, tokens = batch.images.clone(), batch.tokens.clone()
    images[~batch.image_mask] = 200
    tokens[~batch.token_mask] = tokens[0, 0]
    dirty = backbone.prefix(
        PrefixBatch(images=images, image_mask=batch.image_mask, tokens=tokens, token_mask=batch.token_mask), SIGNATURE
    )
    _require_same(_blank_padding(clean), _blank_padding(dirty), "on what is behind its padding")


def check_extend(backbone: Backbone) -> None:
    """Check that a tenant's tokens go through with gradient, or that a backbone without K/V says so."""
    batch = fake_prefix_batch(backbone, 2)
    features = backbone.prefix(batch, SIGNATURE)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 3, backbone.hidden_dim, generator=generator).to(backbone.device).requires_grad_()
    if not features.keys:
        try:
            backbone.extend(features, tokens)
        except NotImplementedError:
            return
        raise AssertionError("extend works without keys and values; raise NotImplementedError")
    grown = backbone.extend(features, tokens)
    extended, length = grown.hidden[:, features.length :], features.length + tokens.shape[1]
    require(extended.shape == tokens.shape and extended.dtype == features.hidden.dtype, "extend changes shape or dtype")
    require(all(each.shape[2] == length for each in (*grown.keys, *grown.values)), "extend grows no keys and values")
    require(not bool(grown.pad[:, features.length :].any()), "extend marks a tenant's token as padding")
    is_kept = torch.equal(grown.hidden[:, : features.length], features.hidden)
    require(is_kept, "extend changes the prefix's own positions")
    extended.square().sum().backward()
    gradient = tokens.grad
    require(gradient is not None and bool((gradient.abs().sum(dim=-1) > 0).all()), "extend gives no gradient")
    require(all(each.grad is None for each in backbone.parameters()), "extend leaves gradients in the backbone")
    hidden_pads = replace(
        features,
        keys=tuple(_overwrite(each, features.pad) for each in features.keys),
        values=tuple(_overwrite(each, features.pad) for each in features.values),
    )
    same = torch.allclose(extended, backbone.extend(hidden_pads, tokens).hidden[:, features.length :], atol=1e-6)
    require(same, "extend looks at padded positions of the prefix")


def check_pauses(backbone: Backbone) -> None:
    """Check that a forward is the same to the last bit with another one in the middle of it, at each of its pauses.

    See :mod:`joynexus.models.pauses`: what is half done must be in local variables, not in the backbone.
    """
    rows = backbone.spec.chunk_size + 1
    batch, other = fake_prefix_batch(backbone, rows, seed=1), fake_prefix_batch(backbone, 1, seed=2)
    wanted, wanted_other = backbone.prefix(batch, SIGNATURE), backbone.prefix(other, SIGNATURE)
    between: list[PrefixFeatures] = []

    def interrupt() -> None:
        with visited(None):
            between.append(backbone.prefix(other, SIGNATURE))

    with visited(interrupt):
        found = backbone.prefix(batch, SIGNATURE)
    require(len(between) > 1, "a forward of more than one chunk has no pause between them")
    _require_equal(found, wanted, "a forward changes where another one is in the middle of it")
    for each in between:
        _require_equal(each, wanted_other, "a forward changes where it is in the middle of another one")


def _require_equal(first: PrefixFeatures, second: PrefixFeatures, promise: str) -> None:
    pairs = zip((first.hidden, *first.keys, *first.values), (second.hidden, *second.keys, *second.values), strict=True)
    require(all(torch.equal(*pair) for pair in pairs), promise)


def _overwrite(states: Tensor, pad: Tensor) -> Tensor:
    return torch.where(pad[:, None, :, None], torch.full_like(states, 3.0), states)


def _blank_padding(features: PrefixFeatures) -> PrefixFeatures:
    def blank(states: Tensor) -> Tensor:
        return torch.where(features.pad[:, None, :, None], torch.zeros_like(states), states)

    return replace(
        features,
        hidden=blank(features.hidden[:, None])[:, 0],
        keys=tuple(blank(each) for each in features.keys),
        values=tuple(blank(each) for each in features.values),
    )


def _require_same(first: PrefixFeatures, second: PrefixFeatures, on_what: str) -> None:
    require(torch.equal(first.pad, second.pad), f"the padding of a row depends {on_what}")
    exact = first.hidden.device.type == "cpu" and is_blas_row_stable()
    pairs = zip((first.hidden, *first.keys, *first.values), (second.hidden, *second.keys, *second.values), strict=True)
    for one, other in pairs:
        worst = cast("float", (one.float() - other.float()).abs().max().item())
        bound = 0.0 if exact else 1e-6 * max(1.0, cast("float", one.float().abs().max().item()))
        require(
            worst <= bound, f"a row's features depend {on_what}: they differ by {worst:.3g}, allowed is {bound:.3g}"
        )
