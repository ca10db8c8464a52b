"""Run everything once, interleaved, and write down what came out: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from valkey_server import NoServerError, valkey_server

from benchmarks import ROOT
from benchmarks.conditions import conditions
from benchmarks.contenders import CONTENDERS, Site, ours_by_key
from benchmarks.load import Cell, measure
from benchmarks.report import MANY, ONE, PACED, SHOWN, Measured, figures, render
from benchmarks.throughput import compare

if TYPE_CHECKING:
    from collections.abc import Iterable

Name = TypeVar("Name")


def run(site: Site, *, quick: bool) -> Measured:
    counts = (1, 2) if quick else (1, 2, 8, 16)
    repeats, seconds, batch = (1, 0.02, 20) if quick else (9, 0.3, 250)

    def everyone(processes: int, seconds: float, think: float = 0) -> dict[str, Cell]:
        # In another order each time: what the machine does meanwhile hits all of them alike.
        return {
            name: measure(partial(CONTENDERS[name], site), processes, seconds, think) for name in shuffled(CONTENDERS)
        }

    measured = Measured()
    for number in range(1, repeats + 1):
        progress(f"stores: repetition {number} of {repeats}")
        measured.stores.append({count: everyone(count, seconds) for count in counts})
        measured.paced.append(everyone(PACED, 2 * seconds, think=0.001))
        measured.keys.append(
            {keys: measure(partial(ours_by_key, site, keys), 1, seconds) for keys in shuffled((ONE, MANY))}
        )
    for pool in ("prefork", "solo"):
        progress(f"tasks: a worker with pool {pool}")
        measured.tasks[pool] = compare(site, pool, batch, 2 * repeats)
    return measured


def shown() -> dict[str, str]:
    """What other programs show, by name: the demo its verdict, the smaller benchmarks all that they print."""
    said = {}
    for name, command in {
        "demo": ["examples/demo.py"],
        **{each: ["-m", f"benchmarks.{each}"] for each in SHOWN},
    }.items():
        progress(name)
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        failed = (
            f"\nended with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}" if done.returncode else ""
        )
        said[name] = done.stdout.rstrip() + failed
    return said | {"demo": said["demo"].rpartition("\n\n")[2]}


def shuffled(names: Iterable[Name]) -> list[Name]:
    names = list(names)
    return random.sample(names, len(names))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="What a decision costs, and what it could cost.")
    parser.add_argument(
        "--quick", action="store_true", help="only see whether all of it runs: the figures mean nothing"
    )
    parser.add_argument("--into", type=Path, help="write docs/performance.md and benchmarks/results.json there")
    options = parser.parse_args()
    into = options.into or (None if options.quick else ROOT)
    started = time.monotonic()
    surroundings = conditions(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="tb_celery-bench-") as folder, valkey_server() as server:
        measured = run(Site(Path(folder), server), quick=options.quick)
    found = figures(measured, surroundings, {} if options.quick else shown())
    page = render(found)
    print(page)
    if into:
        for name, text in (
            ("docs/performance.md", page),
            ("benchmarks/results.json", json.dumps(found, indent=1) + "\n"),
        ):
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    progress(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NoServerError as error:
        sys.exit(f"benchmarks: {error}")
