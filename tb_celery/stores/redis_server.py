"""Connections to a Redis or Valkey server by its address, and sentences for what can go wrong with it.

One command at a time on connections of redis-py, without its pools and clients: those cost more than a decision, and
send a command again when its answer is lost.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tb_celery.bucket import SECOND
from tb_celery.clock import SystemClock
from tb_celery.errors import ConfigurationError, StoreError, StoreTimeoutError
from tb_celery.stores.forks import tell_after_fork
from tb_celery.stores.redis_format import wired

try:
    from redis import BusyLoadingError, Connection, ResponseError
    from redis import exceptions as failures
    from redis.backoff import NoBackoff
    from redis.connection import parse_url
    from redis.exceptions import NoScriptError as NoScriptError  # noqa: PLC0414 - for the store, which imports redis here
    from redis.retry import Retry
    from redis.sentinel import Sentinel
except ImportError:
    _message = (
        "a Redis server in the setting store (TB_CELERY_STORE) needs the package redis; pip install 'tb-celery[redis]'"
    )
    raise ConfigurationError(_message) from None

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

IDLE = 64
"""Connections that are kept open while nobody asks."""
FORBIDDEN = "^ACL failure in script|^The user executing the script can't"
"""What newer and older servers say of a command in a script that the user has no right to."""
REDIRECTS = 5
OLDEST = (6, 2)
REPLICA = "is a read-only replica; name the primary in the setting store (TB_CELERY_STORE)"
Node = tuple[str, int]
_SCHEMES = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
    "unix": "unix",
    "redis+socket": "unix",
    "sentinel": "redis",
    "redis+sentinel": "redis",
    "rediss+sentinel": "rediss",
    "redis+cluster": "redis",
    "rediss+cluster": "rediss",
}
FORMS = (
    "redis://host:6379/0, rediss://, valkey://, valkeys://, unix:///path, redis+sentinel://host:26379,host/service/0 or"
    " redis+cluster://host:6379,host"
)


class _Address:
    """Whom to connect to, and how."""

    def __init__(self, address: str, timeout: float) -> None:
        scheme, _, rest = address.replace(";sentinel://", ",").partition("://")
        rest, _, query = rest.partition("?")
        netloc, _, path = rest.partition("/")
        credentials, at, hosts = netloc.rpartition("@")
        self.service = ""
        if scheme.endswith("sentinel"):
            self.service, _, path = path.partition("/")
        self.place = f"{scheme}://{hosts}/{self.service and self.service + '/'}{path}"
        # Celery spells this option as Python does.
        query = re.sub(r"\bssl_cert_reqs=CERT_(\w+)", lambda found: f"ssl_cert_reqs={found[1].lower()}", query)
        fixed = {"protocol": 2, "decode_responses": False, "health_check_interval": 0, "retry": Retry(NoBackoff(), 0)}
        self.nodes: list[Node | None] = []  # None for a socket in the file system
        # Unescaped in a password, they would be taken for the end of it, and the rest would be shown. And a user and a
        # password before each of several hosts would all be taken for the password of the last one.
        understood = not re.search("[@#]", hosts + path + query) and not re.search("#|@.*,", credentials)
        try:
            for host in hosts.split(","):
                named = parse_url(f"{_SCHEMES[scheme]}://{credentials}{at}{host}/{path}?{query}")
                named.pop("max_connections", None)  # of redis-py's pools
                port = named.get("port", 26379 if self.service else 6379)
                self.nodes.append(None if "path" in named else (named.get("host", "localhost"), port))
            self._class: type[AbstractConnection] = named.pop("connection_class", Connection)
            # Each of those who may have to be tried has its share, so that all of them take no longer than one.
            share = timeout / (len(self.nodes) + bool(self.service))
            limits = {"socket_timeout": timeout if self.service else share}
            if _SCHEMES[scheme] != "unix":
                limits["socket_connect_timeout"] = share
            limits = {name: min(most, named.get(name, most)) for name, most in limits.items()}
            understood = understood and all(limit > 0 for limit in limits.values())
            self._options: dict[str, Any] = {**named, **limits, **fixed}
            self.connection()
        except (KeyError, TypeError, ValueError, failures.RedisError):
            understood = False  # and not a word of theirs, which may hold a part of the password
        if not understood or (scheme.endswith("sentinel") and not self.service):
            message = (
                f"setting store (TB_CELERY_STORE) must be an address such as {FORMS}; this one cannot be understood"
            )
            raise ConfigurationError(message)
        self.timeout: float = self._options["socket_timeout"]
        self._sentinel: Sentinel | None = None
        if self.service:
            options = {name: value for name, value in self._options.items() if name.startswith(("socket", "ssl"))}
            options["socket_timeout"] = min(share, self.timeout)
            secure = {"ssl": True} if _SCHEMES[scheme] == "rediss" else {}
            self._sentinel = Sentinel(self.nodes, sentinel_kwargs={**options, **secure, "retry": fixed["retry"]})

    def candidates(self) -> list[Node | None]:
        """Whom to try, one after the other."""
        return [self._sentinel.discover_master(self.service)] if self._sentinel else self.nodes

    def connection(self, node: Node | None = None) -> AbstractConnection:
        """A connection that has not been made yet."""
        options = self._options if node is None else {**self._options, "host": node[0], "port": node[1]}
        return self._class(**options)


class Server:
    """A server, or a cluster, or what sentinels say is the primary now.

    Args:
        address: in one of the :data:`FORMS`. Those of sentinels and clusters may name several hosts, of which one that
            answers is enough. Options of redis-py's connections can follow a question mark.
        timeout: seconds to wait for a connection, and for an answer, at most: the address's ``socket_connect_timeout``
            and ``socket_timeout`` can make it less. Where the address names several hosts, each has its share of them.

    Raises:
        ConfigurationError: the address cannot be understood.
    """

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self._at = _Address(address, timeout)
        self.place = self._at.place
        self._idle: deque[AbstractConnection] = deque()
        self._cluster_node: Node | None = None
        tell_after_fork(self)

    def __str__(self) -> str:
        return f"Redis server {self.place}"

    def __repr__(self) -> str:
        return f"Server({self.place!r})"

    def command(self, *words: str | bytes | int) -> Any:  # noqa: ANN401 - whatever the command answers
        """:meth:`send` for a command in words."""
        return self.send(wired(*words))

    def send(self, packed: bytes) -> Any:  # noqa: ANN401
        """Send a command once and wait for its answer; again only to the node that a cluster says has the keys.

        Raises:
            NoScriptError: the server does not know the script, and has run nothing.
            StoreTimeoutError: no connection, or no answer, within the time-out: whether it was run, nobody knows.
            StoreError: the server cannot be reached, or refuses the command.
        """
        taker: Node | None = None  # to which our keys are on their way
        try:
            for _ in range(REDIRECTS):
                try:
                    return self._ask(packed, taker) if taker else self._exchange(packed, self._connection())
                except ResponseError as error:
                    node, moved = self._redirection(error)
                    if node is None:
                        raise
                taker = None if moved else node
                if moved:
                    self._cluster_node = node
                    self.forget()
        except NoScriptError:
            raise
        except (failures.RedisError, OSError) as error:
            raise self._failure(error) from error
        message = f"{self}: its nodes send us to each other for one key; wait until the cluster is sound"
        raise StoreError(message)

    def facts(self) -> dict[str, str]:
        """What the server tells of itself (the command INFO); empty where it does not let us ask."""
        try:
            text: bytes = self.command("INFO")
        except StoreError as error:
            if isinstance(error.__cause__, ResponseError):
                return {}
            raise
        pairs = (line.split(":", 1) for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
        return dict(pairs)

    def examined(self) -> dict[str, str]:
        """:meth:`facts`, of a server that will do.

        Raises:
            StoreError: it is too old, or a replica: that would answer with what it had some time ago.
        """
        facts = self.facts()
        version = facts.get("redis_version", "")  # Valkey, too, tells which Redis it stands for
        if (found := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, found.groups())) < OLDEST:
            message = (
                f"{self} is of version {version}; it must be 6.2 or newer, whose SET takes the instant at which"
                " a key expires (PXAT): upgrade it, or name another in the setting store (TB_CELERY_STORE)"
            )
            raise StoreError(message)
        if facts.get("role") == "slave":
            message = f"{self} {REPLICA}"
            raise StoreError(message)
        return facts

    def forget(self) -> None:
        """Close the connections that nobody uses; the next one finds out anew whom to connect to."""
        while self._idle:
            self._idle.pop().disconnect()

    def _connection(self) -> AbstractConnection:
        """One that nobody uses, if the server has not closed it, or a new one."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            with suppress(failures.RedisError, OSError):
                if not connection.can_read(0):
                    return connection
            connection.disconnect()
        nodes = [self._cluster_node] if self._cluster_node else self._at.candidates()
        node, self._cluster_node = self._cluster_node, None  # unless it answers, the others are asked next time
        for other in nodes[:-1]:
            with suppress(failures.TimeoutError, OSError, failures.ConnectionError):
                return self._connect(other)
        connection = self._connect(nodes[-1])
        self._cluster_node = node
        return connection

    def _connect(self, node: Node | None) -> AbstractConnection:
        connection = self._at.connection(node)
        connection.connect()
        return connection

    def _exchange(self, packed: bytes, connection: AbstractConnection, *, keep: bool = True) -> Any:  # noqa: ANN401
        try:
            connection.send_packed_command([packed], check_health=False)
            answer = connection.read_response()
        except ResponseError as error:
            if _is_replica(error):
                # It was the primary once. By name or from the sentinels the next connection may find the new one.
                connection.disconnect()
                self.forget()
            elif keep:
                self._keep(connection)
            raise
        except BaseException:
            # Also of a signal handler: the answer may still come, and is nobody's.
            connection.disconnect()
            raise
        if keep:
            self._keep(connection)
        return answer

    def _ask(self, packed: bytes, node: Node) -> Any:  # noqa: ANN401
        """An answer from the node that keys are on their way to: it gives it this once."""
        connection = self._connect(node)
        try:
            self._exchange(wired("ASKING"), connection, keep=False)
            return self._exchange(packed, connection, keep=False)
        finally:
            connection.disconnect()

    def _redirection(self, error: ResponseError) -> tuple[Node | None, bool]:
        """The node of a cluster that has the key, if that is what ``error`` says, and whether it has it for good."""
        # redis-py has errors for it, or (up to version 5) only its client for clusters has.
        found = re.fullmatch(r"(?:(MOVED|ASK) )?\d+ (.*):(\d+)", str(error))
        if found is None:
            return None, False
        first = self._at.nodes[0]
        node = found[2] or (first[0] if first else ""), int(found[3])  # without a host: the one that was asked
        return node, found[1] == "MOVED" or isinstance(error, failures.MovedError)

    def _keep(self, connection: AbstractConnection) -> None:
        if len(self._idle) < IDLE:
            self._idle.append(connection)
        else:
            connection.disconnect()

    def _after_fork(self) -> None:
        # Not disconnected: the sockets are the parent's as well.
        self._idle = deque()

    def _failure(self, error: Exception) -> StoreError:
        text = str(error).rstrip(".")
        if isinstance(error, failures.TimeoutError | TimeoutError):
            message = (
                f"{self} did not answer within {self._at.timeout:g} s; see whether it is stopped or overloaded, or"
                " raise the setting lock_timeout (TB_CELERY_LOCK_TIMEOUT)"
            )
            return StoreTimeoutError(message)
        if _is_replica(error):
            what = REPLICA
        elif isinstance(error, failures.AuthenticationError):
            what = "refuses the user or the password; correct them in the setting store (TB_CELERY_STORE)"
        elif isinstance(error, failures.NoPermissionError) or re.search(FORBIDDEN, text):
            what = f"does not let this user do what is needed ({text}); change its ACL as docs/redis.md says"
        elif isinstance(error, BusyLoadingError):
            what = "is still loading its data; wait for it"
        elif isinstance(error, failures.ConnectionError | OSError):
            what = f"cannot be reached ({text}); start it, or name another in the setting store (TB_CELERY_STORE)"
        elif isinstance(error, failures.OutOfMemoryError) or "OOM command" in text:
            what = "is out of memory; raise its maxmemory, or name another in the setting store (TB_CELERY_STORE)"
        elif "WRONGTYPE" in text:
            what = (
                "holds something else under the name of one of our keys; remove it, or choose another prefix in the"
                " setting key_prefix (TB_CELERY_KEY_PREFIX)"
            )
        elif text.startswith("TRYAGAIN") or isinstance(error, failures.TryAgainError):
            what = "is moving our keys to another node; wait until it has done so"
        else:
            what = f"refuses the command ({text})"
        return StoreError(f"{self} {what}")


