from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import pytest
from faults.crew import Crew, judged
from faults.writer import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from tb_celery import Bucket
    from tb_celery.grantlog import Entry


if sys.platform == "win32":
    collect_ignore_glob = ["test_*.py"]  # it has no signals, mounts, users or strace to have these faults by


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "buckets.state"


class StartCrew(Protocol):
    def __call__(
        self, *prefix: str | Path, at: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> Crew: ...


@pytest.fixture
def crews() -> list[Crew]:
    """Those that the test has started."""
    return []


@pytest.fixture
def start_crew(crews: list[Crew], tmp_path: Path, state: Path) -> Iterator[StartCrew]:
    """Starts crews, at a state file of the test's unless it is ``at`` another; they end with the test."""
    if sys.platform != "linux":
        pytest.skip("how the processes are is read from Linux's /proc")

    def start(*prefix: str | Path, at: Path | None = None, environment: Mapping[str, str] | None = None) -> Crew:
        crews.append(Crew(tmp_path / f"crew{len(crews)}", at or state, prefix, environment or {}))
        return crews[-1]

    yield start
    for each in crews:
        each.stop()
    assert "Traceback" not in "".join(each.stderr() for each in crews), "no writer has ended by itself"


@pytest.fixture
def crew(start_crew: StartCrew) -> Crew:
    return start_crew()


class Measured(Protocol):
    def __call__(
        self,
        entries: Iterable[Entry],
        buckets: Mapping[str, Bucket] = BUCKETS,
        *,
        tried: int,
        survived: int,
        lost: int = 0,
    ) -> None: ...


@pytest.fixture
def measured(crews: list[Crew], record_property: Callable[[str, object], None]) -> Measured:
    """Judges the grants, and records what a row of the page tells; all has to have been survived. Ends the crews."""

    def record(
        entries: Iterable[Entry],
        buckets: Mapping[str, Bucket] = BUCKETS,
        *,
        tried: int,
        survived: int,
        lost: int = 0,
    ) -> None:
        for crew in crews:
            crew.stop()  # or who judges hardly gets to run
        grants, over = judged(entries, buckets)
        found = {"tried": tried, "survived": survived, "over": f"{float(over):.9g}", "lost": lost, "grants": grants}
        for each in found.items():
            record_property(*each)
        assert (survived, lost) == (tried, 0)
        assert grants >= survived, "the grants have been written down"
        assert not over

    return record
