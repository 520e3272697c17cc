"""The core benchmarks' code on tiny models: what is compared is the same, and every table is whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.core import experience, group_forward, memory, prefix_reuse, smolvla, world
from benchmarks.core.group_forward import Point
from benchmarks.core.kv_expert import KvExpertSpec
from benchmarks.core.world import SHORT, Scene, Trainer
from benchmarks.harness import Options
from joynexus.models.backbone import Backbone
from joynexus.models.policy import prepare_prefix
from joynexus.testing.model_inputs import UNCHANGED

TINY = Scene(name="tiny", cameras=2, side=64, text_tokens=12)
OPTIONS = Options(quick=True, extra={"backbone": "qwen3vl-tiny"})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return world.load("qwen3vl-tiny", TINY, device="cpu", seed=0, chunk_size=4)


def kv_policy(backbone: Backbone) -> world.PolicySpec:
    _, heads, head_dim = backbone.kv_shape
    module = KvExpertSpec(kv_width=heads * head_dim, hidden_dim=32, num_layers=2, num_heads=2)
    return world.policy(TINY, module)


def test_the_qwen_like_backbone_gives_all_that_a_backbone_gives(backbone: Backbone) -> None:
    seen = world.observation(TINY, 3, seed=1)
    batch = prepare_prefix(backbone, kv_policy(backbone), seen, UNCHANGED)
    features = backbone.prefix(batch, "s")
    layers, heads, head_dim = backbone.kv_shape
    assert features.hidden.shape == (3, TINY.length, backbone.hidden_dim)
    assert features.length == backbone.prefix_length(2, (64, 64), 12) == TINY.length
    assert len(features.keys) == len(features.values) == layers
    assert features.keys[0].shape == (3, heads, TINY.length, head_dim)
    assert bool(torch.isfinite(features.hidden).all())
    assert features.pad.sum() == 3 * (12 - len("pick cube") - 1)
    assert not any(each.requires_grad for each in backbone.parameters())
    for row in range(3):
        alone = backbone.prefix(batch.rows(row, row + 1), "s")
        torch.testing.assert_close(alone.hidden, features.hidden[row : row + 1])
    lone = world.without_dummies(backbone, 1)
    torch.testing.assert_close(lone.prefix(batch.rows(1, 2), "s").keys[-1], features.keys[-1][1:2])
    assert lone.num_forwards == 1


def test_an_image_and_a_word_change_the_features(backbone: Backbone) -> None:
    policy = kv_policy(backbone)
    seen = world.observation(TINY, 1, seed=1)
    plain = backbone.prefix(prepare_prefix(backbone, policy, seen, UNCHANGED), "s").hidden
    for other in (replace(seen, images=255 - seen.images), replace(seen, instructions=("lift it",))):
        assert not torch.equal(plain, backbone.prefix(prepare_prefix(backbone, policy, other, UNCHANGED), "s").hidden)


def test_the_kv_expert_reads_keys_and_values_and_learns(backbone: Backbone) -> None:
    trainer = Trainer(backbone, {"tenant0": kv_policy(backbone)}, is_reusing=True, seed=0)
    before = trainer.parameters("tenant0")
    batch = world.batch(TINY, 2, seed=3)
    losses = [trainer.step({"tenant0": batch})[0].metrics["loss"] for _ in range(12)]
    after = trainer.parameters("tenant0")
    assert np.isfinite(losses).all()
    for name in ("from_keys.0.weight", "from_values.1.weight"):
        assert not np.array_equal(before[name], after[name])
    assert trainer.encoded == 2
    assert trainer.samples == 24


@pytest.mark.parametrize("head", [None, "oft", "flow_matching"])
def test_grouped_and_alone_agree(backbone: Backbone, head: str | None) -> None:
    point = Point(size="qwen3vl-tiny", scene=TINY, tenants=3, batch=2, head=head)
    plan = replace(group_forward.plan_for(OPTIONS), rounds=1)
    row = group_forward._measure_point(point, backbone, plan, OPTIONS)
    assert row["difference"] <= 1e-5
    assert row["ratio"] > 0
    assert (row["tenants"], row["batch"], row["tokens"]) == (3, 2, TINY.length)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_every_plan_holds_its_headline(device: str, quick: bool) -> None:
    plan = group_forward.plan_for(Options(device=device, quick=quick))
    assert set(plan.headline.values()) <= set(plan.points)
    assert plan.headline["forward_ratio_8x1_short"].scene == SHORT
    assert SHORT.length <= 20
    assert ("forward_ratio_8x1_qwen3vl" in plan.headline) == (device == "cuda")
    assert len(plan.points) == len(set(plan.points))


def test_epochs_are_told_apart_by_what_they_encode(backbone: Backbone) -> None:
    plan = prefix_reuse.Plan(size="qwen3vl-tiny", scene=TINY, tenants=2, epochs=(2,), batch=1, rounds=1, is_whole=True)
    data = {name: world.batch(TINY, 1, seed=index) for index, name in enumerate(world.names(2))}
    row = prefix_reuse.epochs_row(plan, backbone, data, 2, OPTIONS)
    assert row["data"] == "each its own"
    assert row["encoded per sample"] == 0.5
    assert row["difference"] <= 1e-5
    same = prefix_reuse.epochs_row(plan, backbone, dict.fromkeys(data, data["tenant0"]), 2, OPTIONS)
    assert same["data"] == "one for all"
    assert same["encoded per sample"] == 0.25


def test_a_rollouts_features_are_not_encoded_again(backbone: Backbone) -> None:
    (row,) = experience.rollout_rows(backbone, tenants=2, decisions=1, rounds=1, options=OPTIONS, epochs=(2,))
    assert row["epochs"] == 2
    assert row["encoded per sample"] == 0
    assert row["difference"] <= 1e-5


def test_memory_counts_a_worker() -> None:
    found = memory.occupy(2, OPTIONS)
    assert found["module"] > 0
    assert found["accounted"] == found["backbone"] + 2 * 5 * found["module"]
    assert found["difference"] <= 1e-6


def test_smolvla_tenants_are_measured_together_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = smolvla.CONFIG["text_config"] | {"vocab_size": 264, "hidden_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"scale_factor": 2, "text_config": text, "vision_config": {**vision, "patch_size": 16}}
    monkeypatch.setattr(smolvla, "CONFIG", config)
    monkeypatch.setattr(smolvla, "LAYERS", 2)
    monkeypatch.setattr(smolvla, "SIDE", 64)
    monkeypatch.setattr(smolvla, "WIDTHS", {"tiny": 64})
    found = smolvla.occupy((2, "tiny", "float32", "bfloat16"), Options())
    assert found["difference"] == 0.0
    assert 0 < found["resident"] <= found["peak"]
    assert found["grouped"] > 0
    assert found["one_by_one"] > 0
    assert found["backbone"] > 0
    assert found["module"] > 0
