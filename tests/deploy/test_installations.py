"""The files in deploy/ fit each other and the server: times, paths, ports, users, settings; and hold no secret."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from pagemill.cli.app import app
from pagemill.server.access.limits import ServerLimits

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UNIT = (DEPLOY / "systemd/pagemill.service").read_text()
CONTAINER = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
POD = yaml.safe_load((KUBERNETES / "deployment.yaml").read_text())["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
SETTINGS = [DEPLOY / "serve.yaml", KUBERNETES / "serve.yaml"]


def drain_timeout(file):
    return yaml.safe_load(file.read_text()).get("drain-timeout", ServerLimits().drain_timeout)


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: file.parent.name)
def test_the_server_takes_the_settings(file, tmp_path):
    tenants = tmp_path / "tenants.json"
    tenants.write_text((DEPLOY / "tenants.example.json").read_text())
    environment = {"PAGEMILL_SERVE_TENANTS": str(tenants)}
    asked = ["serve", "--config", str(file), "--show-config"]
    result = CliRunner().invoke(app, asked, env=environment)
    assert "64 hexadecimal digits" in str(result.exception), "an example's key must not be one"
    numbers = itertools.count()  # no two keys are the same
    tenants.write_text(re.sub("REPLACE[A-Z0-9-]+", lambda _: f"{next(numbers):064}", tenants.read_text()))
    result = CliRunner().invoke(app, asked, env=environment)
    assert result.exit_code == 0, result.exception
    assert f'log-format: "json"  # {file}' in result.output


def test_whoever_kills_waits_longer_than_answers_may_go_on():
    unit = re.search(r"TimeoutStopSec=(\d+)", UNIT)[1]
    compose = COMPOSE["services"]["pagemill"]["stop_grace_period"].removesuffix("s")
    assert min(int(unit), int(compose)) >= drain_timeout(DEPLOY / "serve.yaml") + 10
    before = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] >= before + drain_timeout(KUBERNETES / "serve.yaml") + 10


def test_probes_ask_for_what_the_server_answers(served):
    probes = {name: SERVER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert [probe["path"] for probe in probes.values()] == ["/ready", "/ready", "/live"]
    (monitored,) = yaml.safe_load((KUBERNETES / "servicemonitor.yaml").read_text())["spec"]["endpoints"]
    health = re.search(r"http://127\.0\.0\.1:8000(/\w+)", CONTAINER)[1]
    for path in {*(probe["path"] for probe in probes.values()), monitored["path"], health}:
        assert httpx.get(f"{served.url}{path}").status_code == 200, path
    assert 'CMD ["python3"' in CONTAINER, "the health check needs no other program"


def test_ports_agree():
    port = yaml.safe_load((KUBERNETES / "serve.yaml").read_text())["port"]
    (named,) = SERVER["ports"]
    service = yaml.safe_load((KUBERNETES / "service.yaml").read_text())["spec"]
    assert named == {"name": "http", "containerPort": port}
    assert [each["targetPort"] for each in service["ports"]] == [named["name"]]
    assert service["selector"].items() <= POD_LABELS.items()
    assert COMPOSE["services"]["pagemill"]["ports"] == [f"{port}:{port}"]
    (asked,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert asked["static_configs"] == [{"targets": [f"pagemill:{port}"]}]


POD_LABELS = yaml.safe_load((KUBERNETES / "deployment.yaml").read_text())["spec"]["template"]["metadata"]["labels"]


def test_every_file_that_is_named_exists():
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    files = [
        *kustomization["resources"],
        *(file for made in kustomization["configMapGenerator"] for file in made["files"]),
    ]
    assert all((KUBERNETES / file).is_file() for file in files)
    mounted = [volume for service in COMPOSE["services"].values() for volume in service["volumes"] if volume[0] == "."]
    for volume in mounted:
        assert (DEPLOY / volume.split(":")[0]).is_dir(), volume
    assert (DEPLOY / COMPOSE["configs"]["serve"]["file"]).is_file()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINER, re.MULTILINE) for name in line.split()
    ]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in kept, f"{name} does not come to the build"


def test_nobody_is_root_and_nothing_else_can_be_written():
    uid = int(re.findall(r"^USER (\d+):\d+$", CONTAINER, re.MULTILINE)[-1])
    assert POD["securityContext"]["runAsUser"] == uid > 0
    assert POD["securityContext"]["runAsNonRoot"]
    assert SERVER["securityContext"]["readOnlyRootFilesystem"]
    assert COMPOSE["services"]["pagemill"]["read_only"]
    home = re.search(r"PAGEMILL_HOME=(\S+)", CONTAINER)[1]
    assert home in {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert COMPOSE["services"]["pagemill"]["volumes"] == [f"models:{home}"]
    assert not POD["enableServiceLinks"], "PAGEMILL_SERVICE_HOST and its like are no settings"


def test_keys_stand_in_files_that_are_not_here():
    files = [file for file in DEPLOY.rglob("*") if file.is_file()]
    assert len(files) > 10
    for file in files:
        text = file.read_text()
        assert not re.search(r"\bsk-|API_KEY\s*[=:]|--(admin-)?api-key|PASSWORD\s*[=:]", text), file
    assert {"deploy/secrets/", "deploy/kubernetes/secrets/"} <= {*(ROOT / ".gitignore").read_text().split()}
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    generated = [file for made in kustomization["secretGenerator"] for file in made["files"]]
    mounted = [secret["file"].removeprefix("./") for secret in COMPOSE["secrets"].values()]
    assert all(file.startswith("secrets/") for file in [*generated, *mounted])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path):
    unit = tmp_path / "pagemill.service"
    unit.write_text(UNIT.replace("/opt/pagemill/bin/pagemill", "/bin/true"))
    for command in (["verify", "--man=no"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(["systemd-analyze", *command, unit], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Unknown" not in done.stderr, done.stderr
