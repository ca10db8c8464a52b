"""Run everything once, interleaved, and write down what came out: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from valkey_server import NoServerError, valkey_server

from benchmarks import ROOT, beside
from benchmarks.attempt import attempt
from benchmarks.beside import shuffled
from benchmarks.conditions import conditions
from benchmarks.contenders import CONTENDERS, Site, ours_by_key
from benchmarks.load import Cell, measure
from benchmarks.plots import draw
from benchmarks.report import MANY, ONE, PACED, SHOWN, TOLD, Measured, Shown, figures, render
from benchmarks.throughput import compare

PROGRAMS = {"demo": ["examples/demo.py"], **{each: ["-m", f"benchmarks.{each}"] for each in SHOWN}}
SHORT = {
    "celery_drain": ["--tasks", "400"],
    "redis_store": ["--repetitions", "5"],
    "redis_fleet": ["--seconds", "15"],
    "metrics": ["--rounds", "10"],
}
"""So that all of it takes forty minutes; alone, each takes its time."""
QUICK = {
    "celery_drain": [*PROGRAMS["celery_drain"], "--only", "backlog", "--tasks", "60", "--rounds", "1"],
    "memory": [*PROGRAMS["memory"], "--tasks", "60", "--quiet", "1", "--rounds", "1"],
}


def run(site: Site, sizes: beside.Sizes, *, quick: bool) -> Measured:
    counts = (1, 2) if quick else (1, 2, 8, 16)
    repeats, seconds, batch, rounds = (1, 0.02, 20, 1) if quick else (7, 0.2, 60, 25)

    def everyone(processes: int, seconds: float, think: float = 0) -> dict[str, Cell]:
        # In another order each time: what the machine does meanwhile hits all of them alike.
        cells = {
            name: measure(partial(CONTENDERS[name], site), processes, seconds, think) for name in shuffled(CONTENDERS)
        }
        if wrong := [name for name, cell in cells.items() if cell.allowed < 1]:
            message = f"refused, in a bucket that never runs out: {', '.join(wrong)}"
            raise RuntimeError(message)
        return cells

    def repetition() -> None:
        stores = {count: everyone(count, seconds) for count in counts}
        paced = everyone(PACED, 2 * seconds, think=0.001)
        keys = {keys: measure(partial(ours_by_key, site, keys), 1, seconds) for keys in shuffled((ONE, MANY))}
        measured.stores.append(stores)
        measured.paced.append(paced)
        measured.keys.append(keys)

    measured = Measured()
    for number in range(1, repeats + 1):
        progress(f"stores: repetition {number} of {repeats}")
        if failed := attempt(f"repetition {number}", repetition):
            measured.failed.append(failed)
    if not measured.stores:
        sys.exit(f"benchmarks: {measured.failed[-1]}")
    for pool in ("prefork", "solo"):
        progress(f"tasks: a worker with pool {pool}")
        tasks = attempt(f"tasks, {pool}", partial(compare, site, pool, batch, rounds))
        if isinstance(tasks, str):
            measured.failed.append(tasks)
        else:
            measured.tasks[pool] = tasks
    measured.beside = beside.run(site.server, sizes, progress)
    return measured


def shown(programs: dict[str, list[str]]) -> Shown:
    """What other programs show; one that fails says why, and the others go on."""
    said = Shown()
    # What is set here for an application of the user's own is not meant for ours.
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("CELERY_", "TB_CELERY_"))}
    for name, command in programs.items():
        progress(name)
        with tempfile.TemporaryDirectory(prefix="tb_celery-bench-") as folder:
            told = Path(folder) / "figures"
            options = ["--json", str(told)] if name in TOLD else []
            done = subprocess.run(
                [sys.executable, *command, *options], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
            )
            if told.exists():
                said.figures[name] = json.loads(told.read_text("utf-8"))
        said.text[name] = done.stdout.rstrip()
        if done.stderr.strip():
            progress(done.stderr.rstrip())
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            said.text[name] += f"\n\nended with {done.returncode}: {last}"
    if "demo" in said.text:
        said.text["demo"] = said.text["demo"].rpartition("\n\n")[2]
    return said


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def save(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="What a decision costs, and what it could cost.")
    parser.add_argument(
        "--quick", action="store_true", help="only see whether all of it runs: the figures mean nothing"
    )
    parser.add_argument(
        "--into", type=Path, help="write docs/performance.md, its pictures and benchmarks/results.json there"
    )
    options = parser.parse_args()
    into = options.into or (None if options.quick else ROOT)
    sizes = beside.QUICK if options.quick else beside.FULL
    started = time.monotonic()
    surroundings = conditions(Path(tempfile.gettempdir()), peers=True)
    with tempfile.TemporaryDirectory(prefix="tb_celery-bench-") as folder, valkey_server() as server:
        measured = run(Site(Path(folder), server), sizes, quick=options.quick)
    found = figures(
        measured,
        surroundings,
        shown(QUICK if options.quick else {name: [*PROGRAMS[name], *SHORT.get(name, [])] for name in PROGRAMS}),
    )
    pictures: dict[str, str] | str = {}
    if into:
        # First of all: what was measured must not be lost by what is made of it.
        save(into / "benchmarks/results.json", json.dumps(found, indent=1) + "\n")
        pictures = attempt("pictures", partial(draw, found, into / "docs"))
    if isinstance(pictures, str):
        found["failed"].append(pictures)
        pictures = {}
    page = render(found, pictures)
    print(page)
    if into:
        save(into / "docs/performance.md", page)
    progress(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NoServerError as error:
        sys.exit(f"benchmarks: {error}")
