"""Draw what `celery buckets top` and a node's metrics page show under load: `python -m benchmarks.screenshot`.

Two minutes, for docs/top.svg and docs/metrics.svg.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from valkey_server import NoServerError, free_port, valkey_server

from benchmarks import ROOT
from benchmarks.operating import Stage

SECONDS = 150
WIDTH, HEIGHT = 80, 24
HOME, LEAVE = "\x1b[H", "\x1b[?1049l"
PROJECT = """\
from celery import Celery

from tb_celery import RateLimitedTask

app = Celery("proj", broker="redis://localhost:6379/0", backend="redis://localhost:6379/0")
app.conf.tb_celery = {
    "buckets": {
        "twitter_api": {"capacity": 5, "refill_rate": 0.5},
        "mail": "6/m",
        "search": {"capacity": 10, "refill_rate": 2},
        "llm": ["4/s:8", {"capacity": 300, "per": "10m"}],
        "weather": "30/m:20",
        "internal": None,
    },
    "routes": {"proj.send_mail": {"bucket": "mail", "on_reject": "hold"}},
}


@app.task(base=RateLimitedTask, bucket="twitter_api")
def post(text): ...


@app.task
def send_mail(to): ...


@app.task(base=RateLimitedTask, bucket="search", key="tenant")
def search(tenant): ...


@app.task(base=RateLimitedTask, bucket="llm")
def ask(prompt): ...


@app.task(base=RateLimitedTask, bucket="weather")
def forecast(town): ...
"""
SEND = """\
import math, time
import proj

for number in range(90): proj.post.delay("post")
for number in range(25): proj.send_mail.delay("user")
for second in range({seconds}):
    for tenant in ("north", "east", "south")[: 1 + second // 12 % 3]: proj.search.delay(tenant)
    for number in range(round(2 + 2 * math.sin(second / 8))): proj.ask.delay("prompt")
    if second % 20 < 8: proj.forecast.delay("town")
    time.sleep(1)
"""


def last_frame(stage: Stage, command: list[str], seconds: float) -> str:
    """What a command shows on a terminal of its own after so many seconds; q ends it."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {**stage.environment, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    del environment["NO_COLOR"]
    with subprocess.Popen(command, cwd=stage.folder, env=environment, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        written = bytearray()
        end = time.monotonic() + seconds
        while process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                with suppress(OSError):  # Linux's end of file, for terminals
                    written += os.read(ours, 65536)
            if time.monotonic() > end:
                os.write(ours, b"q")
                end += seconds
    os.close(ours)
    if process.returncode:
        sys.exit(f"screenshot: {command}: exit code {process.returncode}\n{written.decode()}")
    return written.decode().rpartition(LEAVE)[0].rpartition(HOME)[2]


def drawn(shown: str, title: str, name: str) -> str:
    """What a terminal shows as a picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), legacy_windows=False)
    console.print(Text.from_ansi(shown.replace("\r", "")), end="")
    # Rich's own names a font on somebody's server: a page that is read should call nobody.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=plain, unique_id=name)


class Shown(NamedTuple):
    top: str
    page: str


def take(seconds: int) -> Shown:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb_celery-screenshot-")))
        stage = Stage(folder, stack.enter_context(valkey_server()), PROJECT)
        port = free_port()
        stage.environment["TB_CELERY_METRICS_PORT"] = str(port)  # the node that comes first has it
        stack.enter_context(stage.nodes())
        (folder / "send.py").write_text(SEND.format(seconds=seconds))
        sending = subprocess.Popen([sys.executable, "send.py"], cwd=folder, env=stage.environment)
        stack.callback(sending.wait)
        stack.callback(sending.terminate)
        frame = last_frame(stage, ["celery", "-A", "proj", "buckets", "top"], seconds)
        if sending.poll():
            sys.exit("screenshot: send.py has failed, so there was no load")
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            page = answer.read().decode().splitlines()
        lines = [line for line in page if ("mail" in line or "store" in line) and not line.startswith("#")]
        return Shown(frame.replace(str(folder), "/var/lib/tb-celery"), "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.screenshot", description="Draw docs/top.svg and docs/metrics.svg."
    )
    parser.add_argument("--into", type=Path, default=ROOT / "docs", help="the folder to write to")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of load")
    options = parser.parse_args()
    shown = take(options.seconds)
    top = drawn(shown.top, "celery -A proj buckets top", "top")
    page = drawn(shown.page, "curl -s localhost:9464/metrics | grep -v ^# | grep -e mail -e store", "metrics")
    (options.into / "top.svg").write_text(top, "utf-8")
    (options.into / "metrics.svg").write_text(page, "utf-8")


if __name__ == "__main__":
    try:
        main()
    except NoServerError as error:
        sys.exit(f"benchmarks.screenshot: {error}")
