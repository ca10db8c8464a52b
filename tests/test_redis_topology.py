"""More than one server, or another way to it: clusters, sentinels, TLS, sockets in the file system."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from fleet import CAPACITY, RATE, Fleet
from private_redis import PrivateServer, binaries, private_server
from servers import PATIENCE, until
from valkey_server import free_port

from tb_celery.arithmetic import Place
from tb_celery.bucket import Bucket, Limit
from tb_celery.errors import StoreError
from tb_celery.limiter import Limiter
from tb_celery.stores.redis import RedisStore
from tb_celery.stores.redis_server import Server
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server
PATIENT = 3 * PATIENCE
"""A sentinel that was itself held up for two seconds does nothing for thirty (TILT)."""

API = Bucket("api", (Limit(5, 0.002),))
OTHER = Bucket("other", (Limit(5, 0.002),))
LARGE = Bucket("large", (Limit(1_000_000, 0.002),))
BUCKETS = [API, OTHER, LARGE]


def served(limiter: Limiter, bucket: str = "api") -> int:
    """How many tokens are there, by taking them."""
    return sum(bool(limiter.acquire(bucket)) for _ in range(8))


# -- clusters


class Cluster(NamedTuple):
    """Two nodes, each with half of the slots."""

    servers: tuple[PrivateServer, PrivateServer]
    nodes: tuple[Server, Server]

    @property
    def slot(self) -> int:
        """That of all our keys."""
        slot: int = self.nodes[0].command("CLUSTER", "KEYSLOT", "{tb_celery}:store")
        return slot

    def begin_move(self, source: int) -> None:
        """Have the slot be on its way from a node to the other one, with all keys that are there."""
        target = 1 - source
        ids = [node.command("CLUSTER", "MYID") for node in self.nodes]
        self.nodes[target].command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", ids[source])
        self.nodes[source].command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", ids[target])
        keys = self.nodes[source].command("KEYS", "{tb_celery}:*")
        self.nodes[source].command("MIGRATE", "127.0.0.1", self.servers[target].port, "", 0, 5000, "KEYS", *keys)

    def end_move(self, source: int) -> None:
        target = 1 - source
        name = self.nodes[target].command("CLUSTER", "MYID")
        for node in (self.nodes[target], self.nodes[source]):
            node.command("CLUSTER", "SETSLOT", self.slot, "NODE", name)


@contextmanager
def cluster() -> Iterator[Cluster]:
    buses = [free_port(), free_port()]  # or they are 10,000 above the servers' own ports, where there may be none
    options = [f"--cluster-enabled yes --cluster-config-file nodes --cluster-port {bus}".split() for bus in buses]
    with private_server(*options[0]) as first, private_server(*options[1]) as second:
        one, two = (Server(node.url) for node in (first, second))
        one.command("CLUSTER", "ADDSLOTS", *range(8192))
        two.command("CLUSTER", "ADDSLOTS", *range(8192, 16384))
        one.command("CLUSTER", "MEET", "127.0.0.1", second.port, buses[1])
        for node in (one, two):
            until(lambda node=node: b"cluster_state:ok" in node.command("CLUSTER", "INFO"), "the cluster is up")  # type: ignore[misc]
        yield Cluster((first, second), (one, two))


def test_a_cluster_sends_us_to_the_node_that_has_the_keys() -> None:
    with cluster() as found:
        (first, second), dead = found.servers, "127.0.0.1:1"
        for address in (first.url, second.url, f"redis+cluster://{dead},127.0.0.1:{first.port}"):
            limiter = Limiter(BUCKETS, RedisStore(address))
            assert limiter.acquire({"api": 1, "other": 1})
        assert round(limiter.status("api").limits[0].tokens) == 2
        # The slot moves, with its keys, while we ask.
        source = int(found.slot >= 8192)
        found.begin_move(source)
        assert limiter.acquire({"api": 1, "other": 1})  # ASK
        with pytest.raises(StoreError, match="is moving our keys to another node; wait until it has done so"):
            limiter.acquire("large")  # a record of which nobody knows yet where it belongs
        found.end_move(source)
        assert limiter.acquire({"api": 1, "other": 1})  # MOVED
        assert not limiter.acquire({"api": 1, "other": 1})
        # It is to go back, of which the node that is to have it knows nothing any more: ASK, MOVED, ASK...
        found.begin_move(1 - source)
        found.nodes[source].command("CLUSTER", "SETSLOT", found.slot, "STABLE")
        with pytest.raises(StoreError, match="send us to each other for one key; wait until the cluster is sound"):
            limiter.acquire("api")


def test_a_slot_that_moves_to_and_fro_under_load_loses_and_makes_no_token() -> None:
    with cluster() as found:
        addresses = [server.url for server in found.servers]
        granted, failures, done = [0] * 4, list[str](), threading.Event()
        asked = [Limiter(BUCKETS, RedisStore(addresses[number % 2])) for number in (0, 1)]

        def ask(number: int) -> None:
            while not done.is_set():
                try:
                    granted[number] += bool(asked[number % 2].acquire("large"))
                except StoreError as error:
                    failures.append(str(error))

        asked[0].reset("large")
        assert asked[0].acquire("large")
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            source = int(found.slot >= 8192)
            for move in range(6):
                before = sum(granted)
                found.begin_move((source + move) % 2)
                until(lambda before=before: sum(granted) > before + 10, "they are served meanwhile")  # type: ignore[misc]
                found.end_move((source + move) % 2)
                until(lambda before=before: sum(granted) > before + 20, "and afterwards")  # type: ignore[misc]
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert {re.sub(r".* is moving", "is moving", text) for text in failures} <= {
            "is moving our keys to another node; wait until it has done so"
        }
        left = asked[0].status("large").limits[0].tokens
        assert round(1_000_000 - left) == sum(granted) + 1


# -- sentinels


class Watched(NamedTuple):
    """A primary, its replica, and what a sentinel says of them."""

    primary: PrivateServer
    replica: PrivateServer
    sentinel: Server
    address: str
    """Of the store, by a sentinel that is silent and by this one."""


@contextmanager
def watched(folder: Path, down_after: int = 500) -> Iterator[Watched]:
    """``down_after`` so many milliseconds without an answer the primary is taken for dead."""
    with private_server() as first, private_server() as second, socket.create_server(("127.0.0.1", 0)) as silent:
        Server(second.url).command("REPLICAOF", "127.0.0.1", first.port)
        until(lambda: Server(second.url).facts().get("master_link_status") == "up", "they are in step")
        conf = folder / "sentinel.conf"
        lines = ["monitor main 127.0.0.1 {} 1", "down-after-milliseconds main {}", "failover-timeout main 5000"]
        conf.write_text("".join(f"sentinel {line}\n" for line in lines).format(first.port, down_after), "ascii")
        with PrivateServer.sentinel(conf) as sentinel:
            until(lambda: len(sentinel.command("SENTINEL", "REPLICAS", "main")), "it knows the replica")
            hosts = f"127.0.0.1:{silent.getsockname()[1]},{sentinel.place.removeprefix('redis://').rstrip('/')}"
            yield Watched(first, second, sentinel, f"redis+sentinel://{hosts}/main/0")


@pytest.mark.slow
def test_when_sentinels_are_told_to_change_the_primary_the_store_goes_along(tmp_path: Path) -> None:
    with watched(tmp_path, 60_000) as pair:  # or it may change it by itself, too, on a busy machine
        limiter = Limiter(BUCKETS, RedisStore(pair.address, timeout=3))
        assert limiter.acquire("api", cost=5)
        nobody = RedisStore(pair.address.replace("/main", "/nobody"), timeout=1)
        with pytest.raises(StoreError, match="cannot be reached"):
            Limiter(BUCKETS, nobody).acquire("api")

        def fails_over() -> bool:
            try:
                return bool(pair.sentinel.command("SENTINEL", "FAILOVER", "main"))
            except StoreError:  # it does not know the replica well enough yet
                return False

        until(fails_over, "the sentinel agrees", PATIENT)
        until(lambda: has_role(pair.replica, "master"), "it is the primary", PATIENT)
        until(lambda: has_role(pair.primary, "slave"), "the old one is a replica", PATIENT)
        # For tokens that are not there, of which a primary has nothing to write.
        until(lambda: answers(limiter), "the store asks the new primary", PATIENT)
        assert served(limiter, "other") == 5


def has_role(server: PrivateServer, role: str) -> bool:
    try:
        return Server(server.url).facts().get("role") == role
    except StoreError:  # the sentinel ends its connections
        return False


def answers(limiter: Limiter) -> bool:
    try:
        limiter.acquire("api")
    except StoreError:
        return False
    return True


@pytest.mark.slow
def test_when_the_primary_dies_what_was_granted_goes_on_at_the_next_one(tmp_path: Path) -> None:
    with watched(tmp_path) as pair:
        limiter = Limiter(BUCKETS, RedisStore(pair.address, timeout=3))
        assert limiter.acquire({"api": 4, "other": 1})
        names = sorted(Server(pair.primary.url).command("KEYS", "{tb_celery}:*"))
        both = [Server(each.url) for each in (pair.primary, pair.replica)]
        until(lambda: both[0].command("MGET", *names) == both[1].command("MGET", *names), "they are in step")
        pair.primary.stop()
        until(lambda: answers(limiter), "the store asks the new primary", PATIENT)
        assert not limiter.acquire("api")
        assert served(limiter, "other") == 4


@pytest.mark.slow
def test_a_fleet_comes_through_the_death_of_the_primary(client: str, tmp_path: Path) -> None:
    with watched(tmp_path) as pair, Fleet(tmp_path, client, pair.address, 1, lock_timeout=1).running() as fleet:
        ids = fleet.send(100)
        fleet.until_granted(ids, 20)
        pair.primary.stop()
        verdict = fleet.finish(ids, PATIENT)
        assert verdict.runs == [1] * 100
        # What the replica had not received yet when the primary died: at most what a full bucket gives at once.
        assert first_violation([(now, 1) for now in verdict.grants], 2 * CAPACITY, RATE) is None


# -- TLS, sockets


def _with_tls() -> str:
    """A server program that speaks TLS; not every one was built so."""
    for binary in binaries().values():
        if b"SSL_CTX_new" in Path(binary).read_bytes():
            return binary
    pytest.skip("no server program here speaks TLS")


def test_over_tls_a_server_must_show_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    binary, openssl = _with_tls(), shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    made = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -keyout {key} -out {certificate}"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([openssl, *made.split(), *name], check=True, capture_output=True)
    tls = f"--tls-port {port} --tls-auth-clients no --tls-cert-file {certificate} --tls-key-file {key}"
    with private_server(*tls.split(), "--tls-ca-cert-file", str(certificate), binary=binary) as own:
        place = f"127.0.0.1:{port}/0"
        for scheme in ("rediss", "valkeys"):
            limiter = Limiter(BUCKETS, RedisStore(f"{scheme}://{place}?ssl_ca_certs={certificate}"))
            assert limiter.acquire("api", place=Place())
        assert served(Limiter(BUCKETS, RedisStore(own.url))) == 3
        for address, sentence in (
            (f"rediss://:s3cret@{place}", "cannot be reached .*certificate verify failed"),
            (f"rediss://:s3cret@{place}?ssl_ca_certs={tmp_path}/none.pem", "cannot be reached"),
            (f"redis://:s3cret@{place}", "cannot be reached"),
        ):
            with pytest.raises(StoreError, match=sentence) as info:
                Limiter(BUCKETS, RedisStore(address, timeout=5)).acquire("api")
            assert "s3cret" not in str(info.value)


def test_a_socket_in_the_file_system_will_do(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with private_server("--unixsocket", str(path)):
        limiter = Limiter(BUCKETS, RedisStore(f"unix://{path}?db=1"))
        assert limiter.acquire("api", place=Place())
        assert served(limiter) == 4
    with pytest.raises(StoreError, match=re.escape(f"Redis server unix://{path} cannot be reached")):
        limiter.acquire("api")
