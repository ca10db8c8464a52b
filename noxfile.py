"""The versions that are supported, one after another: `make versions`. A Python that is not here is skipped."""

import nox

nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"  # uv would
PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))
"""As the classifiers have them."""
SIDE_BY_SIDE = ["-q", "-n", "auto", "--dist", "worksteal"]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, with the newest releases of everything."""
    session.install("--editable", ".[dev]")
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """All tests of the package, with the oldest releases that pyproject.toml allows."""
    session.install("--resolution", "lowest-direct", "--editable", ".[metrics,redis,tui]")
    session.install("--editable", ".[test]")  # leaves alone what is there
    session.run("uv", "pip", "list", external=True)
    # The pages and the look at the wheel need what only the extra `dev` brings.
    without = ["--ignore=tests/test_docs.py", "--ignore=tests/test_package.py"]
    session.run("pytest", *SIDE_BY_SIDE, *without, *session.posargs)
