"""`deploy/`: the image, compose and systemd. Each is checked by its own tool, where it is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from qbe.cli.main import app
from qbe.server.settings import Limits
from qbe.server.settings_file import load

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
SYSTEMD = DEPLOY / "systemd"
LIMIT_S = 60
AFTER_DRAIN_S = 40  # for the server's last words and its engine's end


def tool(*names: str) -> str:
    """One of these programs, of this environment or of the machine."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    if found is None:
        pytest.skip(f"needs {names[0]}")
    return found


def output(*command: str | Path, **more: Any) -> str:
    """What a program says; it must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_serve(args: list[str]) -> dict[str, Any]:
    """The options of `qbe serve` that these arguments are. Raises a usage error for what it does not take."""
    assert args[0] == "serve"
    command: Any = typer.main.get_group(app).commands["serve"]  # type: ignore[attr-defined]
    params: dict[str, Any] = command.make_context("serve", args[1:]).params
    return params


def instructions(name: str) -> list[str]:
    """What stands behind an instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)


def test_the_dockerfile_passes_hadolint() -> None:
    output(tool("hadolint"), DOCKERFILE)


def test_the_image_copies_what_there_is_and_nothing_else_reaches_the_builder() -> None:
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    assert copied
    allowed = re.findall(r"^!(.*)$", (DEPLOY / "docker/Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert copied == set(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_runs_as_nobody_special_and_serves() -> None:
    users = instructions("USER")
    assert users == ["10001:10001"] * 2
    assert [line.split(" AS ")[1] for line in instructions("FROM")][-2:] == ["cpu", "cuda"]
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["qbe"]
    options = check_serve(json.loads(instructions("CMD")[0]))
    assert (options["host"], options["port"], options["metrics_port"]) == ("0.0.0.0", 8000, 8001)
    assert ":8000/ready" in instructions("HEALTHCHECK")[0]
    assert instructions("EXPOSE") == ["8000 8001"]


def test_the_image_asks_for_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (script,) = re.findall(r'python -c "(.*?)" > requirements', DOCKERFILE.read_text(), re.DOTALL)
    found = output(sys.executable, "-c", script.replace("\\\n", ""), cwd=ROOT).splitlines()
    assert {"torch>=2.11", *extras["serve"], *extras["traces"], *extras["energy"]} <= set(found)


def compose(*files: str, **environment: str) -> dict[str, Any]:
    """The whole of compose files, as compose reads them."""
    program = [tool("docker-compose", "docker")]
    if program[0].endswith("/docker"):
        program.append("compose")
        if subprocess.run([*program, "version"], capture_output=True, timeout=LIMIT_S).returncode:
            pytest.skip("needs docker compose")
    given = [part for name in files for part in ("-f", str(DEPLOY / "compose" / name))]
    found: dict[str, Any] = json.loads(
        output(*program, *given, "config", "--format", "json", env=os.environ | environment)
    )
    return found


def test_compose_reads_its_files_and_they_mount_what_there_is() -> None:
    found = compose("compose.yaml", GRAFANA_PASSWORD="x")["services"]
    assert set(found) == {"qbe", "prometheus", "grafana"}
    for name, service in found.items():
        for mount in service["volumes"]:
            assert mount["type"] == "volume" or Path(mount["source"]).exists(), (name, mount)
        assert all(port["host_ip"] == "127.0.0.1" for port in service["ports"]), name
    options = check_serve(found["qbe"]["command"])
    assert found["qbe"]["build"]["target"] == "cpu"
    assert (ROOT / found["qbe"]["build"]["context"] / found["qbe"]["build"]["dockerfile"]).samefile(DOCKERFILE)
    yaml: Any = pytest.importorskip("yaml")
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == [f"qbe:{options['metrics_port']}"]
    drain = tomllib.loads((DEPLOY / "compose/settings/serve.toml").read_text()).get("limits", {}).get("drain_s")
    assert found["qbe"]["stop_grace_period"] == f"1m{(drain or Limits().drain_s) + AFTER_DRAIN_S - 60}s"


def test_compose_gives_the_gpus_to_another_image() -> None:
    service = compose("compose.yaml", "compose.cuda.yaml", GRAFANA_PASSWORD="x")["services"]["qbe"]
    assert (service["image"], service["build"]["target"]) == ("qbe:cuda", "cuda")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_grafana_is_given_its_source_and_its_dashboard() -> None:
    yaml: Any = pytest.importorskip("yaml")
    folder = DEPLOY / "compose/grafana"
    (source,) = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = yaml.safe_load((folder / "dashboards.yaml").read_text())["providers"]
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    targets = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/qbe.json" in targets
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in targets


def test_the_settings_of_compose_are_settings() -> None:
    assert load(DEPLOY / "compose/settings/serve.toml").prices.output > 0


def unit() -> dict[str, list[str]]:
    """The unit's settings."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", (SYSTEMD / "qbe.service").read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_what_there_is_and_waits_for_the_drain() -> None:
    found = unit()
    variables = dict(pair.split("=", 1) for line in found["Environment"] for pair in line.split())
    command = re.sub(r"\$(QBE_\w+)", lambda m: variables[m[1]], found["ExecStart"][0])
    check_serve(shlex.split(command)[1:])
    assert int(found["TimeoutStopSec"][0]) == Limits().drain_s + AFTER_DRAIN_S


@pytest.mark.parametrize("drop_in", [None, "gpu.conf"])
def test_systemd_reads_the_unit_and_finds_it_closed(tmp_path: Path, drop_in: str | None) -> None:
    program = tool("systemd-analyze")
    text = (SYSTEMD / "qbe.service").read_text()
    path = tmp_path / "qbe.service"
    path.write_text(text.replace("/opt/qbe/bin/qbe", shutil.which("true") or "/bin/true"))
    if drop_in is not None:
        (tmp_path / "qbe.service.d").mkdir()
        shutil.copy(SYSTEMD / drop_in, tmp_path / "qbe.service.d")
    done = subprocess.run([program, "verify", "--man=no", path], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    if drop_in is None and "--offline" in output(program, "--help"):
        output(program, "security", "--offline=yes", "--threshold=20", path)  # tenths: 2.0 of 10, where 0 is closed
