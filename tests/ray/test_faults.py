"""Kill -9 of every role while tenants run: the run completes, and nothing is counted twice."""

import os
import signal
from collections.abc import Callable

import pytest
import ray
from ray import serve
from ray_world import counter, evaluation_workload, rl_workload, tenant_spec, wait_until

from joynexus.actors import names
from joynexus.actors.roles import find_role
from joynexus.api import Run, Service

ITERATIONS = 16
"""Enough that a fault comes in the middle, few enough that a test is short."""
EPISODES = 2
"""Of one iteration."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def kill_role(service: Service, name: str) -> None:
    """Kill -9 the process of a role."""
    handle = find_role(name, service.namespace)
    pid: int = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)


def restarted(service: Service, role: str) -> Callable[[], bool]:
    return lambda: service.master.call("restarts").get(role, 0) > 0


def check_completed(run: Run, iterations: int) -> None:
    """The run ended, each iteration is one version, and no trajectory entered two of them."""
    status = run.wait(150.0)
    results = status["workloads"][0]["results"]
    assert results["iterations"] == status["policy_version"] == iterations
    rows = [each for each in run.metrics() if "training/policy_version" in each]
    used = [episode for row in rows for episode in row["episodes"]]
    assert len(used) == len(set(used))  # no episode was learnt from twice
    assert len(used) >= EPISODES * (iterations - 1)  # a trainer may die between its checkpoint and this record
    assert [each["training/policy_version"] for each in rows[-3:]] == list(range(iterations - 2, iterations + 1))


@pytest.fixture
def runs(service: Service, request: pytest.FixtureRequest) -> tuple[Run, Run]:
    """Two tenants in the middle of training: one that a fault is aimed at, one beside it."""
    iterations, slow = ITERATIONS, counter(num_envs=1, step_s=0.01)
    label = request.node.name.removeprefix("test_").replace("_", "-").removeprefix("killed-")[:12].strip("-")
    specs = [
        tenant_spec(f"{role}-{label}", rl_workload(iterations=iterations, episodes=EPISODES, environment=slow))
        for role in ("a", "b")
    ]
    found = tuple(service.submit(spec) for spec in specs)
    for run in found:
        wait_until(
            lambda run=run: run.status()["policy_version"] >= 2, timeout_s=100.0, what="versions before the fault"
        )
    return found[0], found[1]


def test_killed_environment_actor(service: Service, runs: tuple[Run, Run]) -> None:
    aimed_at, beside = runs
    role = names.environment(aimed_at.name, 0)
    kill_role(service, role)
    before = beside.status()["policy_version"]
    wait_until(restarted(service, role), timeout_s=60.0, what="the worker is made anew")
    wait_until(lambda: beside.status()["policy_version"] > before, timeout_s=60.0, what="the other tenant goes on")
    assert names.environment(beside.name, 0) not in service.master.call("restarts")
    for run in runs:
        check_completed(run, ITERATIONS)


def test_killed_simulator_is_no_lost_worker(service: Service, runs: tuple[Run, Run]) -> None:
    worker = find_role(names.environment(runs[0].name, 0), service.namespace)
    for pid in ray.get(worker.process_ids.remote()):
        os.kill(pid, signal.SIGKILL)
    for run in runs:
        check_completed(run, ITERATIONS)
    assert names.environment(runs[0].name, 0) not in service.master.call("restarts")


def test_killed_trainer(service: Service, runs: tuple[Run, Run]) -> None:
    kill_role(service, names.trainer("tiny"))
    wait_until(restarted(service, names.trainer("tiny")), timeout_s=90.0, what="the trainer is made anew")
    for run in runs:
        check_completed(run, ITERATIONS)


def test_killed_replica(service: Service, runs: tuple[Run, Run]) -> None:
    replicas = serve.get_deployment_handle(names.DEPLOYMENT, names.application(service.name, "tiny"))
    os.kill(replicas.process_id.remote().result(), signal.SIGKILL)
    for run in runs:
        check_completed(run, ITERATIONS)


def test_killed_master(service: Service, runs: tuple[Run, Run]) -> None:
    kill_role(service, names.MASTER)
    for run in runs:
        check_completed(run, ITERATIONS)


def test_killed_queue(service: Service, runs: tuple[Run, Run]) -> None:
    kill_role(service, names.queue("tiny"))
    for run in runs:
        check_completed(run, ITERATIONS)


def test_killed_policy_store(service: Service, runs: tuple[Run, Run]) -> None:
    kill_role(service, names.POLICY_STORE)
    for run in runs:
        check_completed(run, ITERATIONS)


def test_killed_worker_in_evaluation_repeats_no_finished_episode(service: Service) -> None:
    slow = counter(num_envs=1, step_s=0.05)
    run = service.submit(tenant_spec("eve", evaluation_workload(episodes=8, environment=slow)))
    role = names.environment("eve", 0)

    def episodes() -> int:
        found = find_role(role, service.namespace)
        return ray.get(found.ping.remote())["episodes"]

    wait_until(lambda: run.status()["status"] == "RUNNING" and episodes() >= 2, timeout_s=90.0, what="two episodes")
    kill_role(service, role)
    results = run.wait(120.0)["workloads"][0]["results"]
    assert results["episodes"] == 8
    assert results["errors"] == results["missing"] == 0
