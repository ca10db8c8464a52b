"""What can go wrong with a server, and what a store then does: one clear sentence, and never a token too many."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from private_redis import PrivateServer, private_server, wait_until
from servers import until

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.limiter import Limiter
from tb_celery.stores.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server

API = Bucket("api", (Limit(5, 0.001),))
OTHER = Bucket("other", (Limit(5, 0.001),))
QUICK = Bucket("quick", (Limit(2, 10),))
BUCKETS = [API, OTHER, QUICK]


@pytest.fixture(scope="module")
def own() -> Iterator[PrivateServer]:
    """A server to be mistreated. Each test leaves it as it was, but for what is stored."""
    with private_server("--enable-debug-command", "yes") as server:
        yield server


@pytest.fixture
def limiter(own: PrivateServer) -> Limiter:
    Limiter([], store := RedisStore(own.url)).store.clock.now()
    store.server.command("FLUSHALL")
    return Limiter(BUCKETS, RedisStore(own.url, timeout=5))


def served(limiter: Limiter, bucket: str = "api") -> int:
    """How many tokens are there, by taking them."""
    return sum(bool(limiter.acquire(bucket)) for _ in range(8))


# -- away, or slow


def test_a_server_that_is_not_there_is_named_with_the_setting_and_without_the_password() -> None:
    store = RedisStore("redis://user:s3cret@127.0.0.1:1/0")
    with pytest.raises(
        StoreError, match=r"^Redis server redis://127\.0\.0\.1:1/0 cannot be reached .*setting store"
    ) as info:
        Limiter(BUCKETS, store).acquire("api")
    assert "s3cret" not in "".join(traceback.format_exception(info.value))
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)  # noqa: S301 - our own
    # What knows no better is told the time of this host.
    assert store.clock.now() > 1_600_000_000 * SECOND


def test_a_wrong_password_is_refused_without_showing_it(own: PrivateServer) -> None:
    admin = RedisStore(own.url).server
    admin.command("CONFIG", "SET", "requirepass", "right")
    try:
        for wrong in ("s3cret", ""):
            store = RedisStore(own.url.replace("//", f"//:{wrong}@" if wrong else "//"))
            with pytest.raises(
                StoreError, match="refuses the user or the password; correct them in the setting store"
            ) as info:
                Limiter(BUCKETS, store).acquire("api")
            assert "s3cret" not in "".join(traceback.format_exception(info.value))
        right = Limiter(BUCKETS, RedisStore(own.url.replace("//", "//:right@")))
        assert right.acquire("api")
    finally:
        RedisStore(own.url.replace("//", "//:right@")).server.command("CONFIG", "SET", "requirepass", "")


def test_a_server_that_stands_still_is_a_timeout_and_no_answer_goes_to_the_wrong_call(
    own: PrivateServer, limiter: Limiter
) -> None:
    hasty = Limiter(BUCKETS, RedisStore(own.url, timeout=0.2))
    assert hasty.acquire("api")
    own.pause()
    try:
        for _ in range(2):
            with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.2 s; .*setting lock_timeout"):
                hasty.acquire("api")
    finally:
        own.resume()
    until(own.answers, "it answers again")
    assert hasty.acquire("other").tokens == 4
    # Sent once each: none of the two is known to have been served, and neither was served twice.
    assert 2 <= served(limiter) <= 4


def test_a_call_that_is_interrupted_leaves_no_answer_behind(own: PrivateServer, limiter: Limiter) -> None:
    assert limiter.acquire("api")

    def interrupt(*_: object) -> None:
        message = "soft time limit"
        raise RuntimeError(message)

    before = signal.signal(signal.SIGALRM, interrupt)
    own.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(RuntimeError, match="soft time limit"):
            limiter.acquire("api")
    finally:
        own.resume()
        signal.signal(signal.SIGALRM, before)
    assert limiter.acquire("other").bucket == "other"
    assert 3 <= served(limiter) <= 4


@pytest.mark.usefixtures("limiter")
def test_greenlets_go_on_while_a_server_stands_still(own: PrivateServer) -> None:
    script = textwrap.dedent(
        """
        from gevent import monkey; monkey.patch_all()
        import sys, gevent
        from tb_celery import Bucket, Limit, Limiter
        from tb_celery.stores.redis import RedisStore
        limiter = Limiter([Bucket("api", (Limit(5, 0.001),))], RedisStore(sys.argv[1]))
        asking = [gevent.spawn(limiter.acquire, "api") for _ in range(20)]
        gevent.joinall(asking)
        print(sum(bool(one.value) for one in asking), flush=True)
        sys.stdin.readline()
        waiting = gevent.spawn(limiter.acquire, "api")
        gevent.sleep(0)
        print("others go on" if not waiting.ready() else "too fast", flush=True)
        print(waiting.get().allowed, flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, own.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "5\n"
        own.pause()
        try:
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "others go on\n"
        finally:
            own.resume()
        assert process.stdout.readline() == "False\n"
    assert process.returncode == 0


def test_a_connection_that_the_server_has_closed_is_made_anew(own: PrivateServer, limiter: Limiter) -> None:
    for _ in range(3):
        assert limiter.acquire("api")
        RedisStore(own.url).server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert served(limiter) == 2


def test_a_fork_while_another_thread_asks_harms_neither(own: PrivateServer, limiter: Limiter) -> None:
    assert limiter.acquire("api")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    own.pause()
    try:
        asking = threading.Thread(target=lambda: answers.put(limiter.acquire("api").tokens))
        asking.start()
        child = context.Process(target=lambda: answers.put(limiter.acquire("other").tokens))
        child.start()
    finally:
        own.resume()
    asking.join()
    child.join()
    assert sorted(round(answers.get()) for _ in range(2)) == [3, 4]
    assert child.exitcode == 0


# -- a server that has lost its state


def test_after_an_empty_restart_buckets_start_empty_for_those_who_knew_them(caplog: pytest.LogCaptureFixture) -> None:
    with private_server() as own:
        limiter, neighbour = (Limiter(BUCKETS, RedisStore(own.url)) for _ in range(2))
        assert served(limiter) == 5
        assert neighbour.acquire("other")
        own.restart()
        for each in (limiter, neighbour):
            assert not each.acquire("api")
            assert not each.acquire("other", key="never seen before")
        assert "has lost its state: buckets start empty" in caplog.text
        assert len(caplog.records) == 1  # the first to find out has told the others
        # And fill from the instant of the loss.
        assert limiter.wait("quick", cost=2, timeout=1)
        assert not limiter.acquire("quick")
        now, [state] = limiter.store.read(QUICK.draw("another", QUICK.charge(1)))
        wait_until(RedisStore(own.url).server, max(now, state.full_at))
        assert limiter.acquire("quick", cost=2, key="another")


def test_a_newcomer_after_the_loss_does_not_hide_it_from_those_who_knew(caplog: pytest.LogCaptureFixture) -> None:
    with private_server() as own:
        old = Limiter(BUCKETS, RedisStore(own.url))
        assert served(old) == 5
        own.restart()
        # It cannot know: the store is new to it, and the bucket full.
        new = Limiter(BUCKETS, RedisStore(own.url))
        assert served(new) == 5
        assert not old.acquire("api")
        assert not old.acquire("other")
        assert not new.acquire("other")
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_forked_child_knows_what_its_parent_knew() -> None:
    with private_server() as own:
        limiter = Limiter(BUCKETS, RedisStore(own.url))
        limiter.peek("api")  # as a worker does before it forks its pool
        own.restart()
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        child = context.Process(target=lambda: answers.put(bool(limiter.acquire("api"))))
        child.start()
        assert answers.get() is False
        child.join()


def test_reset_makes_full_after_a_loss_too() -> None:
    with private_server() as own:
        limiter = Limiter(BUCKETS, RedisStore(own.url))
        assert served(limiter) == 5
        own.restart()
        assert not limiter.acquire("api")
        limiter.reset("api")
        assert served(limiter) == 5
        assert served(limiter, "other") == 0


def test_a_damaged_record_counts_as_empty(limiter: Limiter, caplog: pytest.LogCaptureFixture) -> None:
    store = limiter.store
    assert isinstance(store, RedisStore)
    assert limiter.acquire("api")
    (name,) = store.server.command("KEYS", "*:api:*")
    for garbage in (b"", b"letter", bytes(56), b"\xff" * 56, b"\xff" * 57):
        store.server.command("SET", name, garbage)
        assert not limiter.acquire("api")
        refusal = limiter.acquire("api")
        assert 999 < refusal.wait <= 1000
    assert caplog.text.count("holds a record of bucket 'api' that is none: it starts empty") == 1


# -- a server that refuses


def test_a_script_that_was_flushed_goes_along_with_the_call(limiter: Limiter) -> None:
    store = limiter.store
    assert isinstance(store, RedisStore)
    for left in (4, 3, 2):
        assert round(limiter.acquire("api").tokens) == left
        store.server.command("SCRIPT", "FLUSH")


def test_a_replica_is_refused_and_the_new_primary_is_found(own: PrivateServer, limiter: Limiter) -> None:
    assert limiter.acquire("api")
    with private_server() as primary:
        own_address, primary_address = (url.split("/")[2].split(":") for url in (own.url, primary.url))
        admin = RedisStore(own.url).server
        RedisStore(primary.url).server.command("REPLICAOF", *own_address)
        until(lambda: RedisStore(primary.url).server.facts().get("master_link_status") == "up", "they are in step")
        RedisStore(primary.url).server.command("REPLICAOF", "NO", "ONE")
        admin.command("REPLICAOF", *primary_address)
        with pytest.raises(StoreError, match="is a read-only replica; name the primary in the setting store"):
            limiter.acquire("api")
        # What was granted before goes on in the new one.
        assert served(Limiter(BUCKETS, RedisStore(primary.url))) == 4
        until(lambda: admin.facts().get("master_link_status") == "up", "it has what was granted there")
        admin.command("REPLICAOF", "NO", "ONE")
    assert not limiter.acquire("api")
    assert limiter.acquire("other")


def test_without_memory_nothing_is_taken_of_any_bucket(limiter: Limiter) -> None:
    store = limiter.store
    assert isinstance(store, RedisStore)
    assert limiter.acquire("api")
    store.server.command("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="is out of memory; raise its maxmemory"):
            limiter.acquire({"other": 1, "api": 1})
    finally:
        store.server.command("CONFIG", "SET", "maxmemory", 0)
    assert served(limiter) == 4
    assert served(limiter, "other") == 5


@pytest.mark.parametrize("pattern", ["*:api:*", "*:store"])
def test_a_key_of_somebody_elses_is_named_with_the_setting(limiter: Limiter, pattern: str) -> None:
    store = limiter.store
    assert isinstance(store, RedisStore)
    assert limiter.acquire("api")
    (name,) = store.server.command("KEYS", pattern)
    store.server.command("DEL", name)
    store.server.command("LPUSH", name, "letter")
    other = Limiter(BUCKETS, RedisStore(store.server.place))
    with pytest.raises(
        StoreError, match=r"holds something else under the name of one of our keys; .*setting key_prefix"
    ):
        other.acquire("api")
    store.server.command("DEL", name)
    store.server.command("SET", name, "letter")


def test_a_user_without_the_rights_is_told_which(own: PrivateServer) -> None:
    admin = RedisStore(own.url).server
    admin.command("ACL", "SETUSER", "weak", "on", ">s3cret", "~*", "+@read", "+info")
    try:
        weak = Limiter(BUCKETS, RedisStore(own.url.replace("//", "//weak:s3cret@")))
        with pytest.raises(StoreError, match=r"does not let this user do what is needed \(.*eval.*docs/redis\.md"):
            weak.acquire("api")
    finally:
        admin.command("ACL", "DELUSER", "weak")


def test_the_rights_that_the_documentation_names_will_do(own: PrivateServer, limiter: Limiter) -> None:
    page = (Path(__file__).parent.parent / "docs" / "redis.md").read_text("utf-8")
    (rights,) = re.findall(r"rights \(ACL\) \| `([^`]+)`", page)
    admin = RedisStore(own.url).server
    admin.command("ACL", "SETUSER", "worker", "on", ">pw", *rights.split())
    try:
        worker = Limiter(BUCKETS, RedisStore(own.url.replace("//", "//worker:pw@")))
        assert worker.acquire({"api": 1, "other": 2}, place=Place())
        assert worker.status("api").keys == 1
        assert worker.reset("api") == 1
        assert worker.reset("other") == 1
        assert limiter.acquire("api", cost=5)
    finally:
        admin.command("ACL", "DELUSER", "worker")


def test_a_server_that_evicts_is_warned_of(
    own: PrivateServer, caplog: pytest.LogCaptureFixture, limiter: Limiter
) -> None:
    admin = RedisStore(own.url).server
    admin.command("CONFIG", "SET", "maxmemory", 10**9)
    admin.command("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    try:
        assert limiter.acquire("api")
        assert limiter.acquire("api")
    finally:
        admin.command("CONFIG", "SET", "maxmemory", 0)
        admin.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "its maxmemory-policy must be noeviction, not volatile-lru" in caplog.text


# -- clusters, sentinels, sockets


def test_a_cluster_sends_us_to_the_node_that_has_the_keys() -> None:
    nodes = [private_server("--cluster-enabled", "yes", "--cluster-config-file", f"nodes{number}") for number in (1, 2)]
    with nodes[0] as first, nodes[1] as second:
        one, two = (RedisStore(node.url).server for node in (first, second))
        one.command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        two.command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        one.command("CLUSTER", "MEET", "127.0.0.1", second.port)
        for node in (one, two):
            until(lambda node=node: b"cluster_state:ok" in node.command("CLUSTER", "INFO"), "the cluster is up")  # type: ignore[misc]
        dead = "127.0.0.1:1"
        for address in (first.url, second.url, f"redis+cluster://{dead},127.0.0.1:{first.port}"):
            limiter = Limiter(BUCKETS, RedisStore(address))
            slot = one.command("CLUSTER", "KEYSLOT", "{tb_celery}:store")
            assert limiter.acquire({"api": 1, "other": 1})
        assert round(limiter.status("api").limits[0].tokens) == 2
        # The slot moves, with its keys, while we ask.
        names = [node.command("CLUSTER", "MYID") for node in (one, two)]
        source, target = (one, two) if slot < 8192 else (two, one)
        (from_id, to_id) = names if slot < 8192 else reversed(names)
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", from_id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", to_id)
        port = second.port if slot < 8192 else first.port
        keys = source.command("KEYS", "{tb_celery}:*")
        source.command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
        assert limiter.acquire({"api": 1, "other": 1})  # ASK
        for node in (target, source):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", to_id)
        assert limiter.acquire({"api": 1, "other": 1})  # MOVED
        assert not limiter.acquire({"api": 1, "other": 1})


@pytest.mark.slow
def test_sentinels_tell_who_is_the_primary(tmp_path: Path) -> None:
    with private_server() as first, private_server() as second:
        RedisStore(second.url).server.command("REPLICAOF", "127.0.0.1", first.port)
        until(lambda: RedisStore(second.url).server.facts().get("master_link_status") == "up", "they are in step")
        conf = tmp_path / "sentinel.conf"
        conf.write_text(f"sentinel monitor main 127.0.0.1 {first.port} 1\n", "ascii")
        with PrivateServer.sentinel(conf) as sentinel:
            until(lambda: len(sentinel.command("SENTINEL", "REPLICAS", "main")), "it knows the replica")
            limiter = Limiter(BUCKETS, RedisStore(sentinel.place.replace("redis://", "redis+sentinel://") + "main/0"))
            assert limiter.acquire("api")
            nobody = RedisStore(sentinel.place.replace("redis://", "redis+sentinel://") + "nobody")
            with pytest.raises(StoreError, match="cannot be reached"):
                Limiter(BUCKETS, nobody).acquire("api")

            def fails_over() -> bool:
                try:
                    return bool(sentinel.command("SENTINEL", "FAILOVER", "main"))
                except StoreError:  # it does not know the replica well enough yet
                    return False

            until(fails_over, "the sentinel agrees")
            until(lambda: RedisStore(second.url).server.facts().get("role") == "master", "it is the primary")

            def found() -> bool:
                try:
                    return not limiter.acquire("api", cost=5)
                except StoreError:
                    return False

            until(found, "the store asks the new primary")
            until(lambda: RedisStore(first.url).server.facts().get("role") == "slave", "the old one is a replica")
            until(found, "the store does not go back")
            assert served(limiter) == 4


def test_a_socket_in_the_file_system_will_do(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with private_server("--unixsocket", str(path)):
        limiter = Limiter(BUCKETS, RedisStore(f"unix://{path}?db=1"))
        assert limiter.acquire("api", place=Place())
        assert served(limiter) == 4
    with pytest.raises(StoreError, match=re.escape(f"Redis server unix://{path} cannot be reached")):
        limiter.acquire("api")
