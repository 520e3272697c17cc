"""Tenants through every role of a service: what they get, what they are charged, and that nothing of them stays."""

import json
from pathlib import Path

import pytest
from ray_world import evaluation_workload, leftovers, rl_workload, tenant_spec, wait_until

from joynexus.api import Service
from joynexus.errors import TenantExistsError, TenantNotFoundError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_two_tenants_share_groups_and_are_charged_for_what_they_used(service: Service) -> None:
    specs = [
        tenant_spec(name, rl_workload(iterations=4), evaluation_workload(baseline=True)) for name in ("ann", "bob")
    ]
    runs = [service.submit(spec) for spec in specs]
    final = [run.wait(120.0) for run in runs]

    for status in final:
        assert status["status"] == "COMPLETED"
        rl, evaluation = (each["results"] for each in status["workloads"])
        assert rl["iterations"] == status["policy_version"] == 4
        assert evaluation["episodes"] == 4
        assert evaluation["policy_versions"] == [4]
        assert evaluation["baseline"]["policy_versions"] == [0]
        assert evaluation["success_rate"] == 1.0
    assert final[0]["signature"] == final[1]["signature"]

    usage = service.usage()["tiny"]
    assert usage["inference"]["mean_tenants"] > 1
    for kind in ("training", "inference"):
        charged = sum(usage[kind]["device_seconds"].values())
        assert charged == pytest.approx(usage[kind]["busy_seconds"], rel=0.05)


def test_a_tenant_leaves_metrics_and_an_export_and_nothing_in_a_process(service: Service, tmp_path: Path) -> None:
    run = service.submit(tenant_spec("cleo", rl_workload(iterations=2)), folder=tmp_path)
    run.wait(120.0)

    records = run.metrics()
    assert {record["training/policy_version"] for record in records if "training/policy_version" in record} == {1, 2}
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)
    assert list((tmp_path / "tensorboard").iterdir())
    exported = json.loads((tmp_path / "export" / "policy.json").read_text())
    assert "cleo" in json.dumps(exported)
    assert (tmp_path / "export" / "module.safetensors").exists()
    wait_until(lambda: not leftovers("cleo"), timeout_s=10.0, what="actors and groups of the tenant are gone")
    with pytest.raises(TenantNotFoundError):
        service.tenant("nobody")


def test_an_update_encodes_nothing_where_features_travel(service: Service) -> None:
    found = {}
    for mode in ("always", "never"):
        workload = rl_workload(iterations=2)
        rollout = workload.rollout.model_copy(update={"ship_features": mode})
        run = service.submit(tenant_spec(f"finn-{mode}", workload.model_copy(update={"rollout": rollout})))
        run.wait(120.0)
        records = run.metrics()
        counts = ("rows", "encoded", "carried")
        found[mode] = [sum(each.get(f"training/{name}", 0) for each in records) for name in counts]
        shipped = {each["rollout/features_shipped"] for each in records if "rollout/features_shipped" in each}
        assert shipped == {float(mode == "always")}
    rows, encoded, carried = found["always"]
    assert rows > 0
    assert (encoded, carried) == (0, rows)
    assert found["never"][2] == 0


def test_a_tenant_can_be_stopped_while_it_runs(service: Service) -> None:
    run = service.submit(tenant_spec("dora", rl_workload(iterations=100_000)))
    wait_until(lambda: run.status()["policy_version"] >= 1, timeout_s=90.0, what="a first version")
    with pytest.raises(TenantExistsError):
        service.submit(tenant_spec("dora", rl_workload()))

    assert run.stop() == "STOPPED"
    assert not leftovers("dora")
    again = service.submit(tenant_spec("dora", rl_workload(iterations=1)))
    assert again.wait(90.0)["policy_version"] == 1
