import copy

import pytest
import torch
from torch import nn

from joynexus.errors import SpecError
from joynexus.models.adapted_rows import AdaptedRows
from joynexus.models.adapters import Adapter, adapting, build_adapter, num_adapter_parameters
from joynexus.models.backbone import load_backbone
from joynexus.models.policy import build_policy, encode, prefix_keys
from joynexus.models.prefix_store import PrefixStore
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.service import PrefixStoreSpec
from joynexus.testing.model_contracts import is_blas_row_stable
from joynexus.testing.model_inputs import fake_prefix_batch
from joynexus.testing.tiny import TINY_SMOLVLM

SPEC = AdapterSpec(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def backbone():
    torch.set_num_threads(1)
    return load_backbone(TINY_SMOLVLM)


def trained(backbone, seed, spec=SPEC):
    """An adapter that changes something."""
    return build_adapter(spec, backbone, seed=seed).randomized(seed)


def tensors(features):
    return [features.hidden, *features.keys, *features.values]


def forward(backbone, rows, batch, *, records=False):
    adapted = AdaptedRows(rows, records=records)
    with adapted.active():
        return adapted, backbone.prefix(batch, "s")


def same(first, second):
    """Equal to the bit where this machine's BLAS allows it."""
    if is_blas_row_stable():
        return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(first, second, strict=True))


def test_a_new_adapter_is_drawn_from_its_seed_and_changes_nothing(backbone):
    one, again, other = (build_adapter(SPEC, backbone, seed=seed).named_parameters() for seed in (3, 3, 4))
    assert list(one) == [
        f"text_model.layers.{layer}.self_attn.{target}.lora_{part}.weight"
        for layer in (0, 1)
        for target in ("q_proj", "v_proj")
        for part in ("A", "B")
    ]
    assert all(torch.equal(one[name], again[name]) for name in one)
    first = "text_model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(one[first], other[first])
    assert one[first].abs().max() <= 32**-0.5
    batch = fake_prefix_batch(backbone, 3)
    _, features = forward(backbone, [build_adapter(SPEC, backbone, seed=3)] * 3, batch)
    assert same(tensors(features), tensors(backbone.prefix(batch, "s")))
    assert sum(each.numel() for each in one.values()) == num_adapter_parameters(SPEC, backbone)


def test_hooks_leave_the_backbone_as_it_is(backbone):
    fresh = load_backbone(TINY_SMOLVLM)
    trained(backbone, 0, AdapterSpec(targets=("q_proj", "down_proj")))
    trained(backbone, 1, AdapterSpec(targets=("q_proj", "down_proj")))
    assert backbone.checksum() == fresh.checksum()
    assert backbone.state_dict().keys() == fresh.state_dict().keys()
    assert [name for name, _ in backbone.named_parameters()] == [name for name, _ in fresh.named_parameters()]
    hooked = [each for each in backbone.modules() if each._forward_hooks]
    assert all(len(each._forward_hooks) == 1 for each in hooked)
    batch = fake_prefix_batch(backbone, 2)
    assert same(tensors(backbone.prefix(batch, "s")), tensors(fresh.prefix(batch, "s")))


def test_rows_without_an_adapter_keep_their_numbers(backbone):
    batch = fake_prefix_batch(backbone, 7)
    plain = backbone.prefix(batch, "s")
    one, other = trained(backbone, 0), trained(backbone, 1, AdapterSpec(rank=2, targets=("k_proj", "up_proj")))
    for rows in ([one, None, other, one, None, None, other], [None] * 6 + [one]):
        _, features = forward(backbone, rows, batch)
        for row, adapter in enumerate(rows):
            pairs = zip(tensors(features), tensors(plain), strict=True)
            assert all(torch.equal(found[row], before[row]) for found, before in pairs) == (adapter is None)


def test_a_row_and_its_gradient_do_not_depend_on_the_rows_beside_it(backbone):
    batch = fake_prefix_batch(backbone, 7)
    own, neighbour = trained(backbone, 0), trained(backbone, 1, AdapterSpec(rank=2))
    rows = [neighbour, None, own, neighbour, own, own, neighbour]
    place = torch.tensor([row for row, each in enumerate(rows) if each is own])
    together, features = forward(backbone, [neighbour] * 2 + [own] * 3 + [neighbour] * 2, batch, records=True)
    alone, lonely = forward(backbone, [own] * 3, batch.rows(2, 5), records=True)
    assert same([each[2:5] for each in tensors(features)], tensors(lonely))
    for adapted, answer in ((together, features), (alone, lonely)):
        outputs = [each for each in tensors(answer) if each.requires_grad]
        adapted.backward(outputs, [each.detach() for each in outputs])
    found, expected = together.gradient(2, 5), alone.gradient(0, 3)
    assert found.keys() == own.named_parameters().keys()
    assert same(list(found.values()), list(expected.values()))
    mixed, _ = forward(backbone, rows, batch)
    assert len(mixed.kinds(0, 7)) == 2
    _, scattered = forward(backbone, rows, batch)
    _, gathered = forward(backbone, [own] * 3, batch.pick(place))
    assert same([each[place] for each in tensors(scattered)], tensors(gathered))


