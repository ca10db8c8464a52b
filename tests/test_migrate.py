"""From a state file to a server: nobody gets a token by it, and nobody loses one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import pytest

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.errors import ConfigurationError
from tb_celery.limiter import Limiter
from tb_celery.migrate import migrate
from tb_celery.stores.file import FileStore
from tb_celery.stores.redis import RedisStore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.server

API = Bucket("api", (Limit(5, 0.002),))
BOTH = Bucket("both", (Limit(50, 0.1), Limit(5, 0.002)))
FULL = Bucket("full", (Limit(5, 0.002),))
BUCKETS = [API, BOTH, FULL]


@pytest.fixture
def source(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "buckets.state")


@pytest.fixture
def target(server: str) -> RedisStore:
    return RedisStore(server, prefix=uuid.uuid4().hex)


def test_every_limit_key_and_line_goes_on_where_it_stood(source: FileStore, target: RedisStore) -> None:
    before, after = Limiter(BUCKETS, source), Limiter(BUCKETS, target)
    before.acquire("api", cost=3)
    for number in range(50):
        before.acquire("both", cost=1 + number % 4, key=f"sk-{number}")
    before.acquire("api", cost=5, key="line")
    turns = [before.acquire("api", key="line", place=Place()).wait for _ in range(3)]
    begin = time.monotonic()
    assert migrate(BUCKETS, source, target) == (1 + 50 * 2 + 1, 0)
    for bucket, key in [("api", None), ("full", None), ("api", "line"), *(("both", f"sk-{n}") for n in range(60))]:
        old, new = (limiter.status(bucket, key=key).limits for limiter in (before, after))
        assert [limit.tokens for limit in new] == pytest.approx([limit.tokens for limit in old], abs=0.2)
        assert [limit.waiting for limit in new] == pytest.approx([limit.waiting for limit in old], abs=0.2)
    following = after.acquire("api", key="line", place=Place()).wait
    assert following + time.monotonic() - begin == pytest.approx(turns[-1] + 500, abs=1)
    assert after.acquire("api", cost=2)
    assert not after.acquire("api")


def test_no_token_is_made_on_the_way(source: FileStore, target: RedisStore) -> None:
    quick = Bucket("quick", (Limit(1000, 100),))
    state = source.acquire(quick.draw(None, quick.charge(1000)))
    assert state
    migrate([quick], source, target)
    # Both look at the same instant or later: the server's state is never the fuller one.
    now, _, [new] = target.read(quick.draw(None))
    then, _, [old] = source.read(quick.draw(None))
    assert new.full_at - now >= old.full_at - then


def test_what_is_ordered_stands_on_the_server_for_as_long_as_it_would_have(
    source: FileStore, target: RedisStore
) -> None:
    before, after = Limiter(BUCKETS, source), Limiter(BUCKETS, target)
    before.pause("api", 600)
    before.pause("both", 300, key="sk-1")
    before.pause("full", 300)
    before.resume("full")
    before.set("both", refill_rate=1, limit=1, duration=900)
    assert before.acquire("both", cost=5)
    assert migrate(BUCKETS, source, target) == (2, 3)
    for limiter in (before, after, Limiter(BUCKETS, RedisStore(target.server.place, prefix=target.prefix))):
        assert limiter.status("api").paused == pytest.approx(600, abs=30)
        assert limiter.status("both", key="sk-1").paused == pytest.approx(300, abs=30)
        assert not limiter.acquire("api")
        assert limiter.peek("full")
        changed = limiter.status("both").limits[1]
        assert float(changed.limit.refill_rate) == 1
        assert changed.ends == pytest.approx(900, abs=30)
    after.resume("api")
    assert after.acquire("api", cost=5)


def test_what_a_process_claims_that_declares_less_counts_on_the_server_for_as_long(
    source: FileStore, target: RedisStore
) -> None:
    laxer = [Bucket("api", (Limit(50, 0.02),))]
    assert Limiter(laxer, source).acquire("api")
    assert Limiter(BUCKETS, FileStore(source.path)).acquire("api")
    assert migrate(laxer, source, target) == (1, 1)
    [limit] = Limiter(laxer, target).status("api").limits
    assert (limit.limit.capacity, limit.elsewhere) == (5, True)


def test_a_server_that_others_use_much_is_looked_through_in_pieces(source: FileStore, target: RedisStore) -> None:
    Limiter(BUCKETS, source).acquire("api", cost=5)
    target.read(())
    strangers = (word for number in range(3000) for word in (f"{uuid.uuid4().hex}:{number}", "letter"))
    target.server.command("MSET", *strangers)
    migrate(BUCKETS, source, target)
    with pytest.raises(ConfigurationError, match="already"):
        migrate(BUCKETS, source, target)


def test_what_counts_as_lost_in_the_file_starts_empty_on_the_server(source: FileStore, target: RedisStore) -> None:
    assert Limiter(BUCKETS, source).acquire("api")
    source.path.write_bytes(source.path.read_bytes()[:1000])
    assert not Limiter(BUCKETS, FileStore(source.path)).acquire("full")
    migrate(BUCKETS, FileStore(source.path), target)
    assert not Limiter(BUCKETS, target).acquire("full")
    _, _, [state] = target.read(FULL.draw(None))
    assert state.full_at - target.clock.now() < FULL.limits[0].span - SECOND // 1_000_000


def test_a_server_in_use_is_left_alone(source: FileStore, target: RedisStore) -> None:
    Limiter(BUCKETS, source).acquire("api")
    Limiter(BUCKETS, target).acquire("api", cost=2)
    with pytest.raises(ConfigurationError, match=r"has buckets under the prefix .* already; choose another setting"):
        migrate(BUCKETS, source, target)
    assert Limiter(BUCKETS, target).acquire("api", cost=3)


def test_a_server_that_was_only_looked_at_is_not_in_use(source: FileStore, target: RedisStore) -> None:
    Limiter(BUCKETS, source).acquire("api", cost=5)
    Limiter(BUCKETS, target).peek("api")
    migrate(BUCKETS, source, target)
    assert not Limiter(BUCKETS, RedisStore(target.server.place, prefix=target.prefix)).acquire("api")


def test_without_a_file_there_is_nothing_to_carry_over(source: FileStore, target: RedisStore) -> None:
    with pytest.raises(ConfigurationError, match="does not exist; name the one to carry over"):
        migrate(BUCKETS, source, target)
    assert not source.path.exists()


# -- the command


def tb_celery(tmp_path: Path, *args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TB_CELERY_")}
    return subprocess.run(
        [sys.executable, "-m", "tb_celery", *args],
        env={
            **environment,
            "HOME": str(tmp_path),
            "TB_CELERY_BUCKETS": '{"api": {"capacity": 5, "refill_rate": 0.002}}',
        }
        | {f"TB_CELERY_{name}": text for name, text in settings.items()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_carries_over_what_the_settings_or_the_command_line_name(server: str, tmp_path: Path) -> None:
    prefix = uuid.uuid4().hex
    Limiter([API], FileStore(tmp_path / "old.state")).acquire("api", cost=4)
    done = tb_celery(tmp_path, "migrate", "--from", f"file:{tmp_path}/old.state", "--to", server, KEY_PREFIX=prefix)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"limits carried over to {prefix!r} on the server: 1; the others are full\n"
    assert Limiter([API], RedisStore(server, prefix=prefix)).status("api").limits[0].tokens == pytest.approx(1, abs=0.2)
    again = tb_celery(tmp_path, "migrate", "--from", f"file:{tmp_path}/old.state", "--to", server, KEY_PREFIX=prefix)
    assert (again.returncode, again.stdout) == (1, "")
    assert "choose another setting key_prefix" in again.stderr
    file = FileStore(tmp_path / "full.state")
    Limiter([API], file).pause("api", 60)
    full = tb_celery(tmp_path, "migrate", "--from", f"file:{file.path}", "--to", server, KEY_PREFIX=f"{prefix}-2")
    assert full.stdout.splitlines() == [
        f"every bucket is full, and needs no record under '{prefix}-2' on the server",
        "pauses and other numbers carried over: 1",
    ]
    status = tb_celery(tmp_path, "status", "api", "--json", KEY_PREFIX=prefix, STORE=server)
    assert json.loads(status.stdout)["buckets"]["api"]["limits"][0]["current_tokens"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "Missing option '--to'"),
        (("--to", "file"), "--to must be the address of a server, as in redis://redis.example.com/0, not 'file'"),
        (("--to", "nonsense"), "setting store must be"),
        (("--from", "x.state", "--to", "redis://h"), "--from must be a state file, as in file:/"),
        (("--from", "file:", "--to", "redis://h"), "--from must be a state file"),
        (("--to", "redis://h"), "does not exist; name the one to carry over in the setting state_file"),
    ],
)
def test_what_cannot_be_carried_over_is_named(tmp_path: Path, args: tuple[str, ...], sentence: str) -> None:
    done = tb_celery(tmp_path, "migrate", *args, STATE_FILE=str(tmp_path / "none.state"))
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
