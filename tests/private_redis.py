"""Private Redis and Valkey servers that tests can starve, stop and restart, and a store on a clock of the test's."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import tempfile
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers import until
from valkey_server import WATCH, find_binary, free_port

from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.errors import StoreError
from tb_celery.stores.redis import OPEN, ORDER, SCRIPT, RedisStore
from tb_celery.stores.redis_keys import SWAP
from tb_celery.stores.redis_orders import CLAIM
from tb_celery.stores.redis_server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tb_celery.bucket import Charge, Limit
    from tb_celery.clock import Clock

DEFAULT = os.environ.get("TEST_SERVER")
"""The server program to mistreat, such as redis-server; unless set, the one that all tests use."""
_FAKE = """
local real = redis
local redis = {
  call = function(name, key, value, ...)
    if name == 'TIME' then
      local s, ns = struct.unpack('>i8i8', real.call('GET', 'fake now'))
      return {s, setmetatable({}, {__mul = function() return ns end})}
    elseif name == 'SET' then
      return (...) == 'NX' or real.call('SET', key, value)
    elseif value then
      return real.call(name, key, value, ...)
    end
    return real.call(name, key)
  end,
  pcall = function() return 'uptime_in_seconds:99999999999' end,
}
"""
"""Put before a script: its time is the test's, its server has always been there, and nothing expires, for the server's
own clock goes on meanwhile."""


class FakeTimeStore(RedisStore):
    """The store with its own script, word for word, on a clock that only moves when it is told to."""

    script = _FAKE + SCRIPT
    opening = _FAKE + OPEN
    ordering = _FAKE + ORDER
    swapping = _FAKE + SWAP
    claiming = _FAKE + CLAIM

    def __init__(self, address: str, clock: Clock) -> None:
        super().__init__(address, prefix=uuid.uuid4().hex)
        self.clock = clock

    def _open(self) -> bytes:
        self._tell_time()
        return super()._open()

    def _run(self, *call: Any, **options: Any) -> Any:  # noqa: ANN401
        self._tell_time()
        return super()._run(*call, **options)

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        self._tell_time()
        super().order(charge, span, declared)

    def _tell_time(self) -> None:
        self.server.command("SET", "fake now", struct.pack(">qq", *divmod(self.clock.now(), SECOND)))


def redis_store(address: str, clock: Clock) -> RedisStore:
    """A store with nothing in it yet: on ``clock`` where that is a fake one, else on the server's."""
    if isinstance(clock, FakeClock):
        return FakeTimeStore(address, clock)
    return RedisStore(address, prefix=uuid.uuid4().hex)


def binaries() -> dict[str, str]:
    """Every server program that there is: the one that all tests use, and what else is on PATH."""
    found = {Path(find_binary()).name: find_binary()}
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path:
            found.setdefault(name, path)
    return found


class PrivateServer:
    """A server process on a port of its own, which it keeps when it is restarted."""

    def __init__(self, folder: Path, *options: str, binary: str | None = None, conf: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        words = f"--bind 127.0.0.1 --port {self.port} --dir {folder} --daemonize no --logfile {folder / 'log'}".split()
        if conf:
            words = [str(conf), *words]
        else:
            words += ["--save", "", "--appendonly", "no"]
        self._command = ["/bin/sh", "-c", WATCH, "sh", binary or DEFAULT or find_binary(), *words, *options]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(self.answers, "the server answers")
        # Not the process that was started, which watches over it.
        facts = Server(self.url).facts()
        self._pid = int(facts["process_id"])

    def answers(self) -> bool:
        try:
            Server(self.url, timeout=1).command("PING")
        except StoreError:
            return False
        return True

    @classmethod
    @contextmanager
    def sentinel(cls, conf: Path) -> Iterator[Server]:
        """A sentinel with the configuration in ``conf``, where it keeps what it finds out."""
        sentinel = cls(conf.parent, "--sentinel", conf=conf)
        try:
            yield Server(sentinel.url.removesuffix("0"))
        finally:
            sentinel.stop()

    def stop(self) -> None:
        """As a crash does."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._process.communicate()
        free_port(self.port)  # nobody else's until it is started again

    def restart(self) -> None:
        """Empty, for it keeps nothing on disk."""
        self.stop()
        self.start()

    def pause(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@contextmanager
def private_server(*options: str, binary: str | None = None) -> Iterator[PrivateServer]:
    with tempfile.TemporaryDirectory(prefix="tb_celery-redis-") as folder:
        server = PrivateServer(Path(folder), *options, binary=binary)
        try:
            yield server
        finally:
            server.stop()


def wait_until(server: Server, instant: int) -> None:
    """Until the server's clock has passed ``instant``."""

    def passed() -> bool:
        s, us = server.command("TIME")
        return int(s) * SECOND + int(us) * 1000 > instant

    until(passed, "the server's clock has come so far", pause=0.001)
