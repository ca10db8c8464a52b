"""Clocks that are set, and clocks that are others'."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from faults.crew import CLOCK, all_granted
from faults.means import HOUR, WallClock, as_root, in_mounts, in_time
from faults.report import fault
from faults.writer import SLOW

from tb_celery.bucket import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from faults.conftest import Measured, StartCrew

    from tb_celery.grantlog import Entry

BOOT_ID = "/proc/sys/kernel/random/boot_id"


@fault(
    "the wall clock is stepped",
    "The quota takes no notice: it counts on the host's boot-time clock, which nobody can set.",
)
def test_wall_clock_stepped(start_crew: StartCrew, tmp_path: Path, measured: Measured) -> None:
    """An hour ahead, back, and an hour behind, three times over, under four processes; a library that is loaded before
    the system's answers them."""
    clock = WallClock(tmp_path)
    crew = start_crew(environment=clock.environment)
    writers = crew.add(4)
    all_granted(writers)
    steps = [HOUR, 0, -HOUR, 0] * 3
    survived = 0
    for step in steps:
        clock.step(step)
        survived += all_granted(writers) == len(writers)
    assert crew.errors() == []
    measured(crew.entries(), tried=len(steps), survived=survived)


def on_our_clock(entries: Iterable[Entry], ahead: int) -> list[Entry]:
    """The same grants on this host's clock, where those who had them had one that is ``ahead`` of it, in seconds."""
    return [entry._replace(clock=CLOCK.identity, at=entry.at - ahead * SECOND) for entry in entries]


@as_root
@fault(
    "the host reboots",
    "The state is carried over by wall time: what was taken stays taken, and the time in between counts.",
)
def test_reboot(start_crew: StartCrew, tmp_path: Path, measured: Measured) -> None:
    """Four processes are killed, and a fifth one that took all of a slow bucket; five others use the file that have
    another boot id (a mount over the kernel's) and a boot-time clock (a time namespace) that began anew or is ten days
    ahead; six times. The slow bucket gives nothing more."""
    boot_id = tmp_path / "boot_id"
    entries: list[Entry] = []
    uptime = CLOCK.now() // SECOND
    survived, aheads = 0, [0, 10 * 86400, -uptime + 1, 0, -uptime + 1, 10 * 86400]
    for number, ahead in enumerate(aheads):
        boot_id.write_text(f"{uuid.UUID(int=number)}\n", "ascii")
        other = in_mounts(f'mount --bind "$1" {BOOT_ID}', boot_id)
        crew = start_crew(*other, *in_time(ahead))
        (slow,) = crew.add(take={SLOW.name: 1})
        if not number:
            slow.granted(int(SLOW.limits[0].capacity))
        writers = crew.add(4)
        survived += all_granted(writers) == len(writers)
        crew.stop()
        assert crew.errors() == []
        assert number == 0 or not slow.look().entries, "what was taken stays taken"
        assert len({entry.clock for entry in crew.entries()} - {CLOCK.identity}) == 1, "it is another clock"
        entries += on_our_clock(crew.entries(), ahead)
    measured(entries, tried=len(aheads), survived=survived)


@as_root
@fault(
    "time namespaces",
    "Processes whose boot-time clocks differ share one quota: each carries over what the others wrote, by wall time.",
)
def test_time_namespaces(start_crew: StartCrew, measured: Measured) -> None:
    """Two processes on the host's clock, two on one that is ten days ahead and two on one that is a minute behind use
    the file at the same time."""
    crews = {}
    for ahead in (0, 10 * 86400, -60):
        crews[ahead] = start_crew(*(in_time(ahead) if ahead else []))
        crews[ahead].add(2)
    writers = [writer for crew in crews.values() for writer in crew.writers]
    survived = all_granted(writers, 200)
    entries = [entry for ahead, crew in crews.items() for entry in on_our_clock(crew.entries(), ahead)]
    assert [crew.errors() for crew in crews.values()] == [[], [], []]
    assert len({entry.clock for crew in crews.values() for entry in crew.entries()}) == 3
    measured(entries, tried=len(writers), survived=survived)
