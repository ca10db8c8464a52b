"""The files in deploy/ and docker-compose.yml: each is what its program takes, and they agree with each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from celery.app.defaults import DEFAULTS
from deployment import COMMAND, COMPOSE, DOCKERFILE, HEALTH_CHECK, STATE_FILE
from servers import PATIENCE, ROOT

from tb_celery.cli import cli
from tb_celery.settings import PREFIX, Settings, load_settings

DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text("utf-8")
WORKER = COMPOSE["services"]["worker"]
SYSTEMD = DEPLOY / "systemd"
UNIT = "tb-celery@.service"
PODS = {path.name: list(yaml.safe_load_all(path.read_text("utf-8"))) for path in (DEPLOY / "kubernetes").glob("*.yaml")}
EXPOSED = 15
"""Most that systemd-analyze may find the unit exposed, of 100."""
FOREIGN = {"consumer_timeout", "visibility_timeout", "stop_grace_period"}
"""What the checklist names that is neither Celery's setting nor ours."""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=PATIENCE
    )


def assert_settings(variables: list[str]) -> None:
    """Ours among them exist; the others are those that Celery reads."""
    ours = {PREFIX + name.upper() for name in Settings.model_fields}
    assert set(variables) <= {"CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", *ours}


def assert_checks_health(command: list[str], app: str) -> None:
    program, subcommand, option, name = command
    assert Path(program).name == "tb-celery"
    assert (subcommand in cli.commands, option, name) == (True, "--app", app)


# -- README


