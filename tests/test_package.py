"""What is released: the source distribution and the wheel, and the tests run on an installation of that wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from servers import ROOT

import tb_celery

if TYPE_CHECKING:
    from collections.abc import Iterable

RELEASE = f"tb_celery-{tb_celery.__version__}"
TESTED = ["hook", "public", "spreading", "stores"]
"""A part of the tests that is quick and reaches most modules."""
ONLY_WITH_EXTRAS = {"metrics", "page", "stores.redis", "stores.redis_server", "testing", "top"}
IMPORTS = """
import importlib, pkgutil
import tb_celery
for module in pkgutil.walk_packages(tb_celery.__path__, "tb_celery."):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except (ImportError, tb_celery.ConfigurationError) as error:
        print(module.name, error)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, the wheel made from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{RELEASE}-py3-none-any.whl"


class Installation:
    """A virtual environment with the wheel and what that says it needs, lent by the environment of the tests.

    Args:
        folder: where to make it.
        wheel: what to install.
        extras: the extras to install it with.
    """

    def __init__(self, folder: Path, wheel: Path, extras: Iterable[str] = ()) -> None:
        self.folder = folder
        venv.create(folder, symlinks=os.name != "nt")
        paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
        self.site, self.scripts = Path(paths["purelib"]), Path(paths["scripts"])
        self.python = self.scripts / "python"
        run(
            sys.executable,
            "-m",
            "pip",
            f"--python={self.python}",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            wheel,
        )
        with zipfile.ZipFile(wheel) as archive:
            metadata = message_from_bytes(archive.read(f"{RELEASE}.dist-info/METADATA"))
        self._needs = {"tb-celery": metadata.get_all("Requires-Dist", [])}
        self._seen = set[tuple[str, str]]()
        self._lend("tb-celery", ["", *extras])

    def _lend(self, name: str, extras: Iterable[str]) -> None:
        new = {extra for extra in extras if (name, extra) not in self._seen}
        self._seen |= {(name, extra) for extra in new}
        if new and name not in self._needs:
            found = distribution(name)
            self._needs[name] = found.requires or []
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (self.site / top).exists():  # several may share a folder
                    (self.site / top).symlink_to(str(found.locate_file(top)))
        for needed in map(Requirement, self._needs[name]):
            if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in new):
                self._lend(canonicalize_name(needed.name), ["", *needed.extras])


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """What it prints; a failure shows all that it said."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def package_files() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tb_celery").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = {f"{RELEASE}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert names == package_files() | about | {f"{RELEASE}.dist-info/licenses/LICENSE"}
    assert {"tb_celery/py.typed", "tb_celery/stores/redis.lua"} <= names


def test_the_source_distribution_has_what_tests_and_documentation_need(dist: Path) -> None:
    with tarfile.open(dist / f"{RELEASE}.tar.gz") as archive:
        names = {name.removeprefix(f"{RELEASE}/") for name in archive.getnames()}
    assert package_files() <= names
    assert {"LICENSE", "Makefile", "README.md", "CHANGELOG.md", "PKG-INFO", "pyproject.toml", "docs/conf.py"} <= names
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.*")} <= names
    assert not [name for name in names if re.search(r"(^|/)(\.git|\.venv|\.hypothesis|__pycache__)(/|$)", name)]


@pytest.mark.slow
def test_without_extras_it_needs_what_it_says(wheel: Path, tmp_path: Path) -> None:
    made = Installation(tmp_path / "made", wheel)
    missing = run(made.python, "-W", "error", "-c", IMPORTS, cwd=tmp_path).splitlines()
    assert {line.split()[0].removeprefix("tb_celery.") for line in missing} == ONLY_WITH_EXTRAS
    assert run(made.scripts / "tb-celery", "--version", cwd=tmp_path).split()[-1] == tb_celery.__version__
    quickstart = (ROOT / "examples" / "quickstart.py").read_text("utf-8")
    own = {"TMPDIR": str(tmp_path), "TB_CELERY_STATE_FILE": str(tmp_path / "buckets.state")}  # root's is elsewhere
    assert run(made.python, "-c", quickstart, cwd=tmp_path, **own).count(" post ") == 9


@pytest.mark.slow
def test_the_tests_pass_on_what_the_wheel_installs(wheel: Path, tmp_path: Path) -> None:
    made = Installation(tmp_path / "made", wheel, ["test"])
    checkout = tmp_path / "checkout"  # all but the package, so that nothing can come from its sources
    checkout.mkdir()
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    for name in ("docs", "examples", "tests"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = [f"tests/test_{name}.py" for name in TESTED]
    where = run(made.python, "-c", "import tb_celery; print(tb_celery.__file__)", cwd=checkout)
    assert Path(where.strip()).is_relative_to(made.site)
    path = os.pathsep.join([str(made.scripts), os.environ["PATH"]])
    run(made.python, "-m", "pytest", "-q", "-m", "not slow and not server", *files, cwd=checkout, PATH=path)


@pytest.mark.slow
def test_users_of_mypy_see_the_types_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    made = Installation(tmp_path / "made", wheel, ["test"])
    shutil.copy(ROOT / "tests" / "typed_use.py", tmp_path)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-celery.*]\nignore_missing_imports = True\n")
    command = ["-m", "mypy", f"--python-executable={made.python}", "typed_use.py"]
    assert "Success" in run(sys.executable, *command, cwd=tmp_path)
