"""What a backbone has to keep where tenants have adapters on it."""

import torch
from torch import Tensor

from joynexus.models.adapted_rows import AdaptedRows
from joynexus.models.adapters import Adapter, build_adapter
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.backbone import BackboneSpec
from joynexus.testing.model_contracts import SIGNATURE, is_blas_row_stable, require
from joynexus.testing.model_inputs import fake_prefix_batch


def check_adapters(spec: BackboneSpec, device: torch.device | str = "cpu") -> None:
    """Check what :meth:`Backbone.adapter_layers` promises; nothing for a backbone without such layers.

    Args:
        spec: A small instance: a few dozen rows are encoded.
        device: Where to build it.

    Raises:
        AssertionError: Saying which promise is broken.
    """
    backbone = load_backbone(spec, device)
    layers, told = backbone.adapter_layers(), spec.adapter_layers()
    names = {path.rsplit(".", 1)[-1] for path in layers}
    require(names == set(told), f"the spec tells of layers {sorted(told)}, there are {sorted(names)}")
    for path, layer in layers.items():
        shape = (layer.in_features, layer.out_features)
        require(told[path.rsplit(".", 1)[-1]][1:] == shape, f"{path} is {shape}, the spec tells another shape")
    if not layers:
        return
    before = backbone.checksum()
    target = AdapterSpec(rank=2, targets=(next(iter(told)),))
    one, other = (build_adapter(target, backbone, seed=seed).randomized(seed) for seed in (0, 1))
    batch = fake_prefix_batch(backbone, 5)
    plain = backbone.prefix(batch, SIGNATURE)
    mixed, gradient = _forward(backbone, [one, None, other, other, None], batch, own=slice(2, 4))
    require(torch.equal(mixed.hidden[[1, 4]], plain.hidden[[1, 4]]), "an adapter changes rows that have none")
    moved = (mixed.hidden[[0, 2, 3]] - plain.hidden[[0, 2, 3]]).abs().amax(dim=(1, 2))
    require(bool((moved > 0).all()), "an adapter does not change its rows")
    require(all(float(each.abs().max()) > 0 for each in gradient), "no gradient reaches an adapter")
    alone, expected = _forward(backbone, [other, other], batch.rows(2, 4), own=slice(0, 2))
    pairs = zip([mixed.hidden[2:4], *gradient], [alone.hidden, *expected], strict=True)
    exact = backbone.device.type == "cpu" and is_blas_row_stable()
    same = all(torch.equal(*pair) if exact else torch.allclose(*pair, atol=1e-4) for pair in pairs)
    require(same, "an adapter's features or gradient depend on the rows beside it")
    require(backbone.checksum() == before, "adapters change the backbone's weights or buffers")


def _forward(
    backbone: Backbone, rows: list[Adapter | None], batch: PrefixBatch, *, own: slice
) -> tuple[PrefixFeatures, list[Tensor]]:
    """Return features, and the gradient of their sum to the adapter of some rows."""
    adapted = AdaptedRows(rows, records=True)
    with adapted.active():
        features = backbone.prefix(batch, SIGNATURE)
    require(
        features.hidden.requires_grad, "prefix cuts the graph of an adapter: leave its answers as the chunks give them"
    )
    adapted.backward([features.hidden], [torch.ones_like(features.hidden)])
    return features, list(adapted.gradient(own.start, own.stop).values())
