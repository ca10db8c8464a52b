"""The live view: what it tells, on a fake clock; what it draws; and the command itself, on a terminal."""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.cli import cli
from tb_celery.clock import FakeClock
from tb_celery.limiter import Limiter
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.top import Frame, plain
from tb_celery.usage import Row, Use, Watch, rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
START = 1_000_000 * SECOND
API = Bucket("api", (Limit(5, 0.5),))
FAST = Bucket("fast", (Limit(2, 10),))
TWICE = Bucket("twice", (Limit(2, 10), Limit(100, 0.01)))
BUCKETS = {"api": API, "fast": FAST, "twice": TWICE, "off": None}
DEADLINE = 60.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture
def limiter(clock: FakeClock) -> Limiter:
    return Limiter(BUCKETS, MemoryStore(clock))


def row(watch: Watch, bucket: str = "api", **held: float) -> Row:
    nodes = {"node": {bucket: {"held": {"tasks": 0, "lines": 0, "most": 0, **held}}}}
    (found,) = [each for each in watch.look(nodes) if each.bucket == bucket]
    return found


# -- what was used


def test_what_is_taken_between_two_looks_is_exact_while_the_bucket_is_not_full(
    limiter: Limiter, clock: FakeClock
) -> None:
    limiter.acquire("api", 3)
    watch = Watch(limiter)
    assert row(watch).mean(60) is None
    for cost in (1, 2, 0.25):
        clock.advance(SECOND)
        assert limiter.acquire("api", cost) or cost == 2
    clock.advance(SECOND)
    seen = row(watch).mean(60)
    assert seen == Use(START, START + 4 * SECOND, 3.25, 3.25)


def test_of_a_bucket_that_was_full_it_is_a_lower_bound_that_says_so(limiter: Limiter, clock: FakeClock) -> None:
    watch = Watch(limiter)
    row(watch, "fast")
    clock.advance(SECOND)
    assert limiter.acquire("fast", 2)
    clock.advance(SECOND)  # full again long since
    assert row(watch, "fast").mean(60) == Use(START, START + 2 * SECOND, 1.0, 12.0)
    clock.advance(SECOND)
    assert row(watch, "fast").mean(1) == Use(START + 2 * SECOND, START + 3 * SECOND, 0.0, 0.0)


