"""What a live service refuses, or gives up: one clear line, nothing half-created, and nobody else notices."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from maniskill_file import ACTION_DIM, STATE_DIM, truncate, write_file
from ray import serve
from ray_world import (
    SERVICE,
    SLIVER,
    counter,
    evaluation_workload,
    leftovers,
    rl_workload,
    tenant_spec,
    wait_until,
)

import joynexus
from joynexus.actors import names
from joynexus.actors.inference import deploy_replicas
from joynexus.actors.roles import RoleClient
from joynexus.api import Run, Service
from joynexus.errors import (
    AdmissionError,
    TenantExistsError,
    TenantFailedError,
    TenantNotFoundError,
    UnknownComponentError,
)
from joynexus.observability.logs import format_record, read_logs
from joynexus.specs.base import Resources
from joynexus.specs.data import ManiSkillH5Spec
from joynexus.specs.service import PrefixStoreSpec, ServiceSpec, TrainingSpec
from joynexus.specs.tenant import SftSpec, TenantSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

SLOTS = 2
STALL_S = 12.0
WAIT_S = 90.0
Contradiction = tuple[TenantSpec, str]


@pytest.fixture(scope="module")
def service_spec() -> ServiceSpec:
    """A service of two slots and 8 MiB, that loses patience soon."""
    training = TrainingSpec(
        resources=SLIVER, slots=SLOTS, device_bytes=8 << 20, prefix_store=PrefixStoreSpec(device_bytes=1 << 20)
    )
    health = SERVICE.health.model_copy(update={"stall_s": STALL_S})
    return SERVICE.model_copy(update={"service": "strict", "training": training, "health": health})


def sft_tenant(name: str, *files: Path, max_prompt_tokens: int = 48) -> TenantSpec:
    policy = {
        "observation": {"state_dim": STATE_DIM, "max_prompt_tokens": max_prompt_tokens},
        "action": {"dim": ACTION_DIM, "normalization": "min_max"},
    }
    workloads = [
        SftSpec(dataset=ManiSkillH5Spec(path=path), num_steps=3, batch_size=4, resources=SLIVER) for path in files
    ]
    return tenant_spec(name, *workloads, policy=policy)


def check_nothing_is_left(service: Service, name: str) -> None:
    """No actor, no group, no lane, no policy and no slot."""
    assert leftovers(name) == []
    queue, store, trainer = (
        RoleClient(role, service.namespace) for role in (names.queue("tiny"), names.POLICY_STORE, names.trainer("tiny"))
    )
    assert name not in queue.call("stats")
    assert name not in store.call("ping")
    with pytest.raises(TenantNotFoundError):
        trainer.call("sync_point", name)


def check_failed(service: Service, run: Run, pattern: str) -> None:
    """The tenant failed with one line that says why, and left nothing."""
    with pytest.raises(TenantFailedError, match=pattern) as caught:
        run.wait(WAIT_S)
    assert "\n" not in str(caught.value)
    status = run.status()
    assert status["status"] == "FAILED"
    assert all(each["status"] in ("PENDING", "FAILED") for each in status["workloads"])
    check_nothing_is_left(service, run.name)


# ---- refused at once, with nothing but a look at the specs


def too_large(name: str) -> TenantSpec:
    return tenant_spec(name, rl_workload(), policy={"action_module": {"hidden_dim": 512}})


def test_c07_refused_submissions_hold_nothing(service: Service) -> None:
    elsewhere = tenant_spec("elsewhere", rl_workload(), policy={"backbone": "tinny"})
    for _ in range(SLOTS + 1):
        with pytest.raises(UnknownComponentError, match=r"no backbone 'tinny'.*Did you mean 'tiny'\?"):
            service.submit(elsewhere)
        with pytest.raises(AdmissionError, match=r"its slot needs \d+ bytes, and backbone 'tiny' has \d+ bytes"):
            service.submit(too_large("large"))
    assert not {"elsewhere", "large"} & service.status().keys()
    for name in ("elsewhere", "large"):
        check_nothing_is_left(service, name)

    living = [service.submit(tenant_spec(f"slot-{index}")) for index in range(SLOTS)]
    for run in living:
        run.wait_until_running(WAIT_S)
    with pytest.raises(TenantExistsError, match="slot-0"):
        service.submit(tenant_spec("slot-0"))
    with pytest.raises(AdmissionError, match=rf"free are 0 of {SLOTS} slots"):
        service.submit(tenant_spec("one-more"))
    assert living[0].stop() == "STOPPED"
    freed = service.submit(tenant_spec("one-more"))
    freed.wait_until_running(WAIT_S)
    for run in (freed, living[1]):
        assert run.stop() == "STOPPED"


# ---- refused when datasets and simulators have been asked


def one_camera_short(_: Path) -> Contradiction:
    camera = counter().model_copy(update={"render": True})
    policy = {"observation": {"cameras": ["render", "wrist"], "image_size": [32, 32]}}
    spec = tenant_spec("short", evaluation_workload(environment=camera), policy=policy)
    return spec, r"ContractError: .*cameras \['wrist'\] are missing, it offers \['render'\]"


def other_widths(_: Path) -> Contradiction:
    policy = {"observation": {"state_dim": 5}, "action": {"dim": 2}}
    return tenant_spec("widths", rl_workload(), policy=policy), (
        r"ContractError: widths: policy does not fit gym .*state_dim is 4 \(state 4\), the policy's is 5; "
        r"action dim is 1, the policy's is 2"
    )


def other_conventions(_: Path) -> Contradiction:
    policy = {"action": {"control_mode": "osc_pose", "gripper": "open_positive"}}
    return tenant_spec("conventions", rl_workload(), policy=policy), (
        r"ContractError: .*control_mode is 'box', the policy's is 'osc_pose'; "
        r"gripper is 'none', the policy's is 'open_positive'"
    )


def sources_that_disagree(folder: Path) -> Contradiction:
    files = [
        write_file(folder / "pose.h5"),
        write_file(folder / "joint.h5", control_mode="pd_joint_delta_pos", robot="panda_stick"),
    ]
    return sft_tenant("disagreeing", *files), (
        r"ContractError: .*control_mode is 'pd_ee_delta_pose' in .*pose\.h5 and 'pd_joint_delta_pos' in .*joint\.h5; "
        r"gripper is 'open_positive' in .* and 'none' in"
    )


def unknown_environment(_: Path) -> Contradiction:
    workload = evaluation_workload(environment=counter().model_copy(update={"id": "Cartpole-v1", "kwargs": {}}))
    return tenant_spec("unknown", workload), r"SpecError: gym Cartpole-v1: cannot be made.*Did you mean 'CartPole-v1'"


def truncated_file(folder: Path) -> Contradiction:
    path = truncate(write_file(folder / "cut.h5"))
    return sft_tenant("truncated", path), r"DatasetError: dataset .*cut\.h5: damaged or truncated"


def long_instruction(folder: Path) -> Contradiction:
    spec = sft_tenant("wordy", write_file(folder / "wordy.h5"), max_prompt_tokens=8)
    return spec, r"InvalidBatchError: tenant 'wordy': prompt .* tokens, the policy's bucket max_prompt_tokens is 8"


def question_on_the_terminal(_: Path) -> Contradiction:
    workload = rl_workload(environment=counter(is_asking=True))
    return tenant_spec("asking", workload), r"AssetsMissingError: .*asked a question on the terminal"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(one_camera_short, id="c54_one_camera_short"),
        other_widths,
        other_conventions,
        sources_that_disagree,
        unknown_environment,
        pytest.param(truncated_file, id="c69_truncated_file"),
        long_instruction,
        question_on_the_terminal,
    ],
)
def test_a_contradiction_fails_its_tenant_in_one_line(
    service: Service, tmp_path: Path, make: Callable[[Path], Contradiction]
) -> None:
    spec, pattern = make(tmp_path)
    check_failed(service, service.submit(spec), pattern)


def test_c69_another_tenants_dataset_loads(service: Service, tmp_path: Path) -> None:
    run = service.submit(sft_tenant("whole", write_file(tmp_path / "whole.h5")))
    assert run.wait(WAIT_S)["workloads"][0]["results"]["steps"] == 3


def test_c24_a_role_that_fits_nowhere_fails_within_seconds(service: Service) -> None:
    huge = counter().model_copy(update={"resources": Resources(num_cpus=64)})
    began = time.monotonic()
    run = service.submit(tenant_spec("huge", rl_workload(environment=huge)))
    check_failed(service, run, r"PlacementError: huge: .*a bundle needs 64 CPU, and no node has more than 2 CPU")
    assert time.monotonic() - began < 10.0


def test_c24_a_service_that_fits_nowhere_does_not_come_up(service: Service, tmp_path: Path) -> None:

    large = SERVICE.training.model_copy(update={"resources": Resources(num_cpus=64)})
    spec = SERVICE.model_copy(update={"service": "oversized", "training": large})
    began = time.monotonic()
    with pytest.raises(AdmissionError, match=r"needs 64 CPU.*no node has more than 2 CPU"):
        joynexus.start(spec, root=tmp_path)
    assert time.monotonic() - began < 30.0
    assert leftovers("oversized") == []
    assert service.status()


# ---- given up while it runs


@pytest.fixture
def neighbour(service: Service) -> Any:
    """A tenant that trains beside the one that fails."""
    run = service.submit(tenant_spec("neighbour", rl_workload(iterations=100_000, episodes=2)))
    wait_until(lambda: run.status()["policy_version"] >= 1, timeout_s=WAIT_S, what="the neighbour has a version")
    yield run
    run.stop()


def test_simulators_that_crash_again_and_again_fail_their_tenant_alone(service: Service, neighbour: Run) -> None:
    run = service.submit(tenant_spec("crashing", rl_workload(environment=counter(num_envs=2, raise_at=3))))
    check_failed(service, run, r"SimulatorError: crashing: 5 simulator crashes in a row, the last: .*told to fail")
    logged = [format_record(each) for each in read_logs(service.root / names.LOGS / "crashing")]
    assert any("In its process" in line for line in logged)  # the traceback
    before = neighbour.status()["policy_version"]
    wait_until(lambda: neighbour.status()["policy_version"] > before + 1, timeout_s=30.0, what="the neighbour goes on")
    assert neighbour.status()["status"] == "RUNNING"


def test_c25_without_replicas_a_run_fails_by_its_deadline(service: Service) -> None:
    run = service.submit(tenant_spec("unserved", rl_workload(iterations=100_000, episodes=2)))
    wait_until(lambda: run.status()["policy_version"] >= 1, timeout_s=WAIT_S, what="a version before the fault")
    serve.delete(names.application(service.name, "tiny"))
    try:
        began = time.monotonic()
        check_failed(service, run, r"TenantFailedError: unserved: rl: no progress for 12 s")
        assert time.monotonic() - began < 3 * STALL_S
    finally:
        deploy_replicas(service.spec, "tiny")
    again = service.submit(tenant_spec("served", rl_workload(iterations=1)))
    assert again.wait(WAIT_S)["policy_version"] == 1
