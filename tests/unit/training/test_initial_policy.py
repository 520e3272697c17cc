"""A policy that starts from a folder: its tensors and its statistics, whatever seed and dataset say."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from training_world import (
    FAST,
    are_equal,
    assert_same,
    batch,
    engine,
    parameters,
    policy,
    policy_stats,
    run,
    sft_tenant,
    train_call,
)

from joynexus.data.normalization import stats_digest
from joynexus.errors import CheckpointError, SpecError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import load_backbone
from joynexus.models.formats.imported import ImportedPolicy
from joynexus.models.formats.lerobot import open_lerobot
from joynexus.models.formats.starvla import StarVlaOptions, open_starvla
from joynexus.specs.action_module import GaussianModuleSpec, OftModuleSpec
from joynexus.specs.loading import load_service, load_tenant
from joynexus.specs.more_modules import DiffusionModuleSpec
from joynexus.specs.service import InferenceSpec, TrainingSpec
from joynexus.specs.tenant import AdapterSpec, PolicySpec
from joynexus.specs.vla_modules import Gr00tModuleSpec
from joynexus.training.engine import TrainingEngine
from joynexus.training.export import read_export, write_export
from joynexus.training.put_together import put_together
from joynexus.training.runtime import TrainingRuntime
from joynexus.training.take_apart import take_apart
from joynexus.types import Observation, PolicySnapshot, PredictRequest, TrainingBatch

GOLDEN = Path(__file__).parents[2] / "golden"


def started_from(folder: Path, **changes: object) -> PolicySpec:
    return policy("oft", normalization="mean_std").model_copy(update={"init_from": str(folder), **changes})


def exported(folder: Path, *, shift: float = 0.0, seed: int = 3) -> PolicySnapshot:
    """A policy that was trained for a step, in a folder."""
    trainer = engine()
    trainer.open_slot("was", policy("oft", normalization="mean_std"), seed=seed, stats=policy_stats(shift=shift))
    run(trainer, train_call("was", 0, batch(3, 1)))
    write_export(folder, trainer.snapshot("was"), signature=trainer.status("was").signature)
    return trainer.snapshot("was")


def digest(snapshot: PolicySnapshot) -> str:
    assert snapshot.stats is not None
    return stats_digest(snapshot.stats)


# ---- version 0


def test_version_0_is_what_the_folder_holds(tmp_path):
    was = exported(tmp_path / "e")
    trainer = engine()
    trainer.open_slot("a", started_from(tmp_path / "e"), seed=7)
    found = trainer.snapshot("a")
    assert found.version == 0
    assert are_equal(dict(found.parameters), dict(was.parameters))
    assert digest(found) == digest(was)
    run(trainer, train_call("a", 0, batch(3, 2)))
    base = trainer.base_snapshot("a")
    assert are_equal(dict(base.parameters), dict(was.parameters))
    assert not are_equal(parameters(trainer, "a"), dict(was.parameters))


def test_statistics_of_a_dataset_never_replace_the_policys(tmp_path):
    was = exported(tmp_path / "e")
    trainer = engine()
    trainer.open_slot("a", started_from(tmp_path / "e"), seed=7, stats=policy_stats(shift=5.0))
    assert digest(trainer.snapshot("a")) == digest(was) != stats_digest(policy_stats(shift=5.0))


def test_a_folder_without_statistics_takes_the_datasets(tmp_path):
    was = exported(tmp_path / "e")
    write_export(tmp_path / "e", replace(was, stats=None), signature="s")
    trainer = engine()
    with pytest.raises(SpecError, match="no statistics"):
        trainer.open_slot("a", started_from(tmp_path / "e"), seed=7)
    trainer.open_slot("a", started_from(tmp_path / "e"), seed=7, stats=policy_stats(shift=5.0))
    assert digest(trainer.snapshot("a")) == stats_digest(policy_stats(shift=5.0))


def test_an_adapter_starts_new_on_a_module_that_had_none(tmp_path):
    was = exported(tmp_path / "e")
    trainer = engine()
    trainer.open_slot("a", started_from(tmp_path / "e", adapter=AdapterSpec(rank=2, targets=("q_proj",))), seed=7)
    found = dict(trainer.snapshot("a").parameters)
    assert are_equal({name: found[name] for name in was.parameters}, dict(was.parameters))
    assert any(name.startswith("adapter.") for name in found)


def test_a_folder_of_another_policy_is_refused_and_leaves_no_slot(tmp_path):
    exported(tmp_path / "e")
    trainer = engine()
    other = OftModuleSpec(hidden_dim=32, token_dim=4, max_prefix_tokens=16)
    for changes, error, message in (
        ({"action_module": other}, CheckpointError, "its tensors do not fit the policy"),
        ({"init_from": str(tmp_path / "no")}, SpecError, r"no policy.json can be read there.*every node sees"),
        ({"action": policy("oft").action}, SpecError, "action.normalization is 'identity', there 'mean_std'"),
    ):
        with pytest.raises(error, match=message):
            trainer.open_slot("a", started_from(tmp_path / "e").model_copy(update=changes), seed=0)
    module = tmp_path / "e" / "module.safetensors"
    module.write_bytes(module.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        trainer.open_slot("a", started_from(tmp_path / "e"), seed=0)
    assert trainer.tenants() == {}


# ---- resume


def runtime(folder: Path, *, init_from: Path | None, shift: float, steps: int = 0) -> SimpleNamespace:
    """A run of a tenant whose dataset has statistics of its own; resumed where the folder has a checkpoint."""
    spec = sft_tenant("a", module="oft")
    update = {"policy": started_from(init_from)} if init_from is not None else {"policy": policy_of_tests()}
    published: list[PolicySnapshot] = []
    trainer = engine()
    found = TrainingRuntime(trainer, publish=published.append, keep_checkpoints=2)
    found.open_tenant(spec.model_copy(update=update), folder, policy_stats(shift=shift))
    if steps:
        sequence = trainer.status("a").next_sequence
        run(trainer, *[train_call("a", sequence + step, batch(3, step)) for step in range(steps)])
        found.sync_weights("a")
    return SimpleNamespace(trainer=trainer, published=published)


def policy_of_tests() -> PolicySpec:
    return policy("oft", normalization="mean_std")


@pytest.mark.parametrize("is_imported", [False, True])
def test_c82_statistics_after_resume_are_the_checkpoints_even_if_the_datasets_differ(tmp_path, is_imported):
    """huggingface/lerobot#4022: resuming overwrote the checkpoint's statistics with the dataset's."""
    start = tmp_path / "e" if is_imported else None
    if start is not None:
        exported(start, shift=-1.0)
    first = runtime(tmp_path / "run", init_from=start, shift=0.0, steps=2)
    want = digest(first.trainer.snapshot("a"))
    assert want == stats_digest(policy_stats(shift=-1.0 if is_imported else 0.0))
    again = runtime(tmp_path / "run", init_from=start, shift=9.0)
    assert again.trainer.status("a").version == 1
    assert digest(again.trainer.snapshot("a")) == want
    assert [each.version for each in again.published] == [0, 1]
    assert {digest(each) for each in again.published} == {want}
    for trainer in (first.trainer, again.trainer):
        sequence = trainer.status("a").next_sequence
        run(trainer, train_call("a", sequence, batch(3, 9)))
    assert_same(parameters(first.trainer, "a"), parameters(again.trainer, "a"))
    export = write_export(tmp_path / "out", again.trainer.snapshot("a"), signature="s")
    assert digest(read_export(export)) == want


