"""A private RabbitMQ node that tests can stop and start again, where Debian's package or the like has its programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from kombu import Connection
from servers import until
from valkey_server import free_port

PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"
"""The script itself: that in PATH becomes another user first."""
CONF = """\
loopback_users = none
log.file.level = warning
vm_memory_high_watermark.absolute = 512MB
disk_free_limit.absolute = 50MB
"""
START = 90.0
"""Seconds within which it starts, on a machine with much else to do."""


def missing() -> str | None:
    """What there is not here, in a sentence."""
    if not Path(PROGRAM).exists() or shutil.which("epmd") is None:
        return f"no RabbitMQ server can be started: there is no {PROGRAM}, or no epmd"
    return None


@dataclass
class PrivateRabbitMQ:
    """A node with its data in ``folder``; ``epmd``, by which it finds itself, is its own as well."""

    folder: Path
    port: int = field(default_factory=free_port)
    _ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        own, names = self._ports
        for name, text in {"rabbitmq.conf": CONF, "env.conf": "", "enabled_plugins": "[]."}.items():
            (self.folder / name).write_text(text, "utf-8")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),  # where the cookie is
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"tb{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(own),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +S 2:2 -kernel inet_dist_use_interface {127,0,0,1}",
        }
        with (self.folder / "start.log").open("ab") as log:
            for command in (["epmd", "-address", "127.0.0.1", "-port", str(names)], [PROGRAM]):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        until(self._answers, "the RabbitMQ node answers", START)

    def stop(self) -> None:
        """As at a shutdown of its host: what is persistent is still there at the next start."""
        for process in reversed(self._processes):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(START)
            # The script may be gone before what it has started, which still has the port.
            until(lambda process=process: not _lives(process.pid), "all of the RabbitMQ node has ended", START)  # type: ignore[misc]
        self._processes.clear()

    def _answers(self) -> bool:
        assert self._processes[-1].poll() is None, (self.folder / "start.log").read_text("utf-8", "replace")[-2000:]
        try:
            with Connection(self.address, connect_timeout=1) as connection:
                connection.connect()
        except (OSError, *Connection(self.address).connection_errors):
            return False
        return True


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
