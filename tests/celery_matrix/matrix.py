"""All cells of the matrix, each in a process of its own, some at a time; and what came out, as a page."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import celery
import kombu
from celery_matrix import nodes, running  # noqa: F401 - they register what they show
from celery_matrix.cell import AMQP, FEATURES, Outcome, opened, rabbitmqctl, run
from celery_matrix.page import CELLS, page
from kombu import Connection
from servers import LONGEST, ROOT
from valkey_server import valkey_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from celery_matrix.page import Place


def show(cell: Place, only: Iterable[str], folder: Path) -> dict[str, Outcome]:
    """What came out of the features that have one of ``only`` in their titles, in this process."""
    features = [each for each in FEATURES if any(part in each.title for part in only)]
    with valkey_server() as server, opened(*cell, folder, server) as made:
        return asyncio.run(run(made, features))


def shown(cell: Place, only: Iterable[str] = ("",)) -> dict[str, Outcome]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.celery_matrix", "--json", "--cell", *cell, "--only", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {title: Outcome(**outcome) for title, outcome in found.items()}


def versions() -> str:
    rabbit = rabbitmqctl("version").strip()
    with valkey_server() as server, Connection(server) as connection:
        valkey = connection.default_channel.client.info("server")
    name = "Valkey" if "valkey_version" in valkey else "Redis"
    number = valkey.get("valkey_version", valkey["redis_version"])
    return (
        f"Celery {celery.__version__}, kombu {kombu.__version__}, Python {sys.version.split()[0]}, {name} {number},"
        f" RabbitMQ {rabbit}"
    )


def everything(jobs: int, kept: Path | None) -> dict[Place, dict[str, Outcome]]:
    """What came out of all cells; those that ``kept`` has are not run again."""

    def outcomes(cell: Place) -> dict[str, Outcome]:
        file = kept / f"{'-'.join(cell)}.json" if kept else None
        if file and file.exists():
            return {title: Outcome(**each) for title, each in json.loads(file.read_text("utf-8")).items()}
        found = shown(cell)
        if file:
            file.write_text(json.dumps({title: asdict(each) for title, each in found.items()}), "utf-8")
        failed = [title for title, each in found.items() if each.verdict == "failed"]
        say(f"{' '.join(cell)}: {len(found)} features, failed: {failed or 'none'}")
        for title in failed:
            say(f"{title}: {found[title].text}")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(CELLS, pool.map(outcomes, CELLS), strict=True))


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.celery_matrix", description="Every way to run a task, on real workers: docs/celery.md."
    )
    parser.add_argument(
        "--cell", nargs=4, metavar=("POOL", "BROKER", "MODE", "STORE"), help="run one cell and say what came out"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="only features with one of these in their titles")
    parser.add_argument("--json", action="store_true", help="say it in JSON, on the last line")
    parser.add_argument("--keep", type=Path, help="a folder for a cell's logs, or for all cells' outcomes")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    options = parser.parse_args()
    if options.cell:
        with tempfile.TemporaryDirectory(prefix="tb_celery-matrix-") as folder:
            found = show(tuple(options.cell), options.only, options.keep or Path(folder))
        if options.json:
            sys.stdout.write(json.dumps({title: asdict(outcome) for title, outcome in found.items()}) + "\n")
        else:
            sys.stdout.writelines(f"{each.verdict}: {title}. {each.text}\n" for title, each in found.items())
        sys.exit(0 if options.json else any(each.verdict == "failed" for each in found.values()))
    try:
        about = versions()
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"celery_matrix: a RabbitMQ server must answer at {AMQP}, and rabbitmqctl work: {error}")
    cells = everything(options.jobs, options.keep)
    target = ROOT / "docs" / "celery.md"
    target.write_text(page(cells, about), "utf-8")
    sys.exit(any(each.verdict == "failed" for found in cells.values() for each in found.values()))