def test_a_run_resumes_where_its_first_folder_has_moved(tmp_path):
    exported(tmp_path / "e")
    first = runtime(tmp_path / "run", init_from=tmp_path / "e", shift=0.0, steps=2)
    shutil.move(tmp_path / "e", tmp_path / "moved")
    again = runtime(tmp_path / "run", init_from=tmp_path / "moved", shift=0.0)
    assert are_equal(parameters(first.trainer, "a"), parameters(again.trainer, "a"))


# ---- files


def written(folder: Path, **changes: object) -> Path:
    spec = sft_tenant("a").model_copy(update={"policy": policy_of_tests(), "workloads": ()}).model_dump(mode="json")
    spec["policy"] |= changes
    (folder / "tenant.yaml").write_text(json.dumps(spec))
    return folder / "tenant.yaml"


def test_a_relative_folder_is_taken_from_the_yaml(tmp_path):
    exported(tmp_path / "policy")
    assert load_tenant(written(tmp_path, init_from="./policy")).policy.init_from == str(tmp_path / "policy")
    with pytest.raises(SpecError, match=r"tenant.yaml: tenant 'a': policy.init_from '.*/no': no policy.json"):
        load_tenant(written(tmp_path, init_from="no"))
    for content, message in (("{", "is no JSON"), ("[]", "names no policy"), ('{"policy": 1}', "names no policy")):
        (tmp_path / "policy" / "policy.json").write_text(content)
        with pytest.raises(SpecError, match=message):
            load_tenant(written(tmp_path, init_from="./policy"))


# ---- from a checkpoint of another project and back, beside tenants of other families


