from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.errors import SpecError
from joynexus.specs.action_module import FlowMatchingModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.algorithm import OptimizerSpec, PpoSpec, ScheduleSpec
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.base import Resources
from joynexus.specs.data import ManiSkillH5Spec
from joynexus.specs.documents import read_documents, write_documents
from joynexus.specs.environment import GymSpec, LiberoSpec, ManiSkillSpec
from joynexus.specs.loading import dump_yaml, load_any, load_service, load_tenant, load_tenants, parse_tenant
from joynexus.specs.service import ServiceSpec, TrainingSpec, default_service
from joynexus.specs.tenant import (
    ActionSpec,
    EvaluationSpec,
    ObservationSpec,
    PolicySpec,
    RlSpec,
    RolloutSpec,
    SftSpec,
    TenantSpec,
)
from joynexus.specs.vlm_backbones import SmolVlmBackboneSpec

TENANT = """\
tenant: pick-cube
policy: &policy
  backbone: lite
  observation: {cameras: [base, wrist], image_size: [128, 128], state_dim: 8, max_prompt_tokens: 32}
  action: {dim: 7, horizon: 8, num_action_steps: 4, normalization: quantile}
  action_module: {type: flow_matching, hidden_dim: 128, num_layers: 4}
workloads:
  - type: sft
    dataset: {type: maniskill_h5, path: demos/PickCube-v1.h5}
    num_steps: 500
    batch_size: 32
    optimizer: {lr: 3e-4}
"""


def write(folder: Path, text: str | bytes, name: str = "spec.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_tenant_is_read_and_its_dataset_is_found_from_its_own_folder(tmp_path, monkeypatch):
    path = write(tmp_path, TENANT)
    monkeypatch.chdir("/")
    workload = load_tenant(path).workloads[0]
    assert isinstance(workload, SftSpec)
    assert workload.optimizer.lr == 3e-4
    assert workload.dataset.path == (tmp_path / "demos/PickCube-v1.h5").resolve()


def test_plain_values_keep_their_relative_paths(tenant_data):
    assert parse_tenant(tenant_data(), "here").workloads[0].dataset.path == Path("demos/pick.h5")


def test_files_of_both_kinds_are_told_apart_by_their_keys(tmp_path):
    service = write(tmp_path, dump_yaml(default_service()), "service.yaml")
    tenant = write(tmp_path, TENANT)
    assert load_any(service) == (default_service(),)
    assert isinstance(load_any(tenant)[0], TenantSpec)
    with pytest.raises(SpecError, match="not a tenant, but ServiceSpec"):
        load_tenant(service)
    with pytest.raises(SpecError, match="not a service, but TenantSpec"):
        load_service(tenant)
    with pytest.raises(SpecError, match="Give it with --service"):
        load_tenants([service])


def test_one_file_may_hold_several_tenants(tmp_path):
    path = write(tmp_path, f"{TENANT}---\n{TENANT.replace('pick-cube', 'push-cube')}---\n")
    assert [each.tenant for each in load_tenants([path])] == ["pick-cube", "push-cube"]
    with pytest.raises(SpecError, match="2 documents, where one is expected"):
        load_tenant(path)


def test_an_error_in_one_of_several_documents_says_in_which(tmp_path):
    path = write(tmp_path, f"{TENANT}---\n{TENANT.replace('dim: 7', 'dim: 0')}")
    with pytest.raises(SpecError, match=r"spec.yaml \(document 2\): policy.action.dim: must be at least 1, found 0"):
        load_any(path)


def test_two_tenants_of_one_name_are_refused(tmp_path):
    first, second = write(tmp_path, TENANT, "a.yaml"), write(tmp_path, TENANT, "b.yaml")
    with pytest.raises(SpecError, match=r"b.yaml: tenant: 'pick-cube' is also in .*a.yaml"):
        load_tenants([first, second])


def test_all_files_are_read_before_anything_is_refused(tmp_path):
    bad = [write(tmp_path, TENANT.replace("seed", "x").replace("dim: 7", "dim: 0"), "a.yaml"), tmp_path / "gone.yaml"]
    with pytest.raises(SpecError) as caught:
        load_tenants(bad)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"# only a comment\n---\n", "empty"),
        (b"- a\n- b\n", "must be a mapping, found a list"),
        (b"hello", "must be a mapping, found a str"),
        (b"\xff\xfe\x00", "not UTF-8, at byte 0"),
        (b"colour: red\n", "neither a tenant .* nor a service .*'colour'"),
        (b"tenant: a\n  policy: b\n", "line 2, column 9: mapping values are not allowed here"),
        (b"tenant: [a, b\n", "line 2, column 1: "),
        (b"tenant: a\n\tpolicy: b\n", "line 2, column 1: .*spaces, not tabs"),
        (b"tenant: a\nseed: 1\ntenant: b\n", "line 3, column 1: key 'tenant' is given twice"),
        (b"tenant: a\n? [x, y]\n: 1\n", "line 2, column 3: a key is a list or a mapping"),
        (b"tenant: !!python/object:os.system x\n", "line 1, column 9: tag '!!python/object:os.system' is not allowed"),
        (b"tenant: *nobody\n", "line 1, column 9: found undefined alias"),
        (b"tenant: &a [*a]\n", "an alias that contains itself"),
        (b"tenant: " + b"[" * 5000, "nested too deeply"),
        (b"tenant: \x00\n", "special characters are not allowed"),
    ],
)
def test_what_is_no_spec_file_is_one_clear_line(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(SpecError, match=message) as caught:
        load_any(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_missing_files_folders_and_huge_files_are_refused(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        load_any(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="a folder"):
        load_any(tmp_path)
    with pytest.raises(SpecError, match="larger than"):
        load_any(write(tmp_path, b"#" * (1 << 20) + b"#"))


def test_nested_aliases_do_not_expand_without_bound(tmp_path):
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(SpecError, match="aliases expand to more than"):
        load_any(write(tmp_path, "\n".join(["l0: &l0 x", *levels])))


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    text = "[3e-4, 1E5, .5, 1_000, 007, 0x10, 0o17, on, no, yes, true, ~, 2024-01-01, 1:30, '3', -.inf, 1e3x]"
    (values,) = read_documents(write(tmp_path, text))
    expected = [3e-4, 1e5, 0.5, 1000, 7, 16, 15, "on", "no", "yes", True, None, "2024-01-01", "1:30", "3"]
    assert values == [*expected, float("-inf"), "1e3x"]


def test_merge_keys_fill_in_what_is_not_given(tmp_path):
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], z: 5}\n"
    assert read_documents(write(tmp_path, text))[0]["c"] == {"x": 1, "y": 2, "z": 5}


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)
values = st.recursive(
    scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3)
)


