"""The live view: every bucket in a terminal, drawn anew after each look."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any

from tb_celery.bucket import SECOND
from tb_celery.errors import ConfigurationError, StoreError
from tb_celery.usage import LOOKS, Row, Use, Watch, rates

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text
except ImportError:
    _message = "top draws with the package rich, which is not installed: pip install 'tb-celery[tui]'"
    raise ConfigurationError(_message) from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from tb_celery.limiter import Limiter

    Nodes = Mapping[str, Mapping[str, Any]]

MARK = 10
"""Looks that one mark of the sparkline stands for."""
MEAN = 60.0
"""Seconds over which the rate used is told."""
LOOSE = 0.05
"""Part of a figure by which it may be too low without a word."""
LONGEST_NAME = 24
"""Columns that a name may take in any case; a quarter of the width, where that is more."""
NARROW, MIDDLE, WIDE = 38, 50, 66
"""Widths of a terminal from which it shows what waits, what is used, and what was used over time."""
GAUGE = 6
"""Width of a gauge."""
ASK_EVERY = 5.0
"""Seconds from one question to the nodes to the next: a node does nothing else while it answers."""
SHARE = 0.1
"""Of the time may be spent on looking: a file with many keys takes long to read."""
STEP = 0.25
"""Seconds after which a terminal of another size is noticed."""
THOUSAND = 1000
SECONDS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


# -- one frame


class Fitted:
    """Text that is made for the width that is left for it."""

    def __init__(self, make: Callable[[int], Text], most: int) -> None:
        self._make = make
        self._most = most

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, self._most)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._make(min(options.max_width, self._most))


class Frame:
    """A picture of all buckets, for a terminal of any size.

    Args:
        rows: how they stand.
        interval: seconds from one look to the next.
        title: where the state is.
        notes: lines to print below.
        height: rows of the terminal; ``None`` for as many as it takes.
    """

    def __init__(
        self, rows: Sequence[Row], interval: float, title: str, notes: Sequence[Text] = (), height: int | None = None
    ) -> None:
        self._rows = rows
        self._interval = interval
        self._title = title
        self._notes = notes
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = self._fitting()
        marks = "_.-:=+*#" if options.ascii_only else "▁▂▃▄▅▆▇█"
        bar = "#-" if options.ascii_only else "█░"
        at_least = ">" if options.ascii_only else "≥"
        table = Table(box=None, expand=options.max_width >= WIDE, padding=(0, 1), pad_edge=False, header_style="dim")
        table.add_column("BUCKET", overflow="ellipsis", max_width=max(LONGEST_NAME, options.max_width // 4))
        columns: list[tuple[RenderableType, int, dict[str, Any]]] = [
            ("TOKENS", 0, {}),
            ("USED/S", MIDDLE, {"justify": "right"}),
            ("OF", MIDDLE, {}),
            (Fitted(self._heading, LOOKS // MARK), WIDE, {"ratio": 1}),
            ("WAIT", NARROW, {"justify": "right"}),
            ("DONE IN", NARROW, {"justify": "right"}),
            ("STATE", 0 if any(row.state for row in shown) else sys.maxsize, {}),
        ]
        roomy = [least <= options.max_width for _, least, _ in columns]
        for head, _, how in compress(columns, roomy):
            table.add_column(head, no_wrap=True, **how)
        for row in shown:
            for name, *cells in self._cells(row, bar, marks, at_least):
                table.add_row(name, *compress(cells, roomy))
        clock = time.strftime("%H:%M:%S")
        heading = Text.assemble(("tb-celery top", "bold"), f"  {clock}  ", (self._title, "dim"))
        heading.truncate(options.max_width, overflow="ellipsis")
        notes = [_note(f"and {left_out} more", "")] if left_out else []
        if any(_loose(use) for use in (row.mean(MEAN) for row in shown) if use):
            notes.append(_note(f"{at_least} more may have been used, for the bucket was full now and then"))
        notes += self._notes
        yield Group(heading, Text(), table, *[Text()][: len(notes)], *notes)

    def _fitting(self) -> tuple[list[Row], int]:
        """The rows for which there is room, in their order, and how many there are besides."""
        room = math.inf if self._height is None else self._height - 6 - len(self._notes)
        lines = [max(1, len(row.limits)) for row in self._rows]
        if sum(lines) <= room:
            return list(self._rows), 0
        kept = set()
        for place in sorted(range(len(lines)), key=lambda place: _importance(self._rows[place])):
            room -= lines[place]
            if room < 1:
                break
            kept.add(place)
        return [row for place, row in enumerate(self._rows) if place in kept], len(lines) - len(kept)

    def _heading(self, width: int) -> Text:
        return Text(f"LAST {_span(width * MARK * self._interval)}", no_wrap=True, overflow="ellipsis")

    def _cells(self, row: Row, bar: str, marks: str, at_least: str) -> Iterator[list[RenderableType]]:
        name = Text(row.bucket, "bold", no_wrap=True)
        if not row.limits:
            yield [name, Text("unlimited", "dim"), "", "", "", "", "", row.state]
            return
        most = float(row.limits[0].limit.refill_rate) * max(1, row.keys)
        spark = Fitted(lambda width: self._spark(row, width, most, marks), LOOKS // MARK)
        mean = row.mean(MEAN)
        rate = "-"
        if mean:
            rate = f"{at_least if _loose(mean) else ''}{_figure(mean.tokens * SECOND / (mean.until - mean.since))}"
        for place, seen in enumerate(row.limits):
            full = seen.tokens / seen.limit.capacity
            style = "red" if seen.wait else "yellow" if full < 1 / 2 else "green"
            filled = min(GAUGE - (full < 1), round(full * GAUGE)) if seen.wait == 0 else int(full * GAUGE)
            # Rounded down: nobody is promised what is not there.
            held = f" {_figure(math.floor(seen.tokens * 100) / 100)}/{_figure(seen.limit.capacity)}"
            gauge = Text.assemble(
                (bar[0] * filled, style), (bar[1] * (GAUGE - filled), "dim"), (held, "red" if seen.wait else "")
            )
            many = f" x{row.keys}" if row.keys > 1 else ""
            allowed = f"{_figure(float(seen.limit.refill_rate))}{many}"
            if place:
                yield ["", gauge, "", allowed, *[""] * 4]
                continue
            waiting = Text(f"{math.ceil(round(row.waiting, 1))}", "bold" if row.waiting else "dim")
            done = _span(row.drained_in) if row.waiting else "-"
            yield [name, gauge, rate, allowed, spark, waiting, done, row.state]

    def _spark(self, row: Row, width: int, most: float, marks: str) -> Text:
        """The rate used, as time went on: a full mark for all that is allowed, or for more."""
        text = Text(no_wrap=True)
        for rate in rates(row.uses, round(MARK * self._interval * SECOND), row.now, width):
            if rate is None:
                text.append(" ")
            elif not rate:
                text.append(marks[0], "dim")
            else:
                height = round(rate / most * (len(marks) - 1))
                text.append(marks[min(max(height, 1), len(marks) - 1)], "cyan")
        return text


def _note(text: str, style: str = "dim") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _importance(row: Row) -> tuple[float, ...]:
    """What comes first where there is no room for all: those that are waited for, and those nearest to being empty."""
    if not row.limits:
        return (0, 2)
    return (-row.drained_in, row.binds.tokens / row.binds.limit.capacity)


def _loose(use: Use) -> bool:
    """Whether notably more may have been used than is told."""
    return use.most > use.tokens * (1 + LOOSE)


def _figure(number: float) -> str:
    """``number`` in few characters."""
    return f"{number:.{3 if number < THOUSAND else 9}g}"


def _span(seconds: float) -> str:
    """``seconds`` in their two largest units, never less than they are."""
    left = math.ceil(seconds)
    for (unit, name), (smaller, its_name) in pairwise(SECONDS):
        if left >= unit:
            left = -(-left // smaller) * smaller
            return f"{left // unit}{name} {left % unit // smaller:02d}{its_name}"
    return f"{left}s"


# -- frame after frame


class _Asking:
    """What the nodes tell, asked in a thread of its own: their answers take a second to come, or do not."""

    def __init__(self, ask: Callable[[], Nodes] | None) -> None:
        self.nodes: Nodes | None = None
        self._ask = ask
        self._ended = threading.Event()
        # Left behind in the end: it may be waiting for a broker that is gone.
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def once(self) -> None:
        if self._ask:
            self.nodes = self._ask()

    def start(self) -> None:
        if self._ask:
            self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def _go_on(self) -> None:
        while not self._ended.is_set():
            self.once()
            self._ended.wait(ASK_EVERY)

    def notes(self) -> list[Text]:
        if not self._ask:
            return []
        if self.nodes is None:
            return [_note("asking the nodes ...")]
        if not self.nodes:
            return [_note("no node answers: tasks that nodes hold are not counted", "yellow")]
        return [_note(f"nodes that answer: {len(self.nodes)}")]


def show(limiter: Limiter, interval: float, *, once: bool, ask: Callable[[], Nodes] | None = None) -> None:
    """Draw the buckets until q or Ctrl-C; once, as plain text, where stdout is no terminal.

    Args:
        limiter: whose buckets.
        interval: seconds from one look to the next.
        once: draw one frame, as plain text, and return.
        ask: asks the nodes what they hold, as :func:`tb_celery.explain.ask_nodes` does; ``None`` where there is no app.

    Raises:
        ConfigurationError: there is no bucket.
        StoreError: the state cannot be read. Once it could, that is a line of the frame.
    """
    if not limiter.buckets:
        message = "no bucket is declared: name a Celery app with --app, a file with --config, or set TB_CELERY_BUCKETS"
        raise ConfigurationError(message)
    watch = Watch(limiter)
    asking = _Asking(ask)
    title = str(getattr(limiter.store, "path", limiter.store))
    if once or not sys.stdout.isatty():
        sys.stdout.write(f"{_plain(watch, asking, interval, title)}\n")
        return
    # Whatever ends it, the terminal is left as it was.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asking.start()
    try:
        _go_on(watch, asking, interval, title)
    except KeyboardInterrupt:
        pass  # as good a way to end it as any
    finally:
        asking.end()


def _plain(watch: Watch, asking: _Asking, interval: float, title: str) -> str:
    watch.look({})
    end = time.monotonic() + interval
    asking.once()
    time.sleep(max(0.0, end - time.monotonic()))
    frame = Frame(watch.look(asking.nodes or {}), interval, title, asking.notes())
    return plain(frame, sys.stdout.encoding)


def plain(frame: Frame, encoding: str | None = None) -> str:
    """A frame as text, as wide as ``COLUMNS`` says; in ASCII where ``encoding`` has no more."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")
    console = Console(file=file, force_terminal=False, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(frame)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _go_on(watch: Watch, asking: _Asking, interval: float, title: str) -> None:
    rows = watch.look({})
    console = Console()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        trouble: list[Text] = []
        while True:
            began = time.monotonic()
            try:
                rows = watch.look(asking.nodes or {})
                trouble = []
            except StoreError as error:
                trouble = [Text(f"! {error}", "bold red")]
            due = began + max(interval, (time.monotonic() - began) / SHARE)
            size = None
            while (left := due - time.monotonic()) > 0 or size is None:
                if size != console.size:
                    size = console.size
                    notes = [*trouble, *asking.notes(), _note("q ends it")]
                    live.update(Frame(rows, interval, title, notes, size.height), refresh=True)
                if pressed(min(max(left, 0.0), STEP)):
                    return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits for so many seconds, or until somebody wants to end it, and tells whether."""
    if not sys.stdin.isatty():

        def pressed(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield pressed
    elif sys.platform == "win32":
        import msvcrt  # noqa: PLC0415 - Windows has it

        def pressed(seconds: float) -> bool:
            time.sleep(seconds)
            return msvcrt.kbhit() and msvcrt.getwch() in "qQ"

        yield pressed
    else:
        import select  # noqa: PLC0415 - as the next
        import termios  # noqa: PLC0415 - Windows has none
        import tty  # noqa: PLC0415

        terminal = sys.stdin.fileno()

        def pressed(seconds: float) -> bool:
            ready, _, _ = select.select([terminal], [], [], seconds)
            # Nothing to read although it is ready: the terminal is gone.
            return bool(ready) and os.read(terminal, 1) in {b"q", b"Q", b""}

        before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal)
        try:
            yield pressed
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
