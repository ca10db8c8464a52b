"""The peers, in turn, in the same scenes: what a decision costs each, how evenly it shares, and whether it is right."""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import redis

from benchmarks.attempt import reason
from benchmarks.contenders import Site
from benchmarks.load import Answers, Cell, answers, jain, measure, rounded, typical
from benchmarks.peers import BUCKETS, PEERS, Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Name = TypeVar("Name")
PLENTY = Quota(2_000_000, 1800)
"""Never runs out, and is never full under load."""
SPENT = Quota(1, 1800)
"""Refuses all but the first."""
TENANTS = Quota(30, 1800)
"""For each of many keys: not full again, so that no record is given to another, before all have been measured."""
SCARCE = Quota(100, 1)
"""What processes compete for, to see who keeps to it."""
COMPETITORS, THINK = 8, 0.001
ONE_QUOTA = "one of its limiters has one quota, whatever the key"
KEPT = f"{COMPETITORS} processes compete"


class Scene(NamedTuple):
    title: str
    processes: int = 1
    quota: Quota = PLENTY
    keys: int = 1
    together: bool = False
    new: bool = False
    """Whether each question is for a key never seen."""


class Unmeasurable(Exception):  # noqa: N818 - a reason, not a fault
    """There is nothing to measure."""


class Sizes(NamedTuple):
    """How much is measured."""

    repetitions: int
    seconds: float
    processes: tuple[int, ...]
    keys: tuple[int, ...]
    """Many, which all can be filled with, and very many, which only those can that take them in one go, and we."""
    competition: float
    """Seconds."""


FULL = Sizes(3, 0.2, (1, 2, 8, 16), (10_000, 1_000_000), 2.0)
QUICK = Sizes(1, 0.02, (1, 2), (20, 100), 0.1)


def scenes(sizes: Sizes) -> list[Scene]:
    several = sorted({1, min(8, max(sizes.processes))})
    return [
        *(Scene(f"granted, {_many(count, 'process')}", count) for count in sizes.processes),
        *(Scene(f"all refused, {_many(count, 'process')}", count, SPENT) for count in several),
        *(Scene(f"8 buckets at once, {_many(count, 'process')}", count, together=True) for count in several),
        Scene("a new key each time, 1 process", new=True),
        *(Scene(f"{keys:,} keys, 1 process", 1, TENANTS, keys) for keys in sizes.keys),
    ]


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'es' * (count > 1)}"


def run(server: str, sizes: Sizes, progress: Callable[[str], None]) -> dict[str, Any]:
    """Everybody in every scene, in another order in each repetition; whoever fails has a reason in place of figures."""
    with tempfile.TemporaryDirectory(prefix="tb_celery-peers-") as folder:
        comparison = Comparison(Site(Path(folder), server), sizes)
        for number in range(1, sizes.repetitions + 1):
            progress(f"peers: repetition {number} of {sizes.repetitions}")
            for scene in scenes(sizes):
                if scene.keys == 1:
                    comparison.play(scene)
        progress("peers: who keeps to the quota")
        comparison.compete()
        for scene in scenes(sizes):
            if scene.keys > 1:
                progress(f"peers: {scene.title}")
                comparison.play_with_keys(scene)
    return comparison.found()


