"""Workflows, and the files of examples/deploy: they are well formed, and what they name exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aioinfer.config import EngineConfig, ServerConfig
from tests.deploy.dockerfile import instructions
from tests.docs.pages import Fence, commands
from tests.docs.test_docs import CHECKS, parse_only  # noqa: F401  (a fixture)
from tests.tiers import PROGRAM, rest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = ROOT / ".github/workflows/release.yml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
UNIT = (DEPLOY / "aioinfer.service").read_text("utf-8")
VARIABLES = {
    "AIOINFER_CACHE",
    *(
        f"AIOINFER_{name.upper()}"
        for cls in (EngineConfig, ServerConfig)
        for name in cls.__dataclass_fields__
    ),
}


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text("utf-8"))["jobs"]
    return found


def scripts(workflow: Path) -> Iterator[str]:
    """Texts of the steps that run something."""
    for job in jobs(workflow).values():
        yield from (step["run"] for step in job.get("steps", []) if "run" in step)


# -- workflows -----------------------------------------------------------------------------------------


@rest(PROGRAM)
def test_workflows_and_compose_file_have_the_form_of_their_schemas() -> None:
    for schema, files in (("github-workflows", WORKFLOWS), ("compose-spec", [DEPLOY / "compose.yaml"])):
        done = subprocess.run(
            [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_exists(
    workflow: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    text = workflow.read_text("utf-8")
    for name in re.findall(r"(?<![\w/])(?:\.ci|\.github|examples|tests)/[\w./-]+", text):
        assert (ROOT / name).exists(), name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for names in re.findall(r"(?:\.|aioinfer)\[([\w,]+)\]", text):
        assert {*names.split(",")} <= extras.keys()
    for script in scripts(workflow):
        for program, *arguments in commands(Fence(workflow.name, 0, "sh", script)):
            if program in ("aioinfer", "bash", "pytest", "python"):
                CHECKS[program](arguments, monkeypatch, pytestconfig)
            elif program.startswith(".ci/"):
                own = (ROOT / program).read_text("utf-8")
                assert all(f'"{word}"' in own for word in arguments if word.startswith("--")), arguments


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_little_and_uses_releases_of_actions(workflow: Path) -> None:
    whole = yaml.safe_load(workflow.read_text("utf-8"))
    assert whole["permissions"] == {"contents": "read"}
    for name, job in jobs(workflow).items():
        for step in job.get("steps", []):
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), (name, step["uses"])


def test_the_release_is_published_after_everything_else_has_passed() -> None:
    release = jobs(RELEASE)

    def behind(name: str) -> set[str]:
        needs = release[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else {*needs}
        return direct.union(*map(behind, direct))

    assert behind("publish") == {"ci", "build", "use", "image"}
    assert any("docker run" in step.get("run", "") for step in release["image"]["steps"])
    assert "publish" in behind("push")
    assert release["publish"]["environment"] == "release"
    assert release["publish"]["permissions"] == {"id-token": "write"}
    versions = release["use"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f">={versions[0]}" == project["requires-python"]


@rest(PROGRAM)
@pytest.mark.parametrize(("tag", "names"), [("v0.2.0", ["0.2.0", "latest"]), ("v0.2.0rc1", ["0.2.0rc1"])])
def test_a_candidate_is_not_the_latest_image(tag: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    (script,) = (step["run"] for step in jobs(RELEASE)["push"]["steps"] if "run" in step)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REF_NAME": tag, "IMAGE": "i", "DIGEST": "d"}
    done = subprocess.run(["bash", "-e", "-c", script], env=env, check=True, capture_output=True, text=True)
    tags = "".join(f"--tag i:{name} " for name in names)
    assert done.stdout == f"buildx imagetools create {tags}i@d\n"


# -- containers ----------------------------------------------------------------------------------------


def test_the_image_is_made_of_what_there_is() -> None:
    steps = [*instructions(DOCKERFILE)]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (names,) = {match for keyword, rest in steps for match in re.findall(r"PACKAGE=/source\[(.*)\]", rest)}
    assert {*names.split(",")} <= extras.keys()
    found = set(re.findall(r"AIOINFER_\w+", DOCKERFILE))
    assert found <= VARIABLES
    taken = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert all((ROOT / name).exists() for name in taken if name != "dist")
    # What the default command asks for is read from variables.
    assert dict(steps)["ENTRYPOINT"] == '["aioinfer"]'
    assert json.loads(dict(steps)["CMD"]) == ["serve"]


def test_the_compose_file_mounts_what_there_is() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    build = services["aioinfer"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert services["aioinfer"]["environment"].keys() <= VARIABLES
    steps = dict(instructions(DOCKERFILE))
    assert services["aioinfer"]["volumes"] == [f"models:{steps['VOLUME']}"]
    assert all(
        port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", [])
    )


def test_prometheus_asks_the_server_with_its_key_and_grafana_asks_prometheus() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    service, port = job["static_configs"][0]["targets"][0].split(":")
    assert (service in COMPOSE["services"], port) == (True, dict(instructions(DOCKERFILE))["EXPOSE"])
    (secret,) = COMPOSE["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret] == {"environment": "AIOINFER_API_KEY"}
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    boards = f"../grafana:{provider['options']['path']}:ro"
    assert boards in COMPOSE["services"]["grafana"]["volumes"]


@rest(PROGRAM)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_the_configuration_of_prometheus(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    text = (DEPLOY / "prometheus.yml").read_text("utf-8").replace("/run/secrets/api_key", str(key))
    (tmp_path / "prometheus.yml").write_text(text)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- systemd -------------------------------------------------------------------------------------------


def test_whoever_stops_the_server_waits_longer_than_it_drains() -> None:
    drain = ServerConfig().drain_timeout
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop) > drain
    assert int(COMPOSE["services"]["aioinfer"]["stop_grace_period"].removesuffix("s")) > drain
    workflow = RELEASE.read_text("utf-8")
    (timeout,) = re.findall(r"--stop-timeout (\d+)", workflow)
    assert int(timeout) > drain


@rest(PROGRAM)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit_and_finds_it_confined(tmp_path: Path) -> None:
    assert {*re.findall(r"AIOINFER_\w+(?==%C)", UNIT)} <= VARIABLES
    unit = tmp_path / "aioinfer.service"
    unit.write_text(UNIT.replace("/opt/aioinfer/bin/aioinfer", "/bin/true"))

    def analyze(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["systemd-analyze", *command, str(unit)], capture_output=True, text=True)

    # It reads this machine's units, too, whatever is wrong with those.
    said = analyze("verify", "--man=no").stderr
    assert not [line for line in said.splitlines() if unit.name in line]
    done = analyze("security", "--offline=yes", "--threshold=20")
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze judges no unit that is not loaded: it has no --offline")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
