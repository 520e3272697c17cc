"""Policy, environment and dataset have to agree: whoever does not is named, with both values."""

import pytest

from joynexus.errors import ContractError, SpecError
from joynexus.specs.contract import InterfaceContract, PolicyInterface, StateField, check_policy, check_sources
from joynexus.specs.loading import parse_tenant

ENVIRONMENT = InterfaceContract(
    source="libero libero_spatial/3",
    cameras=("agentview", "wrist"),
    image_size=None,
    state=(StateField(name="eef", dim=6), StateField(name="gripper", dim=2)),
    action_dim=7,
    control_mode="osc_pose",
    gripper="close_positive",
)
POLICY = PolicyInterface(cameras=("agentview", "wrist"), image_size=(128, 128), state_dim=8, action_dim=7)


def refusal(**changes: object) -> str:
    """What is said when the environment differs from what the policy was made for."""
    with pytest.raises(ContractError) as caught:
        check_policy(POLICY.model_copy(update=changes), ENVIRONMENT, owner="alice")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_policy_that_fits_is_taken():
    check_policy(POLICY, ENVIRONMENT, owner="alice")
    named = {"control_mode": "osc_pose", "gripper": "close_positive", "cameras": ("wrist",)}
    check_policy(POLICY.model_copy(update=named), ENVIRONMENT, owner="alice")
    blind = {"cameras": (), "image_size": (64, 64)}
    check_policy(POLICY.model_copy(update=blind), ENVIRONMENT.model_copy(update={"cameras": ()}), owner="alice")


def test_c54_one_camera_short_is_refused_by_name():
    with pytest.raises(ContractError) as caught:
        check_policy(POLICY, ENVIRONMENT.model_copy(update={"cameras": ("agentview",)}), owner="alice")
    assert "cameras ['wrist'] are missing; it offers ['agentview']" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"cameras": ("front",)}, "cameras ['front'] are missing; it offers ['agentview', 'wrist']"),
        ({"action_dim": 8}, "action dim is 7, the policy's is 8"),
        ({"state_dim": 9}, "state_dim is 8 (eef 6, gripper 2), the policy's is 9"),
        ({"control_mode": "joint"}, "control_mode is 'osc_pose', the policy's is 'joint'"),
        ({"gripper": "open_positive"}, "gripper is 'close_positive', the policy's is 'open_positive'"),
    ],
)
def test_each_disagreement_names_both_values(changes, part):
    message = refusal(**changes)
    assert message.startswith("alice: policy does not fit libero libero_spatial/3: ")
    assert part in message


def test_every_disagreement_is_named_at_once():
    message = refusal(action_dim=8, state_dim=9, gripper="none")
    assert all(part in message for part in ("action dim", "state_dim", "gripper"))


def test_frames_of_another_size_are_refused():
    stored = ENVIRONMENT.model_copy(update={"image_size": (84, 84)})
    with pytest.raises(ContractError, match=r"image_size is \[84, 84\], the policy's is \[128, 128\]"):
        check_policy(POLICY, stored, owner="alice")


@pytest.mark.parametrize(
    ("field", "value"), [("control_mode", "joint"), ("gripper", "open_positive"), ("orientation", "rotated_180")]
)
def test_c57_a_dataset_and_an_environment_of_opposite_conventions_are_refused(field, value):
    dataset = ENVIRONMENT.model_copy(update={"source": "demos.h5", field: value})
    with pytest.raises(ContractError) as caught:
        check_sources(dataset, ENVIRONMENT, cameras=("wrist",), owner="alice")
    expected = f"{field} is {value!r} in demos.h5 and {getattr(ENVIRONMENT, field)!r} in libero libero_spatial/3"
    assert expected in str(caught.value)


def test_frames_do_not_matter_to_a_policy_that_sees_none():
    dataset = ENVIRONMENT.model_copy(update={"orientation": "rotated_180"})
    check_sources(dataset, ENVIRONMENT, cameras=(), owner="alice")


def test_state_of_one_width_but_another_layout_is_refused():
    swapped = ENVIRONMENT.model_copy(update={"state": tuple(reversed(ENVIRONMENT.state))})
    with pytest.raises(ContractError, match=r"state is \(gripper 2, eef 6\)"):
        check_sources(swapped, ENVIRONMENT, cameras=(), owner="alice")


def test_c56_the_normalisation_mode_is_the_policys_own_and_is_never_guessed(tenant_data):
    data = tenant_data()
    assert parse_tenant(data, "job.yaml").policy.action.normalization == "quantile"
    del data["policy"]["action"]["normalization"]
    with pytest.raises(SpecError, match=r"policy\.action\.normalization: missing"):
        parse_tenant(data, "job.yaml")
    data = tenant_data()
    data["workloads"][0]["dataset"]["normalization"] = "min_max"
    with pytest.raises(SpecError, match=r"workloads\[0\]\.dataset\.normalization: unknown key"):
        parse_tenant(data, "job.yaml")  # there is one place for it, so that two can't contradict each other


def test_c56_an_environment_or_dataset_that_asks_for_another_mode_is_refused():
    asking = ENVIRONMENT.model_copy(update={"action_normalization": "quantile", "state_normalization": "mean_std"})
    fits = POLICY.model_copy(update={"action_normalization": "quantile", "state_normalization": "mean_std"})
    check_policy(fits, asking, owner="alice")
    check_policy(fits, ENVIRONMENT, owner="alice")  # a source that asks for none takes raw units of any policy
    with pytest.raises(ContractError) as caught:
        check_policy(fits.model_copy(update={"action_normalization": "min_max"}), asking, owner="alice")
    assert "action_normalization is 'quantile', the policy's is 'min_max'" in str(caught.value)
    with pytest.raises(ContractError, match="state_normalization is 'mean_std', the policy's is 'quantile'"):
        check_policy(fits.model_copy(update={"state_normalization": "quantile"}), asking, owner="alice")
    other = asking.model_copy(update={"source": "demos", "action_normalization": "min_max"})
    with pytest.raises(ContractError, match="action_normalization is 'min_max' in demos and 'quantile' in libero"):
        check_sources(other, asking, cameras=(), owner="alice")
    check_sources(other, ENVIRONMENT, cameras=(), owner="alice")


def test_c56_a_tenant_whose_environment_is_set_up_for_another_mode_is_refused(tenant_data):
    data = tenant_data()
    data["workloads"][1]["environment"]["normalization"] = "quantile"
    tenant = parse_tenant(data, "job.yaml")
    assert tenant.policy.interface.action_normalization == tenant.policy.interface.state_normalization == "quantile"
    data["workloads"][1]["environment"]["normalization"] = "min_max"
    with pytest.raises(SpecError, match=r"workloads\[1\]: environment.normalization is 'min_max', .* is 'quantile'"):
        parse_tenant(data, "job.yaml")


def test_c56_a_state_may_have_a_mode_of_its_own(tenant_data):
    data = tenant_data()
    data["policy"]["observation"]["normalization"] = "mean_std"
    policy = parse_tenant(data, "job.yaml").policy
    assert (policy.state_normalization, policy.action.normalization) == ("mean_std", "quantile")
    assert policy.interface.state_normalization == "mean_std"
