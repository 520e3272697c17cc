import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import joynexus
from joynexus.cli import app

TENANT = """\
tenant: pick-cube
policy:
  backbone: lite
  observation: {cameras: [base], image_size: [128, 128], state_dim: 8}
  action: {dim: 7, horizon: 8, num_action_steps: 4, normalization: quantile}
  action_module: {type: gaussian}
workloads:
  - type: rl
    algorithm: {type: ppo}
    environment: {type: maniskill, task: PickCube-v1}
    rollout: {min_workers: 1, max_workers: 4}
    num_iterations: 20
"""
SERVICE = "service: lab\nbackbones: {lite: {type: lite}}\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def tenant(tmp_path: Path) -> Path:
    path = tmp_path / "tenant.yaml"
    path.write_text(TENANT)
    return path


@pytest.fixture
def service(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    return path


def altered(path: Path, old: str, new: str) -> Path:
    assert old in path.read_text()
    other = path.with_name(f"altered-{path.name}")
    other.write_text(path.read_text().replace(old, new))
    return other


def test_valid_files_are_told_so(tenant, service):
    result = run("validate", tenant, service)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "ok: tenant 'pick-cube': gaussian on backbone 'lite', workloads: rl",
        f"ok: service 'lab' in {service}",
    ]
    assert result.stderr == ""


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(tenant):
    bad = altered(tenant, "state_dim: 8", "state_dimm: 8")
    result = run("validate", bad)
    assert result.exit_code == 2
    assert result.stderr == (
        f"joynexus: error: {bad}: policy.observation.state_dimm: unknown key. Did you mean 'state_dim'?\n"
    )
    assert result.stdout == ""


def test_every_file_is_looked_at(tenant, tmp_path):
    result = run("validate", altered(tenant, "dim: 7", "dim: 0"), tmp_path / "none.yaml", tenant)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "ok: tenant 'pick-cube'" in result.stdout


def test_with_a_service_the_tenant_also_has_to_fit_it(tenant, service):
    assert run("validate", tenant, "--service", service).exit_code == 0
    other = altered(service, "{lite:", "{lyte:")
    result = run("validate", tenant, "--service", other)
    assert result.exit_code == 2
    assert "service 'lab' has no backbone 'lite'. Did you mean 'lyte'?" in result.stderr


def test_a_quota_is_a_refusal_and_no_mistake(tenant, service):
    service.write_text(SERVICE + "quotas: {max_env_workers: 2}\n")
    result = run("validate", tenant, "--service", service)
    assert result.exit_code == 3
    assert "asks for 4 environment workers, the quota is 2" in result.stderr


def test_json_holds_the_same(tenant, tmp_path):
    good = json.loads(run("validate", tenant, "--json").stdout)
    assert good == {"valid": True, "tenants": ["pick-cube"], "services": {}, "errors": []}
    result = run("validate", tmp_path / "none.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["errors"] == [f"{tmp_path}/none.yaml: no such file. Check the path."]


def test_the_plan_tells_who_shares_with_whom(tenant):
    tenant.write_text(
        "---\n".join(
            [
                TENANT,
                TENANT.replace("pick-cube", "push-cube").replace("[base]", "[front]"),
                TENANT.replace("pick-cube", "blind").replace("[base]", "[]"),
            ]
        )
    )
    result = run("plan", tenant)
    assert result.exit_code == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    pick, push = (
        next(row for row in lines if row[0] == "pick-cube"),
        next(row for row in lines if row[0] == "push-cube"),
    )
    assert pick[3] == "push-cube"
    assert pick[2] == push[2]
    assert "blind: image_size [128, 128] / None, num_cameras 1 / 0" in pick[4]
    assert pick[5] == "1 x environment (1 CPU) (up to 4)"


def test_the_plan_refuses_what_the_service_cannot_hold(tenant, service):
    service.write_text(SERVICE + "training: {slots: 1}\n")
    tenant.write_text(f"{TENANT}---\n{TENANT.replace('pick-cube', 'second')}")
    result = run("plan", tenant, "--service", service, "--json")
    assert result.exit_code == 3
    assert "joynexus: error: tenant 'second': no room at backbone 'lite'" in result.stderr
    first, second = json.loads(result.stdout)["tenants"]
    assert (first["admitted"], second["admitted"]) == (True, False)
    assert "free are 0 of 1 slots" in second["refusal"]
    assert first["slot_bytes"] > 0
    assert len(first["signature"]) == 64


@pytest.mark.parametrize("which", ["tenant", "service"])
def test_the_schema_is_json_schema(which):
    schema = json.loads(run("schema", which).stdout)
    assert schema["title"] == {"tenant": "TenantSpec", "service": "ServiceSpec"}[which]
    assert "LiteBackboneSpec" in schema["$defs"] or which == "tenant"


def test_version_and_misuse():
    assert run("--version").stdout == f"joynexus {joynexus.__version__}\n"
    assert run("validate").exit_code == 2
    assert run("schema", "robot").exit_code == 2
    assert run("no-such-command").exit_code == 2


PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "numpy", "gymnasium", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from joynexus.cli import main
sys.argv[0] = "joynexus"
main()
"""


def test_validate_answers_within_a_second_with_neither_torch_nor_ray(tenant):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "validate", str(tenant)], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: tenant 'pick-cube'")
    # Of its own time, which other processes on the machine can't stretch.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_the_plan_tells_what_an_adapter_costs(tenant, service):
    backbone = "{type: smolvlm, path: HuggingFaceTB/SmolVLM2-500M-Video-Instruct, num_layers: 16}"
    service.write_text(SERVICE.replace("{type: lite}", backbone))
    module = "action_module: {type: gaussian, max_prefix_tokens: 128}"
    adapted = TENANT.replace("action_module: {type: gaussian}", f"{module}\n  adapter: {{rank: 8}}")
    plain = TENANT.replace("action_module: {type: gaussian}", module).replace("pick-cube", "plain")
    tenant.write_text(f"{adapted}---\n{plain}".replace("{type: ppo}", "{type: ppo, minibatch_size: 8}"))
    result = run("plan", tenant, "--service", service, "--json")
    assert result.exit_code == 0, result.stderr
    one, other = json.loads(result.stdout)["tenants"]
    assert one["adapter"]["parameters"] == 16 * 8 * ((960 + 960) + (960 + 320))
    assert (one["adapter"]["reuses_prefixes"], other["adapter"]) == (False, None)
    assert one["slot_bytes"] > other["slot_bytes"]
    table = " ".join(run("plan", tenant, "--service", service).stdout.split())
    assert "adapter" in table
    tenant.write_text(plain)
    assert "adapter" not in run("plan", tenant, "--service", service).stdout