def _is_replica(error: Exception) -> bool:
    # Before version 7 a script's error has a code of its own, and the command's in its text.
    return isinstance(error, failures.ReadOnlyError) or "-READONLY " in str(error)


class ServerClock:
    """The server's clock, as far as its answers tell: for deadlines, never for decisions.

    Every host that asks the same server, or any that keeps time, has the same one: instants are nanoseconds since 1970.

    Args:
        server: whom to ask, where no answer has told it yet.
    """

    identity = zlib.crc32(b"a server's nanoseconds since 1970")

    def __init__(self, server: Server) -> None:
        self.local = SystemClock().now
        self._server = server
        self._ahead: int | None = None

    def learn(self, now: int, sent: int, received: int) -> None:
        """Note that the server's clock read ``now`` some time between two readings of ours."""
        least, most = now - received, now - sent
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)

    def now(self) -> int:
        if self._ahead is None:
            with suppress(StoreError):  # whoever goes on to ask for tokens will hear of it
                sent = self.local()
                seconds, microseconds = self._server.command("TIME")
                self.learn(int(seconds) * SECOND + int(microseconds) * 1000, sent, self.local())
            if self._ahead is None:
                self._ahead = time.time_ns() - self.local()
        return self.local() + self._ahead

    def wall(self) -> int:
        return self.now()

    sleep = SystemClock.sleep
    sleep_async = SystemClock.sleep_async
