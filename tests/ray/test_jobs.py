"""joynexus from Ray jobs and from the command line, on a cluster of its own that a real `ray start` made."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.job_submission import JobSubmissionClient
from ray_head import RayHead, running_head
from ray_world import SERVICE, leftovers, rl_workload, tenant_spec, wait_until

import joynexus
from joynexus.actors import names, ray_calls
from joynexus.api import Service
from joynexus.specs.loading import dump_yaml
from joynexus.specs.service import StorageSpec
from joynexus.specs.tenant import TenantSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

NAME = "jobs"
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
LONG = 100_000
GONE_S = 30.0
"""How long the actors of a tenant may outlive its driver."""


class Cluster:
    """A running head, and how a user reaches it."""

    def __init__(self, head: RayHead, folder: Path) -> None:
        self.head = head
        self.folder = folder
        self.jobs = JobSubmissionClient(head.dashboard)

    def write(self, tenant: TenantSpec) -> str:
        """Put a tenant's YAML into the working directory."""
        name = f"{tenant.tenant}.yaml"
        (self.folder / name).write_text(dump_yaml(tenant))
        return name

    def command(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command in the working directory, as on the cluster's head."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            arguments, cwd=self.folder, env=self.head.environment, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments: str, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Run a command to its end: its exit code, stdout and stderr."""
        process = self.command(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"{arguments}: not done after {timeout_s} s: {process.communicate()}")
        return process.returncode, out, err

    def submit(self, entrypoint: str) -> str:
        """Submit a job without waiting for it."""
        return self.jobs.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": str(self.folder)})

    def wait(self, job: str, *, timeout_s: float = 120.0) -> tuple[int | None, str]:
        """Wait for a job's end: the exit code of its driver, and its log."""
        wait_until(lambda: self.jobs.get_job_status(job).value in ENDED, timeout_s=timeout_s, what=f"{job} ends")
        return self.jobs.get_job_info(job).driver_exit_code, self.jobs.get_job_logs(job)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Ray head with a dashboard, and a working directory with a service; this process is a driver there too."""
    folder = Path(tempfile.mkdtemp(prefix="jx-", dir="/tmp"))  # short: Ray's sockets live below it
    working = folder / "work"
    working.mkdir()
    spec = SERVICE.model_copy(update={"service": NAME, "storage": StorageSpec(root=folder / "runs")})
    (working / "service.yaml").write_text(dump_yaml(spec))
    try:
        with running_head(folder, num_cpus=2) as head:
            ray.init(address=head.address, log_to_driver=False, logging_level="ERROR")
            try:
                yield Cluster(head, working)
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> Iterator[Service]:
    """A service that `joynexus up` started on the cluster; `joynexus down` leaves nothing of it."""
    code, out, err = cluster.run("joynexus", "up", "--service", "service.yaml")
    assert code == 0, err
    assert f"service '{NAME}' is up" in out
    yield joynexus.connect(NAME)
    code, out, err = cluster.run("joynexus", "down", "--name", NAME)
    assert code == 0, err
    assert f"service '{NAME}' is down" in out
    assert not living_roles(NAME)


def long_tenant(name: str) -> TenantSpec:
    return tenant_spec(name, rl_workload(iterations=LONG, episodes=2))


def living_roles(service: str) -> Sequence[str]:
    """Actors and groups of every service whose name begins so."""
    prefix = names.namespace(service)
    actors = [name for namespace, name in ray_calls.named_actors() if namespace.startswith(prefix)]
    return [*actors, *[name for name in ray_calls.group_states() if name.startswith(prefix)]]


def wait_for_version(service: Service, tenant: str) -> None:
    def reached() -> bool:
        return service.status().get(tenant, {}).get("policy_version", 0) >= 1

    wait_until(reached, timeout_s=100.0, what=f"{tenant} has a version")


def wait_until_gone(tenant: str) -> None:
    wait_until(lambda: not leftovers(tenant), timeout_s=GONE_S, what=f"nothing is left of {tenant}")


def wait_until_stopped(service: Service, tenant: str) -> None:
    """Its actors go first, its slot and its record's status last."""
    wait_until_gone(tenant)
    wait_until(
        lambda: service.status()[tenant]["status"] == "STOPPED", timeout_s=GONE_S, what=f"{tenant} has been stopped"
    )


# ---- jobs with a service of their own


def test_a_submitted_job_brings_its_logs_back_and_leaves_nothing(cluster: Cluster) -> None:
    tenant = cluster.write(tenant_spec("own", rl_workload(iterations=2)))
    output = cluster.folder.parent / "own"
    submission = ["ray", "job", "submit", "--submission-id", "own", "--working-dir", ".", "--"]
    run = ["joynexus", "run", tenant, "--service", "service.yaml", "--output", str(output)]
    code, out, err = cluster.run(*submission, *run, timeout_s=180.0)

    assert code == 0, out + err
    assert cluster.jobs.get_job_info("own").driver_exit_code == 0
    assert "COMPLETED" in out
    summary = json.loads((output / "summary.json").read_text())
    assert summary["tenants"]["own"]["policy_version"] == 2
    wait_until(lambda: not living_roles(NAME), timeout_s=GONE_S, what="the job's own service is gone")


def test_a_broken_file_is_one_line_and_exit_code_2(cluster: Cluster) -> None:
    broken = tenant_spec("broken", rl_workload()).model_dump(mode="json")
    broken["policy"]["backbone"], broken["weigth"] = "tiny", 2
    (cluster.folder / "broken.yaml").write_text(yaml.safe_dump(broken))
    code, log = cluster.wait(cluster.submit("joynexus run broken.yaml --service service.yaml"))

    assert code == 2
    lines = [line for line in log.splitlines() if "error" in line]
    assert lines == ["joynexus: error: broken.yaml: weigth: unknown key. Did you mean 'weight'?"]
    assert "Traceback" not in log


def test_a_stopped_job_takes_its_own_service_with_it(cluster: Cluster) -> None:
    tenant = cluster.write(long_tenant("owner"))
    job = cluster.submit(f"joynexus run {tenant} --service service.yaml")
    shows_version = re.compile(r"RUNNING +v[1-9]")
    wait_until(
        lambda: shows_version.search(cluster.jobs.get_job_logs(job)), timeout_s=120.0, what="a version in the job's log"
    )
    assert leftovers("owner")
    cluster.jobs.stop_job(job)
    wait_until_gone("owner")
    wait_until(lambda: not living_roles(NAME), timeout_s=40.0, what="the service of the stopped job is gone")


# ---- jobs on a service that runs


def test_two_jobs_share_a_running_service(cluster: Cluster, service: Service) -> None:
    jobs: dict[str, str] = {}
    for name in ("one", "two"):
        tenant = cluster.write(tenant_spec(name, rl_workload(iterations=2)))
        jobs[name] = cluster.submit(f"joynexus run {tenant} --output {cluster.folder.parent / name}")
    for name, job in jobs.items():
        code, log = cluster.wait(job)
        assert code == 0, log
        assert f"running on service '{NAME}'" in log
        assert (cluster.folder.parent / name / "summary.json").exists()

    code, out, err = cluster.run("joynexus", "status", "--json")
    assert code == 0, err
    assert {name: json.loads(out)[name]["status"] for name in jobs} == dict.fromkeys(jobs, "COMPLETED")
    code, out, _ = cluster.run("joynexus", "status")
    assert [out.count(name) for name in jobs] == [1, 1]
    code, out, _ = cluster.run("joynexus", "usage", "--json")
    charged: dict[str, Any] = json.loads(out)["tiny"]["training"]["device_seconds"]
    assert all(charged[name] > 0 for name in jobs)


def test_a_stopped_job_stops_its_tenant_and_no_other(cluster: Cluster, service: Service) -> None:
    beside = service.submit(long_tenant("beside"))
    job = cluster.submit(f"joynexus run {cluster.write(long_tenant('stopped'))}")
    wait_for_version(service, "stopped")
    code, out, err = cluster.run("ray", "job", "stop", job)
    assert code == 0, out + err
    wait_until_stopped(service, "stopped")

    before = beside.status()["policy_version"]
    wait_until(lambda: beside.status()["policy_version"] > before, timeout_s=30.0, what="the other one goes on")
    assert beside.stop() == "STOPPED"


def test_a_killed_driver_takes_its_tenants_with_it_and_a_paused_one_does_not(
    cluster: Cluster, service: Service
) -> None:
    driver = cluster.command("joynexus", "run", cluster.write(long_tenant("killed")))
    wait_for_version(service, "killed")
    os.kill(driver.pid, signal.SIGSTOP)
    version = service.status()["killed"]["policy_version"]
    wait_until(
        lambda: service.status()["killed"]["policy_version"] > version + 1, timeout_s=30.0, what="versions meanwhile"
    )
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    wait_until_stopped(service, "killed")
    assert service.status()["killed"]["reason"] == "the run that submitted it is gone"


def test_a_tenant_stopped_from_outside_ends_its_run(cluster: Cluster, service: Service) -> None:
    driver = cluster.command("joynexus", "run", cluster.write(long_tenant("outside")))
    wait_for_version(service, "outside")
    code, out, err = cluster.run("joynexus", "stop", "outside")
    assert (code, out) == (0, "outside: STOPPED\n"), err
    out, err = driver.communicate(timeout=60.0)
    assert driver.returncode == 1
    assert "joynexus: error: outside: STOPPED" in err
    assert not leftovers("outside")
    code, out, err = cluster.run("joynexus", "logs", "outside")
    assert code == 0, err
    assert "STOPPED" in out