@settings(deadline=None, max_examples=100)
@given(values=st.lists(values.filter(lambda each: each is not None), min_size=1, max_size=3))
def test_any_value_comes_back_as_it_was_written(tmp_path_factory, values):
    path = write(tmp_path_factory.mktemp("yaml"), write_documents(values))
    assert read_documents(path) == values


texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
fractions = st.floats(0.0, 1.0)
positive = st.floats(0.0, 1e9, exclude_min=True)
resources = st.builds(Resources, num_cpus=st.floats(0, 1e3), custom=st.dictionaries(texts, st.floats(0, 9), max_size=2))
optimizers = st.builds(
    OptimizerSpec,
    lr=positive,
    betas=st.tuples(fractions, fractions),
    max_grad_norm=st.none() | positive,
    schedule=st.builds(ScheduleSpec, type=st.sampled_from(["constant", "cosine"]), total_steps=st.none() | st.just(7)),
)
environments = st.one_of(
    st.builds(ManiSkillSpec, task=texts, resources=resources, robot=st.none() | texts),
    st.builds(LiberoSpec, suite=texts, task_id=st.integers(0, 99)),
    st.builds(GymSpec, id=texts, kwargs=st.dictionaries(texts, scalars, max_size=2), success_key=st.none() | texts),
)
workloads = st.one_of(
    st.builds(
        SftSpec,
        dataset=st.builds(ManiSkillH5Spec, path=st.just(Path("/demos/a b.h5")), instruction=st.none() | texts),
        num_steps=st.integers(1, 10**9),
        batch_size=st.integers(1, 100),
        optimizer=optimizers,
    ),
    st.builds(
        RlSpec,
        algorithm=st.builds(PpoSpec, discount=fractions, value_clip=st.none() | positive, optimizer=optimizers),
        environment=environments,
        rollout=st.builds(RolloutSpec, max_workers=st.integers(1, 9)),
        num_iterations=st.integers(1, 9),
    ),
    st.builds(EvaluationSpec, environment=environments, baseline=st.booleans()),
)
policies = st.builds(
    PolicySpec,
    backbone=st.sampled_from(["lite", "no", "null", "on", "1e3", "007"]),
    observation=st.builds(
        ObservationSpec,
        cameras=st.lists(st.sampled_from(["base", "wrist", "0x1", "true"]), unique=True).map(tuple),
        state_dim=st.integers(0, 9),
        prompt_template=texts.map(lambda text: text + "{instruction}"),
    ),
    action=st.builds(
        ActionSpec,
        dim=st.integers(1, 9),
        horizon=st.just(8),
        num_action_steps=st.integers(1, 8),
        control_mode=st.none() | texts,
    ),
    action_module=st.just(GaussianModuleSpec()),
)
tenants = st.builds(
    TenantSpec,
    tenant=st.sampled_from(["a", "null", "1", "12e5", "yes"]),
    weight=st.floats(0.0, 1000.0, exclude_min=True),
    policy=policies,
    workloads=st.lists(workloads, max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=50)
@given(spec=tenants)
def test_a_tenant_survives_yaml_exactly(tmp_path_factory, spec):
    path = write(tmp_path_factory.mktemp("yaml"), dump_yaml(spec))
    assert load_tenant(path) == spec


@pytest.mark.parametrize("module", [OftModuleSpec(), FlowMatchingModuleSpec(num_layers=2)])
def test_every_module_survives_yaml(tmp_path, tenant_data, module):
    data = tenant_data(workloads=[])
    data["policy"]["action_module"] = module.model_dump()
    spec = parse_tenant(data, "here")
    assert load_tenant(write(tmp_path, dump_yaml(spec))) == spec
    assert spec.policy.action_module == module


def test_a_service_survives_yaml(tmp_path):
    tiny = SmolVlmBackboneSpec(init="random", config={"text_config": {"hidden_size": 64, "rope": None, "eps": 1e-6}})
    spec = ServiceSpec(
        backbones={"lite": LiteBackboneSpec(width=64), "tiny": tiny}, training=TrainingSpec(slots=3, max_wait_ms=0.5)
    )
    text = dump_yaml(spec)
    assert load_service(write(tmp_path, text)) == spec
    assert yaml.safe_load(text) == spec.model_dump(mode="json")  # other readers see the same