def test_a_bucket_that_is_full_for_a_moment_is_told_closely(clock: FakeClock) -> None:
    limiter = Limiter([Bucket("api", (Limit(1, 0.1),))], MemoryStore(clock))
    watch = Watch(limiter)
    for look in range(600):
        row(watch)
        clock.advance(SECOND // 20)
        if look % 100 == 0:
            assert limiter.acquire("api")
        clock.advance(SECOND // 20 + SECOND // 2000)
    seen = row(watch).mean(1000)
    assert seen
    assert seen.tokens == 6
    assert 6 < seen.most < 6.1


def test_the_slow_limit_of_a_bucket_tells_what_the_fast_one_cannot(limiter: Limiter, clock: FakeClock) -> None:
    limiter.acquire("twice", 1)
    watch = Watch(limiter)
    row(watch, "twice")
    for _ in range(3):
        clock.advance(SECOND)
        assert limiter.acquire("twice", 2)
    clock.advance(SECOND)
    seen = row(watch, "twice").mean(60)
    assert seen == Use(START, START + 4 * SECOND, 6.0, 6.0)


@pytest.mark.parametrize("store", ["memory", "file"])
def test_keys_are_counted_together(store: str, clock: FakeClock, tmp_path: Path) -> None:
    limiter = Limiter(BUCKETS, MemoryStore(clock) if store == "memory" else FileStore(tmp_path / "state", clock))
    for key in "abc":
        limiter.acquire("api", 3, key=key)
    watch = Watch(limiter)
    row(watch)
    clock.advance(SECOND)
    limiter.acquire("api", 1, key="a")
    limiter.acquire("api", 2, key="b")
    clock.advance(SECOND)
    seen = row(watch)
    assert seen.mean(60) == Use(START, START + 2 * SECOND, 3.0, 3.0)
    assert seen.keys == 3
    assert seen.limits[0].tokens == 1.0, "the emptiest key's"


def test_other_numbers_and_a_reset_are_no_use(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    before = Limiter([API], store)
    before.acquire("api", 4)
    watch = Watch(Limiter([Bucket("api", (Limit(5, 1),))], store))
    assert row(watch).limits[0].tokens == 1.0
    clock.advance(SECOND)
    watch.limiter.acquire("api", 1)
    clock.advance(1)
    assert row(watch).mean(60) is None, "what the change has moved is not told apart"
    watch.limiter.acquire("api", 0.5)
    clock.advance(1)
    assert row(watch).mean(60) == Use(START + SECOND + 1, START + SECOND + 2, 0.5, 0.5)
    watch.limiter.reset("api")
    clock.advance(SECOND)
    assert row(watch).mean(1) == Use(START + SECOND + 2, START + 2 * SECOND + 2, 0, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 4 * SECOND), st.sampled_from([1, 2, 3]), st.sampled_from([None, "a", "b"])),
        max_size=30,
    ),
    st.integers(1, 12),
)
def test_what_was_taken_is_between_the_bounds(calls: list[tuple[int, int, str | None]], every: int) -> None:
    clock = FakeClock(START)
    limiter = Limiter([API], MemoryStore(clock))
    watch = Watch(limiter)
    watch.look({})
    taken = 0
    for number, (pause, cost, key) in enumerate(calls):
        clock.advance(pause + 1)
        taken += cost * bool(limiter.acquire("api", cost, key=key))
        if number % every == 0:
            uses = row(watch).uses
            assert sum(use.tokens for use in uses) <= taken + 1e-6
            assert sum(use.most for use in uses) >= taken - 1e-6


