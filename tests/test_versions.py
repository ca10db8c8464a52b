"""The versions that are supported are told in several places, and are the same in all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from servers import ROOT

import tb_celery

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PYTHONS = [
    found[1]
    for classifier in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
README, CONTRIBUTING, CHANGELOG = (
    (ROOT / f"{name}.md").read_text("utf-8") for name in ("README", "CONTRIBUTING", "CHANGELOG")
)


def test_every_place_tells_the_same_pythons() -> None:
    oldest, newest = PYTHONS[0], PYTHONS[-1]
    assert [f"3.{minor}" for minor in range(int(oldest[2:]), int(newest[2:]) + 1)] == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"Python {oldest} to {newest}" in README
    assert f"| Python | {oldest} to {newest} |" in CONTRIBUTING
    jobs = WORKFLOW["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert jobs["portable"]["strategy"]["matrix"]["python"] == [oldest, newest]


def test_every_place_tells_the_same_celery() -> None:
    (celery,) = [needed for needed in PROJECT["project"]["dependencies"] if needed.startswith("celery")]
    found = re.fullmatch(r"celery>=([\d.]+),<6", celery)
    assert found
    assert f"Celery {found[1]} or newer" in README
    assert f"| Celery and kombu | {found[1]}, below 6:" in CONTRIBUTING


def test_the_version_is_in_the_changelog() -> None:
    headings = re.findall(r"^## \[(.*?)\]", CHANGELOG, re.MULTILINE)
    assert {"Unreleased", tb_celery.__version__} & set(headings)


def test_ci_runs_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    as_root = 'sudo env "PATH=$PATH" '
    made = [command.removeprefix(as_root).split() for command in commands if " install " not in command]
    assert {words[0] for words in made} == {"make"}
    assert {words[1] for words in made} <= targets


def test_portable_tests_exist() -> None:
    (listed,) = re.findall(r"^PORTABLE := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert [name for name in listed.split() if not (ROOT / "tests" / f"test_{name}.py").exists()] == []


@pytest.mark.parametrize(("system", "interpreter"), [("", "bin/python"), ("Windows_NT", "Scripts/python.exe")])
def test_make_takes_the_environment_that_is_there(tmp_path: Path, system: str, interpreter: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    (tmp_path / interpreter).parent.mkdir()
    for name in (interpreter, ".ready"):
        (tmp_path / name).touch()
    command = ["make", "--dry-run", "portable", f"VENV={tmp_path}", f"OS={system}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "pytest" in shown
    assert "-m venv" not in shown


def test_nox_has_a_session_for_every_python() -> None:
    pytest.importorskip("nox")
    command = [sys.executable, "-m", "nox", "--list", "--noxfile", str(ROOT / "noxfile.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    sessions = re.findall(r"^\* (\S+)", listed, re.MULTILINE)
    assert sessions == [*(f"tests-{python}" for python in PYTHONS), "oldest"]


def test_nox_skips_a_python_that_is_not_here(tmp_path: Path) -> None:
    pytest.importorskip("nox")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    assert uv
    (tmp_path / "uv").symlink_to(uv)
    # Were one fetched, it would be looked for in a folder that is not there.
    alone = {"PATH": str(tmp_path), "HOME": str(tmp_path), "UV_PYTHON_INSTALL_MIRROR": tmp_path.as_uri() + "/none"}
    missing = next(python for python in PYTHONS if python != f"3.{sys.version_info[1]}")  # not the one that runs this
    command = [sys.executable, "-m", "nox", "--session", f"tests-{missing}", "--noxfile", str(ROOT / "noxfile.py")]
    command += ["--envdir", str(tmp_path), "--no-error-on-missing-interpreters"]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert f"Python interpreter {missing} not found" in said
    assert "install" not in said


def test_git_hooks_are_well_formed() -> None:
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    subprocess.run(command, check=True)
