"""What can go wrong with a server, and what a store then does: one clear sentence, and never a token too many."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from private_redis import FakeTimeStore, PrivateServer, private_server, wait_until
from servers import until

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.doctor import examine
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.limiter import Limiter
from tb_celery.stores.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server

API = Bucket("api", (Limit(5, 0.002),))
OTHER = Bucket("other", (Limit(5, 0.002),))
QUICK = Bucket("quick", (Limit(2, 10),))
BUCKETS = [API, OTHER, QUICK]


@pytest.fixture(scope="module")
def own() -> Iterator[PrivateServer]:
    """A server to be mistreated. Each test leaves it as it was, but for what is stored."""
    with private_server() as server:
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
    hasty = Limiter(BUCKETS, RedisStore(own.url, timeout=1))
    assert hasty.acquire("api")
    own.pause()
    try:
        for _ in range(2):
            with pytest.raises(StoreTimeoutError, match=r"did not answer within 1 s; .*setting lock_timeout"):
                hasty.acquire("api")
    finally:
        own.resume()
    until(own.answers, "it answers again")
    assert hasty.acquire("other").tokens == 4
    # Sent once each: none of the two is known to have been served, and neither was served twice.
    assert 2 <= served(limiter) <= 4


def test_an_address_can_shorten_the_patience_and_not_lengthen_it(own: PrivateServer, limiter: Limiter) -> None:
    assert limiter.acquire("other")
    own.pause()
    try:
        for asked, timeout, told in (("60", 0.2, "0.2"), ("0.1", 10, "0.1")):
            address = f"{own.url}?socket_timeout={asked}&socket_connect_timeout={asked}"
            with pytest.raises(StoreTimeoutError, match=f"did not answer within {told} s"):
                Limiter(BUCKETS, RedisStore(address, timeout)).acquire("api")
    finally:
        own.resume()


def connections(silent: socket.socket) -> int:
    """How many were made since the last time."""
    count = 0
    with suppress(BlockingIOError):
        while True:
            silent.accept()[0].close()
            count += 1
    return count


def test_hosts_that_are_silent_take_one_timeout_together(own: PrivateServer, limiter: Limiter) -> None:
    assert limiter.acquire("other")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.2 s"):
            Limiter(BUCKETS, RedisStore(f"redis+cluster://{dead},{dead},{dead}", timeout=0.6)).acquire("api")
        silent.settimeout(0)
        assert connections(silent) == 3
        with pytest.raises(StoreError, match="cannot be reached"):
            Limiter(BUCKETS, RedisStore(f"redis+sentinel://{dead},{dead}/main", timeout=0.6)).acquire("api")
        assert connections(silent) == 2  # each of which has a third of the time-out
        found = RedisStore(f"redis+cluster://{dead},127.0.0.1:{own.port}", timeout=4)
        assert Limiter(BUCKETS, found).acquire("api")


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
        limiter = Limiter([Bucket("api", (Limit(5, 0.002),))], RedisStore(sys.argv[1]))
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


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
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
        assert caplog.text.count("lost its state") == 1  # the first to find out has told the others
        # And fill from the instant of the loss.
        assert limiter.wait("quick", cost=2, timeout=1)
        assert not limiter.acquire("quick")
        now, _, [state] = limiter.store.read(QUICK.draw("another", QUICK.charge(1)))
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
        assert caplog.text.count("lost its state") == 1


def test_after_a_restart_that_nobody_remembers_large_buckets_have_what_was_refilled_since(
    caplog: pytest.LogCaptureFixture,
) -> None:
    large = Bucket("large", (Limit(100, 0.02),))
    with private_server() as own:
        limiter = Limiter([*BUCKETS, large], RedisStore(own.url))
        assert limiter.peek("large").tokens < 10
        assert not limiter.acquire("large", cost=10)
        assert served(limiter) == 5
        assert caplog.text.count("nobody knows what") == 1
        assert (
            "before it was started: bucket 'large', which takes long to fill, has what was refilled since"
            in caplog.text
        )
        limiter.reset("large")
        assert limiter.acquire("large", cost=100)


def test_a_new_server_is_nothing_to_warn_of_where_no_bucket_takes_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with private_server() as own:
        limiter = Limiter(BUCKETS, RedisStore(own.url))
        assert served(limiter) == 5
        assert limiter.status("other").limits
        large = Limiter([Bucket("large", (Limit(100, 0.02),))], RedisStore(own.url))
        large.reset("large")  # whoever does this knows
        assert large.acquire("large", cost=100)
    assert caplog.text == ""


def test_what_was_made_full_on_a_new_server_stays_so_when_it_is_full_again() -> None:
    with private_server() as own:
        limiter = Limiter([Bucket("large", (Limit(100, 0.02),))], RedisStore(own.url))
        limiter.reset("large")
        for actual in (0, 0.0001):
            assert limiter.acquire("large", cost=100)
            limiter.settle("large", taken=100, actual=actual)
            until(lambda: limiter.peek("large").tokens == 100, "it is full again")
        assert limiter.acquire("large", cost=100)


def test_a_pause_that_was_lost_is_heeded_by_nobody_however_many_are_given_since() -> None:
    with private_server() as own:
        giver, asker = (Limiter(BUCKETS, RedisStore(own.url)) for _ in range(2))
        giver.pause("quick", 60)
        assert asker.acquire("quick").paused
        own.restart()
        giver.peek("api")
        giver.pause("other", 60)
        assert not asker.acquire("quick").paused


def test_a_clock_that_was_set_back_since_a_loss_stops_nobody_for_longer_than_from_empty(server: str) -> None:
    clock = FakeClock(17 * 3600 * SECOND)
    store = FakeTimeStore(server, clock)
    limiter = Limiter(BUCKETS, store)
    assert served(limiter) == 5
    store.server.command("UNLINK", *store.server.command("KEYS", f"{{{store.prefix}}}:*"))
    assert not limiter.acquire("api")
    clock.advance(-3600 * SECOND)
    refusal = limiter.acquire("other")
    assert 0 < refusal.wait <= OTHER.limits[0].span / SECOND
    clock.advance(refusal.at - refusal.now)
    assert limiter.acquire("other")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
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
        assert 499 < refusal.wait <= 500
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
        for cost in (1, 5):  # a refusal, too, would come from what it had when it was the primary
            with pytest.raises(StoreError, match="is a read-only replica; name the primary in the setting store"):
                limiter.acquire("api", cost=cost)
        # What was granted before goes on in the new one.
        assert served(Limiter(BUCKETS, RedisStore(primary.url))) == 4
        until(lambda: admin.facts().get("master_link_status") == "up", "it has what was granted there")
        admin.command("REPLICAOF", "NO", "ONE")
    assert not limiter.acquire("api")
    assert limiter.acquire("other")


def test_a_server_that_is_too_old_is_named_with_the_version_that_will_do(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = limiter.store
    assert isinstance(store, RedisStore)
    monkeypatch.setattr(store.server, "facts", lambda: {"redis_version": "6.0.16", "role": "master"})
    with pytest.raises(
        StoreError, match=r"^Redis server .* is of version 6\.0\.16; it must be 6\.2 or newer, .*\(PXAT\)"
    ):
        limiter.acquire("api")


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


@pytest.mark.usefixtures("limiter")
@pytest.mark.parametrize(
    ("rights", "wanting"), [(["+@read", "+info"], "eval"), (["+@all", "-set"], "'set'|user executing the script")]
)
def test_a_user_without_the_rights_is_told_which(own: PrivateServer, rights: list[str], wanting: str) -> None:
    """A command of its own, and one in a script."""
    admin = RedisStore(own.url).server
    admin.command("ACL", "SETUSER", "weak", "on", ">s3cret", "~*", *rights)
    try:
        weak = Limiter(BUCKETS, RedisStore(own.url.replace("//", "//weak:s3cret@")))
        sentence = rf"does not let this user do what is needed \(.*({wanting}).*docs/redis\.md"
        with pytest.raises(StoreError, match=sentence):
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
        worker.pause("api", 60)
        worker.resume("api")
        worker.set("api", refill_rate=1)
        worker.unset("api")
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
        *_, check = examine(lambda: limiter, None)
        assert not check.ok
        assert "volatile-lru" in check.detail
        assert check.detail.endswith("set maxmemory-policy noeviction")
    finally:
        admin.command("CONFIG", "SET", "maxmemory", 0)
        admin.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert [record.levelno for record in caplog.records if "evict" in record.message] == [logging.WARNING]
    assert "its maxmemory-policy must be noeviction, not volatile-lru" in caplog.text


def test_the_doctor_tells_what_the_server_is_and_what_it_keeps(own: PrivateServer, limiter: Limiter) -> None:
    admin = RedisStore(own.url).server
    *_, check = examine(lambda: limiter, None)
    assert check.ok
    assert re.search(
        r"(Valkey|Redis) \d+\.\d+\.\d+, primary, maxmemory-policy noeviction, no append-only", check.detail
    )
    admin.command("CONFIG", "SET", "appendonly", "yes")
    try:
        *_, check = examine(lambda: limiter, None)
        assert check.detail.endswith("an append-only file")
    finally:
        admin.command("CONFIG", "SET", "appendonly", "no")
    admin.command("REPLICAOF", "127.0.0.1", 1)
    try:
        *_, check = examine(lambda: Limiter([], RedisStore(own.url)), None)
        assert not check.ok
        assert "is a read-only replica" in check.detail
    finally:
        admin.command("REPLICAOF", "NO", "ONE")