OTHERS = {
    "gaussian": GaussianModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=512),
    "diffusion": DiffusionModuleSpec(hidden_dim=16, num_layers=1, num_heads=2, num_sampling_steps=3),
    "oft": OftModuleSpec(hidden_dim=16, token_dim=4, max_prefix_tokens=512),
    "gr00t": Gr00tModuleSpec(hidden_dim=16, num_heads=2, head_dim=8, num_layers=2, max_steps=8, num_future_tokens=2),
}
FAMILIES = {
    "smolvla": ("gaussian", "oft", "gr00t"),
    "pi0": ("gaussian", "oft", "gr00t"),
    "pi05": ("gaussian", "diffusion", "oft"),
    "starvla_gr00t": ("gaussian", "oft", "diffusion"),
    "starvla_oft": ("gaussian", "gr00t", "diffusion"),
}


def opened(path: Path, name: str) -> ImportedPolicy:
    if name.startswith("starvla"):
        return open_starvla(path, options=StarVlaOptions(cameras=("top",)))
    return open_lerobot(path)


def data(spec: PolicySpec, rows: int, seed: int) -> TrainingBatch:
    rng = np.random.default_rng(seed)
    seen, done = spec.observation, spec.action
    pad = np.zeros((rows, done.horizon), dtype=np.bool_)
    pad[0, done.horizon - 2 :] = True
    return TrainingBatch(
        observation=Observation(
            images=rng.integers(0, 256, (rows, len(seen.cameras), *seen.image_size, 3), dtype=np.uint8),
            image_mask=np.ones((rows, len(seen.cameras)), dtype=np.bool_),
            state=rng.standard_normal((rows, seen.state_dim)).astype(np.float32),
            instructions=("open the drawer",) * rows,
        ),
        actions=rng.uniform(-0.9, 0.9, (rows, done.horizon, done.dim)).astype(np.float32),
        action_is_pad=pad,
        sample_ids=tuple(f"{seed}/{row}" for row in range(rows)),
        extras={},
    )


def loaded(folder: Path) -> SimpleNamespace:
    """What an import has written, read as a service and a tenant would be."""
    (spec,) = load_service(folder / "service.yaml").backbones.values()
    tenant = load_tenant(folder / "tenant.yaml").policy
    size = tenant.observation.model_copy(update={"image_size": (48, 48)})
    return SimpleNamespace(backbone=load_backbone(spec), policy=tenant.model_copy(update={"observation": size}))


def trained(found: SimpleNamespace, *neighbours: str) -> TrainingEngine:
    trainer = TrainingEngine(
        found.backbone,
        TrainingSpec(prefix_store={"device_bytes": 0, "host_bytes": 0}),
        backbone_name=found.policy.backbone,
    )
    trainer.open_slot("mine", found.policy, seed=0)
    stats = trainer.snapshot("mine").stats
    for name in neighbours:
        other = found.policy.model_copy(update={"action_module": OTHERS[name], "init_from": None})
        trainer.open_slot(name, other, seed=1, stats=stats)
    for step in range(5):
        calls = [train_call("mine", step, data(found.policy, 2, step), optimizer=FAST)]
        calls += [train_call(name, step, data(found.policy, 1 + step % 2, 99 + step)) for name in neighbours]
        results = run(trainer, *calls)
        assert {each.group_tenants for each in results} == {1 + len(neighbours)}
    return trainer


def actions(found: SimpleNamespace, snapshot: PolicySnapshot) -> np.ndarray:
    acting = InferenceEngine(found.backbone, InferenceSpec(), backbone_name=found.policy.backbone)
    acting.set_policy(snapshot)
    seen = data(found.policy, 2, 77).observation
    (chunk,) = acting.predict([PredictRequest(tenant=snapshot.tenant, observation=seen, seeds=(1, 2))])
    return chunk.actions


@pytest.mark.parametrize("name", FAMILIES)
def test_import_train_beside_others_export_import_acts_the_same(name, tmp_path):
    take_apart(opened(GOLDEN / name, name), tmp_path / "in")
    found = loaded(tmp_path / "in")
    trainer = trained(found, *FAMILIES[name])
    alone = trained(found)
    assert_same(parameters(trainer, "mine"), parameters(alone, "mine"))
    snapshot = trainer.snapshot("mine")
    first = read_export(tmp_path / "in" / "policy")
    moved = [key for key, each in first.parameters.items() if not np.array_equal(each, snapshot.parameters[key])]
    assert len(moved) > len(first.parameters) // 2
    write_export(tmp_path / "e", snapshot, signature="s")
    put_together(tmp_path / "e", tmp_path / "back", project=opened(GOLDEN / name, name).project)
    take_apart(opened(tmp_path / "back", name), tmp_path / "again", name="mine")
    again = loaded(tmp_path / "again")
    fresh = TrainingEngine(again.backbone, TrainingSpec(), backbone_name=again.policy.backbone)
    fresh.open_slot("mine", again.policy, seed=5)
    assert are_equal(parameters(fresh, "mine"), parameters(trainer, "mine"))
    assert np.array_equal(actions(again, fresh.snapshot("mine")), actions(found, snapshot))