@dataclass
class Comparison:
    """What has been found so far; in ``above``, each has a site of its own."""

    above: Site
    sizes: Sizes
    cells: dict[str, dict[str, list[Cell]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By scene and peer."""
    kept: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    def play(self, scene: Scene) -> None:
        def one(name: str) -> None:
            if scene.new and not PEERS[name].keys:
                raise Unmeasurable(ONE_QUOTA)
            self.measure(scene, name, self.site(), self.sizes.seconds)

        for name in shuffled(PEERS):
            self.attempt(scene.title, name, partial(one, name))

    def compete(self) -> None:
        def one(name: str) -> None:
            site = self.site()
            found = answers(lambda: _asker(site, name, Scene(KEPT, quota=SCARCE)), COMPETITORS, seconds, THINK)
            self.kept[name].append(kept(found, SCARCE, seconds))

        seconds = self.sizes.competition
        for _ in range(self.sizes.repetitions):
            for name in shuffled(PEERS):
                self.attempt(KEPT, name, partial(one, name))

    def play_with_keys(self, scene: Scene) -> None:
        """Fill everybody with the keys, and then measure them in turn."""

        def fill(name: str) -> None:
            peer = PEERS[name]
            if not peer.keys:
                raise Unmeasurable(ONE_QUOTA)
            if peer.slow or (peer.server and scene.keys == max(self.sizes.keys)):
                message = f"so many keys take minutes to make {'over a connection' if peer.server else 'one by one'}"
                raise Unmeasurable(message)
            site = self.site(1 + len(sites))
            _in_a_process(partial(_fill, site, name, scene))
            sites[name] = site

        sites: dict[str, Site] = {}
        for name in shuffled(PEERS):
            self.attempt(scene.title, name, partial(fill, name))
        for _ in range(self.sizes.repetitions):
            for name in shuffled(sites):
                do = partial(self.measure, scene, name, sites[name], self.sizes.seconds / 2)
                self.attempt(scene.title, name, do)

    def attempt(self, title: str, name: str, do: Callable[[], None]) -> None:
        if name in self.reasons[title]:
            return
        why = PEERS[name].missing()
        if not why:
            try:
                do()
            except Unmeasurable as nothing:
                why = str(nothing)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one must not end the others
                why = reason(error)
        if why:
            self.reasons[title][name] = why

    def measure(self, scene: Scene, name: str, site: Site, seconds: float) -> None:
        cell = measure(partial(_asker, site, name, scene), scene.processes, seconds)
        self.cells[scene.title][name].append(cell)

    def site(self, number: int = 0) -> Site:
        """An empty folder, and this database of the server, emptied."""
        url = f"{self.above.server.rpartition('/')[0]}/{number}"
        with redis.Redis.from_url(url) as server:
            server.flushdb()
        return Site(Path(tempfile.mkdtemp(dir=self.above.folder)), url)

    def found(self) -> dict[str, Any]:
        return {
            "scenes": {
                scene.title: {
                    "processes": scene.processes,
                    "peers": {name: typical(cells[name]) for name in PEERS if name in cells},
                    "raw": {
                        name: [list(map(rounded, cell)) for cell in cells[name]] for name in PEERS if name in cells
                    },
                }
                for scene in scenes(self.sizes)
                for cells in [self.cells[scene.title]]
            },
            "raw is": Cell._fields,
            "kept": {name: usual(self.kept[name]) for name in PEERS if name in self.kept},
            "kept raw": {name: self.kept[name] for name in PEERS if name in self.kept},
            "reasons": {title: reasons for title, reasons in self.reasons.items() if reasons},
        }


def _fill(site: Site, name: str, scene: Scene) -> None:
    opened = PEERS[name].open(site, scene.quota)
    keys = list(_names(scene.keys))
    if opened.fill:
        opened.fill(keys)
    else:
        for key in keys:
            opened.ask(key)


def _in_a_process(do: Callable[[], None]) -> None:
    """None of its connections and descriptors stay with us."""
    child = multiprocessing.get_context("fork").Process(target=do)
    child.start()
    child.join()
    if child.exitcode:
        message = f"its keys could not be made: exit code {child.exitcode}"
        raise RuntimeError(message)


def _names(count: int) -> Iterator[str]:
    return (f"tenant-{number}" for number in range(count))


def _asker(site: Site, name: str, scene: Scene) -> Callable[[], bool]:
    ask, together, _ = PEERS[name].open(site, scene.quota)
    if scene.together:
        if together:
            return partial(together, BUCKETS)
        return lambda: all(ask(bucket) for bucket in BUCKETS)
    if scene.new:
        names = _names(sys.maxsize)
        return lambda: ask(next(names))
    if scene.keys == 1:
        return partial(ask, "key")
    dice = random.Random()
    return lambda: ask(f"tenant-{int(dice.random() * scene.keys)}")


def kept(found: Sequence[Answers], quota: Quota, seconds: float) -> dict[str, float]:
    """How a quota was used, and whether it was kept to.

    "over" is by how many more than amount + rate * w were granted in the worst window of w seconds. A grant counts for
    a window only if its question began and ended in it: what is over is so however long the answers took.
    """
    grants = [(began, ended) for own in found for began, ended, allowed in zip(*own, strict=True) if allowed]
    # Each has asked once beforehand, and was granted that if the first.
    used = len(grants) / (quota.amount + quota.rate * seconds)
    return {
        "granted": len(grants),
        "used": round(used, 4),
        "over": rounded(excess(sorted(grants)[:MOST], quota)),
        "fairness": rounded(jain(sum(own.allowed) for own in found)),
    }


def usual(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The medians of several runs, but the most that was granted over the quota."""
    return {name: (max if name == "over" else median)(run[name] for run in runs) for name in runs[0]}


MOST = 2000
"""Grants that are looked at: whoever grants more is far over by then."""


def excess(grants: Sequence[tuple[int, int]], quota: Quota) -> float:
    """Of grants by when they were asked for, the most that any window holds beyond its bound; 0 if none does."""
    worst = 0.0
    for number, (since, _) in enumerate(grants):
        for count, until in enumerate(sorted(ended for _, ended in grants[number:]), 1):
            worst = max(worst, count - quota.amount - quota.rate * (until - since) / 1e9)
    return worst


def shuffled(names: Iterable[Name]) -> list[Name]:
    names = list(names)
    return random.sample(names, len(names))