def test_every_file_is_named() -> None:
    files = [path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*") if path.is_file()]
    assert [name for name in files if name != "README.md" and f"`{name}`" not in README] == []
    shown = re.findall(r"^cp (\S+)", README, re.MULTILINE)
    assert [name for name in shown if name not in files] == []


def test_every_setting_in_the_checklist_exists() -> None:
    _, checklist = README.split("## Checklist")
    names = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", checklist))
    assert names > FOREIGN
    assert names - FOREIGN <= {*DEFAULTS, *Settings.model_fields}
    assert set(re.findall(r"`tb-celery (\w+)", README)) <= set(cli.commands)


# -- containers


def test_the_image_has_what_is_built_and_what_runs() -> None:
    first, second = DOCKERFILE.split("FROM")[1:]
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    let_through = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert sorted(copied) == sorted(let_through)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    built_from = [project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"]
    built_from += project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(built_from) <= set(copied)
    assert "pip" in first
    assert "pip" not in second
    assert f"examples/{COMMAND[COMMAND.index('-A') + 1]}.py" in copied


def test_the_workers_are_nobody_and_own_the_state() -> None:
    (user,) = re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE)
    assert user != "0"
    assert f"--uid {user} " in DOCKERFILE
    assert re.search(rf"install .*--owner worker .*--mode 770 {STATE_FILE.parent}$", DOCKERFILE, re.MULTILINE)


def test_the_services_share_the_state_and_write_nowhere_else() -> None:
    assert WORKER["volumes"] == [f"state:{STATE_FILE.parent}"]
    assert COMPOSE["volumes"].keys() == {"state", "broker"}
    assert (WORKER["read_only"], WORKER["tmpfs"], WORKER["cap_drop"]) == (True, ["/tmp"], ["ALL"])  # noqa: S108
    assert WORKER["scale"] > 1
    assert (ROOT / WORKER["build"]["dockerfile"]).exists()
    assert sorted(WORKER["build"]["args"]) == sorted(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert_settings(list(WORKER["environment"]))


def test_the_health_check_asks_for_the_app_that_runs() -> None:
    assert_checks_health(HEALTH_CHECK, COMMAND[COMMAND.index("-A") + 1])


def test_compose_takes_the_file() -> None:
    if shutil.which("docker") is None or run("docker", "compose", "version").returncode:
        pytest.skip("docker has no compose")
    done = run("docker", "compose", "--file", ROOT / "docker-compose.yml", "config", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")


# -- systemd


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the programs of this environment, for they have to exist."""
    text = (SYSTEMD / UNIT).read_text("utf-8")
    place = tmp_path / UNIT
    place.write_text(text.replace("/opt/proj/.venv/bin", str(Path(sys.executable).parent)), "utf-8")
    return place


def directives(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", (SYSTEMD / UNIT).read_text("utf-8"), re.MULTILINE)


def test_systemd_takes_the_unit(unit: Path) -> None:
    done = run("systemd-analyze", "verify", unit.with_name("tb-celery@1.service"))
    assert (done.returncode, done.stdout) == (0, "")


def test_the_unit_has_few_rights(unit: Path) -> None:
    done = run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSED}", unit)
    assert done.returncode == 0, done.stdout


def test_systemd_takes_the_user() -> None:
    done = run("systemd-sysusers", "--dry-run", SYSTEMD / "tb-celery.sysusers")
    assert done.returncode == 0, done.stdout
    assert directives("User") == directives("Group") == ["tb-celery"]


def test_all_instances_have_one_state_and_stop_warmly() -> None:
    (directory,) = directives("StateDirectory")
    assert directives("Environment") == [f"TB_CELERY_STATE_FILE=%S/{directory}/{STATE_FILE.name}"]
    assert Path("/var/lib", directory) == STATE_FILE.parent
    assert directives("KillMode") == ["mixed"]
    (start,) = map(shlex.split, directives("ExecStart"))
    (check,) = map(shlex.split, directives("ExecStartPre"))
    assert "%i@%H" in start
    assert_checks_health(check, start[start.index("--app") + 1])
    variables = (SYSTEMD / "tb-celery.env").read_text("utf-8")
    assert_settings(re.findall(r"^(\w+)=", variables, re.MULTILINE))
    assert directives("EnvironmentFile") == ["/etc/tb-celery.env"]


# -- Kubernetes


def workers(name: str) -> dict[str, Any]:
    """What the pods of an example's workers are."""
    (deployment,) = PODS[name]
    template: dict[str, Any] = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    pod: dict[str, Any] = template["spec"]
    return pod


@pytest.mark.parametrize("name", PODS)
def test_kubernetes_takes_the_file(name: str) -> None:
    for resource in PODS[name]:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["one-node.yaml", "many-nodes.yaml"])
def test_the_pods_are_nobody_and_are_asked_for_their_health(name: str) -> None:
    pod = workers(name)
    (worker,) = pod["containers"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 1000)
    assert worker["securityContext"]["readOnlyRootFilesystem"]
    for probe in ("startupProbe", "readinessProbe"):
        assert worker[probe]["exec"]["command"] == HEALTH_CHECK
    assert "livenessProbe" not in worker
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert_settings([variable["name"] for variable in worker["env"]])
    (service, _) = PODS["redis.yaml"]
    addresses = [variable["value"] for variable in worker["env"] if "://" in variable["value"]]
    assert all(address.startswith(f"redis://{service['metadata']['name']}:6379/") for address in addresses)
    assert len(set(addresses)) == len(addresses)


def test_pods_of_one_node_share_a_folder_of_it() -> None:
    pod = workers("one-node.yaml")
    (worker,), (first,) = pod["containers"], pod["initContainers"]
    (state,) = [volume for volume in pod["volumes"] if "hostPath" in volume]
    assert pod["nodeSelector"]
    for container in (worker, first):
        assert {"name": state["name"], "mountPath": str(STATE_FILE.parent)} in container["volumeMounts"]
    assert {"name": "TB_CELERY_STATE_FILE", "value": str(STATE_FILE)} in worker["env"]


def test_pods_of_many_nodes_share_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = workers("many-nodes.yaml")
    (worker,) = pod["containers"]
    for variable in worker["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert load_settings().store.startswith("redis://")
    assert "nodeSelector" not in pod
    assert [volume for volume in pod["volumes"] if "emptyDir" not in volume] == []