def test_rates_stay_as_time_goes_on() -> None:
    uses = [Use(START + n * SECOND, START + (n + 1) * SECOND, n // 10, n // 10) for n in range(35)]
    found = rates(uses, 10 * SECOND, START + 35 * SECOND, 5)
    assert found == [None, 0.0, 1.0, 2.0, 2.5], "the last is that of the last ten seconds"
    assert rates(uses, 10 * SECOND, START + 39 * SECOND, 5)[:4] == found[:4]
    assert rates([Use(START, START + 30 * SECOND, 3, 3)], 10 * SECOND, START + 30 * SECOND, 3) == [0.1] * 3
    assert rates([], 10 * SECOND, START, 2) == [None, None]


# -- who waits


def test_turns_and_what_is_held_behind_them_wait(limiter: Limiter) -> None:
    for _ in range(8):
        limiter.acquire("api", place=Place(soonest=0))
    seen = row(Watch(limiter))
    assert (seen.waiting, seen.drained_in) == (3.0, 6.0)
    seen = row(Watch(limiter), tasks=5, lines=1, most=4)
    assert (seen.waiting, seen.drained_in) == (7.0, 14.0)


def test_nothing_waits_for_a_bucket_that_is_only_used(limiter: Limiter) -> None:
    limiter.acquire("api", 5)
    seen = row(Watch(limiter))
    assert (seen.waiting, seen.drained_in, seen.keys) == (0, 0, 1)


def test_it_takes_nothing_and_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    watch = Watch(Limiter(BUCKETS, FileStore(path)))
    assert [each.bucket for each in watch.look({})] == list(BUCKETS)
    assert not path.exists()
    watch.limiter.acquire("api", 5)
    before = path.read_bytes()
    assert row(watch).limits[0].tokens < 1
    assert path.read_bytes() == before


# -- what is drawn


def rows(limiter: Limiter, clock: FakeClock) -> list[Row]:
    """A minute of use, and a backlog."""
    watch = Watch(limiter)
    for number in range(60):
        watch.look({})
        clock.advance(SECOND // 2)
        limiter.acquire("api")
        if number % 10 < 3:
            limiter.acquire("fast", key=str(number % 3))
        clock.advance(SECOND // 2)
    for _ in range(4):
        limiter.acquire("api", place=Place(soonest=0))
    return watch.look({})


def test_a_frame_shows_all_that_there_is_at_80_columns(limiter: Limiter, clock: FakeClock) -> None:
    text = plain(Frame(rows(limiter, clock), 1, "the state"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"tb-celery top  \d\d:\d\d:\d\d  the state", lines[0])
    assert re.fullmatch(r"BUCKET +TOKENS +USED/S +OF +LAST \dm \d\ds +WAIT +DONE IN", lines[2])
    assert re.fullmatch(r"api +░{6} 0\.75/5 +0\.567 +0\.5 +[▆▇█]{7} +4 +7s", lines[3])
    assert re.fullmatch(r"fast +█{6} 2/2 +≥0\.3 +10 +[▁▂]{7} +0 +-", lines[4])
    assert re.fullmatch(r"twice +█{6} 2/2 +0 +10 +▁{7} +0 +-", lines[5])
    assert re.fullmatch(r" +█{6} 100/100 +0\.01", lines[6])
    assert re.fullmatch(r"off +unlimited", lines[7])
    assert lines[9] == "≥ more may have been used, for the bucket was full now and then"


@pytest.mark.parametrize(
    # Releases of rich differ by a column.
    ("columns", "shown"),
    [("80", "names_that_only_at_the_e?…"), ("160", "names_that_only_at_the_end_differ_1")],
)
def test_long_names_are_cut_where_there_is_no_room(columns: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = [Row(f"names_that_only_at_the_end_differ_{number}") for number in range(2)]
    assert re.search(f"\n{shown} ", plain(Frame(names, 1, "the state")))


def test_it_is_drawn_in_ascii_where_there_is_no_more(limiter: Limiter, clock: FakeClock) -> None:
    text = plain(Frame(rows(limiter, clock), 1, "the state"), "ascii")
    assert text.isascii()
    assert re.search(r"^api +[#-]{6} ", text, re.MULTILINE)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [5, 10, 24])
def test_it_fits_every_terminal(width: int, height: int, limiter: Limiter, clock: FakeClock) -> None:
    seen = [*rows(limiter, clock), *(Row(f"off-{number}-{'long' * 9}") for number in range(30))]
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    with console.capture() as captured:
        console.print(Frame(seen, 1, "the state", height=height))
    lines = captured.get().splitlines()
    assert len(lines) <= max(height, 7)
    if height == 24:
        assert re.search(r"and \d+ more", captured.get())
        assert "ap" in captured.get(), "what is waited for comes first"


def test_it_has_colours_unless_they_are_not_wanted(
    limiter: Limiter, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = rows(limiter, clock)

    def drawn() -> str:
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
        with console.capture() as captured:
            console.print(Frame(seen, 1, "the state"))
        return captured.get()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m" in drawn(), "red: the next call waits"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", drawn())


def test_the_picture_in_the_manual_is_of_this_view(limiter: Limiter, clock: FakeClock) -> None:
    console = Console(record=True, file=io.StringIO(), width=80)
    console.print(Frame(rows(limiter, clock), 1, "the state"))
    drawn = console.export_svg()
    shown = (ROOT / "docs" / "top.svg").read_text()
    assert "@font-face" not in shown
    for head in ("BUCKET", "TOKENS", "USED/S", "OF", "LAST", "WAIT", "DONE"):
        assert re.search(rf">[^<]*{head}", drawn)
        assert re.search(rf">[^<]*{head}", shown), f"{head}: run python -m benchmarks.screenshot"


# -- the command


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("TB_CELERY_", "NO_COLOR"))}
    return {
        **clean,
        "PYTHONPATH": str(ROOT),
        "TB_CELERY_BUCKETS": json.dumps({"api": {"capacity": 5, "refill_rate": 0.001}, "off": None}),
        "TB_CELERY_STATE_FILE": str(tmp_path / "state"),
        "TERM": "xterm-256color",
    }


def top(environment: dict[str, str], *options: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tb_celery", "top", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("options", [(), ("--once",)])
def test_without_a_terminal_it_is_one_frame_of_text(
    options: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    code, out, err = top(environment, "-n", "0.1", *options)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["BUCKET", "api", "off"]
    assert re.search(r"^api +█{6} 5/5 +0 +0.001 +▁+ +0 +-$", out, re.MULTILINE), "marks are what two looks tell"
    assert "\x1b" not in out
    assert not (tmp_path / "state").exists()


def test_what_keeps_it_from_drawing_is_one_sentence(environment: dict[str, str]) -> None:
    for interval in ("0", "0.05", "nan", "-1", "soon"):
        with pytest.raises(click.BadParameter, match="must be a number of seconds from 0"):
            cli.main(["top", "-n", interval], standalone_mode=False)
    del environment["TB_CELERY_BUCKETS"]
    code, out, err = top(environment)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "--app" in err
    script = "import sys; sys.modules['rich.console'] = None; from tb_celery.cli import main; main(['top'])"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "pip install 'tb-celery[tui]'" in done.stderr


class Terminal:
    """A terminal with the live view on it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.ours, its = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(its)
        command = [sys.executable, "-m", "tb_celery", "top", "-n", "0.1"]
        # Whoever runs the tests in the background may have Ctrl-C ignored, and children inherit that.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(command, env=environment, stdin=its, stdout=its, stderr=its)
        signal.signal(signal.SIGINT, handler)
        self.its = its
        self.shown = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def frame(self) -> list[str]:
        """The lines of the last whole frame."""
        frames = self.shown.split("\x1b[H")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-2]).splitlines() if len(frames) > 1 else []

    def until(self, look: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        decode = codecs.getincrementaldecoder("utf-8")().decode
        while not look():
            assert time.monotonic() < deadline, f"not within {DEADLINE:g} s: {what}\n{self.shown[-3000:]}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.shown += decode(os.read(self.ours, 65536))

    def ended(self) -> int:
        self.until(lambda: self.shown.endswith("\x1b[?1049l"), "the screen is what it was, with nothing written to it")
        code = self.process.wait(DEADLINE)
        assert not select.select([self.ours], [], [], 0)[0]
        assert termios.tcgetattr(self.its) == self.before
        return code


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(environment)
    try:
        terminal.until(lambda: any(line.startswith("BUCKET") for line in terminal.frame()), "a frame is drawn")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)
        os.close(terminal.its)


@pytest.mark.parametrize(("end", "code"), [("q", 0), ("Q", 0), (signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_ends_quietly(end: str | signal.Signals, code: int, terminal: Terminal) -> None:
    if isinstance(end, str):
        os.write(terminal.ours, f"x{end}".encode())
    else:
        terminal.process.send_signal(end)
    assert terminal.ended() == code


def test_it_goes_on_through_another_size_and_a_failing_store(terminal: Terminal, environment: dict[str, str]) -> None:
    assert max(map(len, terminal.frame())) == 80
    terminal.resize(40, 12)
    terminal.until(lambda: max(map(len, terminal.frame())) == 40, "it is drawn anew")
    state = Path(environment["TB_CELERY_STATE_FILE"])
    state.mkdir()
    terminal.until(lambda: any(line.startswith("!") for line in terminal.frame()), "the store's complaint is shown")
    assert any(line.startswith("api") for line in terminal.frame()), "with what was seen last"
    state.rmdir()
    terminal.until(lambda: not any(line.startswith("!") for line in terminal.frame()), "all is well again")
    Limiter([Bucket("api", (Limit(5, 0.001),))], FileStore(state)).acquire("api", 5)
    terminal.until(lambda: any("0/5" in line for line in terminal.frame()), "the state file is seen")
    os.write(terminal.ours, b"q")
    assert terminal.ended() == 0