def test_gradients_of_others_are_exactly_zero(backbone):
    one, other = trained(backbone, 0), trained(backbone, 1)
    adapted, features = forward(backbone, [one, one, other], fake_prefix_batch(backbone, 3), records=True)
    gradient = torch.zeros_like(features.hidden)
    gradient[:2] = 1.0
    adapted.backward([features.hidden], [gradient])
    assert all(float(each.abs().max()) == 0.0 for each in adapted.gradient(2, 3).values())
    assert all(float(each.abs().max()) > 0.0 for each in adapted.gradient(0, 2).values())


def test_not_a_number_stays_with_its_rows(backbone):
    one, other = trained(backbone, 0), trained(backbone, 1, AdapterSpec(rank=2))
    for each in other.named_parameters().values():
        each.data.fill_(float("nan"))
    batch = fake_prefix_batch(backbone, 3)
    adapted, features = forward(backbone, [one, other, one], batch, records=True)
    adapted.backward([features.hidden], [torch.ones_like(features.hidden)])
    assert features.hidden[[0, 2]].isfinite().all()
    assert not features.hidden[1].isfinite().all()
    assert all(each.isfinite().all() for row in (0, 2) for each in adapted.gradient(row, row + 1).values())


def test_the_forward_is_that_of_merged_weights(backbone):
    spec = AdapterSpec(rank=4, alpha=3.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
    adapter = trained(backbone, 5, spec)
    merged = load_backbone(TINY_SMOLVLM)
    for path, layer in merged.adapter_layers().items():
        if path in adapter.a:
            layer.weight.data += 0.75 * adapter.b[path] @ adapter.a[path]
    batch = fake_prefix_batch(backbone, 3)
    _, features = forward(backbone, [adapter] * 3, batch)
    torch.testing.assert_close(features.hidden, merged.prefix(batch, "s").hidden, rtol=1e-4, atol=1e-4)
    tokens = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    with adapting(adapter):
        grown = backbone.extend(features, tokens).hidden
    torch.testing.assert_close(grown, merged.extend(merged.prefix(batch, "s"), tokens).hidden, rtol=1e-4, atol=1e-4)


def test_bfloat16_rows_keep_their_type():
    half = load_backbone(TINY_SMOLVLM.model_copy(update={"dtype": "bfloat16"}))
    adapter = trained(half, 0)
    adapted, features = forward(half, [adapter, None], fake_prefix_batch(half, 2), records=True)
    assert all(each.dtype == torch.bfloat16 for each in tensors(features))
    adapted.backward([features.hidden], [torch.ones_like(features.hidden)])
    assert all(each.dtype == torch.float32 for each in adapted.gradient(0, 1).values())


def test_the_store_neither_finds_nor_keeps_adapted_rows(backbone):
    batch, adapter, store = fake_prefix_batch(backbone, 2), trained(backbone, 0), PrefixStore(PrefixStoreSpec())
    keys = prefix_keys(batch, "s")
    encode(backbone, store, batch, keys, "s")
    adapted, count = encode(backbone, store, batch, keys, "s", adapters=[adapter, None])
    assert count.encoded == (True, False)
    assert (len(store), store.hits) == (2, 1)
    _, expected = forward(backbone, [adapter], batch.rows(0, 1))
    assert same([adapted.hidden[:1]], [expected.hidden])
    empty = PrefixStore(PrefixStoreSpec())
    encode(backbone, empty, batch, keys, "s", adapters=[adapter, None])
    assert (keys[0] in empty, keys[1] in empty) == (False, True)


def test_unknown_targets_are_refused_with_the_known_ones(backbone, monkeypatch):
    with pytest.raises(SpecError, match=r"'smolvlm' has no layers \['c_attn'\]. Use some of \['q_proj', 'k_proj', "):
        build_adapter(AdapterSpec(targets=("q_proj", "c_attn")), backbone, seed=0)
    monkeypatch.setattr(type(backbone), "adapter_layers", lambda _: {})
    with pytest.raises(SpecError, match="has no language layers that take one"):
        build_adapter(SPEC, backbone, seed=0)
    with pytest.raises(ValueError, match="name one layer twice"):
        AdapterSpec(targets=("q_proj", "q_proj"))


def test_the_specs_sizes_are_those_of_the_layers(backbone):
    shapes = TINY_SMOLVLM.adapter_layers()
    for path, layer in backbone.adapter_layers().items():
        count, inputs, outputs = shapes[path.rsplit(".", 1)[-1]]
        assert (count, inputs, outputs) == (2, layer.in_features, layer.out_features)
    assert len(backbone.adapter_layers()) == 2 * len(shapes)


def test_parts_hold_the_adapter(backbone, policy):
    parts = build_policy(policy.model_copy(update={"adapter": SPEC}), backbone, seed=1, stats=None)
    copied = parts.copied()
    names = [name for name in parts.tensors() if name.startswith("adapter.")]
    assert len(names) == 8
    assert names == [name for name in parts.parameters() if name.startswith("adapter.")]
    changed = {name: each.detach() + 1.0 for name, each in parts.tensors().items()}
    copied.load(changed)
    assert all(torch.equal(copied.tensors()[name], changed[name]) for name in changed)
    assert not any(torch.equal(parts.tensors()[name], changed[name]) for name in names)
    copied.freeze()
    assert not any(each.requires_grad for each in copied.tensors().values())
    with pytest.raises(RuntimeError, match="adapter: 1 tensors are missing"):
        copied.load({name: each for name, each in changed.items() if name != names[0]})
    assert isinstance(copy.deepcopy(parts.adapter), Adapter)
    assert all(isinstance(each, nn.Parameter) for each in parts.parameters().values())
