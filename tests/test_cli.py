from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.cli import main
from tb_celery.clock import FakeClock
from tb_celery.doctor import ABANDONED, PROBE, examine
from tb_celery.limiter import Limiter
from tb_celery.settings import open_limiter
from tb_celery.stores.file import FileStore
from tb_celery.stores.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SLOW = {"twitter_api": {"capacity": 5, "refill_rate": 0.001}}
ONE = {"twitter_api": {"capacity": 1, "refill_rate": 0.001}}


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        assert self.err == ""
        answer = json.loads(self.out)
        assert isinstance(answer, dict)
        return answer

    @property
    def plan(self) -> dict[str, Any]:
        plan = self.answer["plan"]
        assert isinstance(plan, dict)
        return plan

    @property
    def complaint(self) -> str:
        """The one sentence of an error."""
        assert (self.code, self.out) == (1, "")
        assert self.err.startswith("tb-celery")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err


class Call(Protocol):
    def __call__(self, *args: str | Path) -> Result: ...


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state file that the settings name in every test."""
    path = tmp_path / "state" / "buckets"
    monkeypatch.setenv("TB_CELERY_STATE_FILE", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in this process."""

    def call(*args: str | Path) -> Result:
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        assert isinstance(stop.value.code, int)
        return Result(stop.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of every state file that is opened in this process."""
    clock = FakeClock(now=10**15)
    monkeypatch.setattr("tb_celery.stores.file.SystemClock", lambda: clock)
    return clock


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path / "services.json", SLOW)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets from the settings."""
    buckets = {"twitter_api": {"capacity": 5, "refill_rate": 0.001}, "fast": ["10/s:10", "1000/d:1000"], "free": None}
    monkeypatch.setenv("TB_CELERY_BUCKETS", json.dumps(buckets))


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "tb_celery", *map(str, args)]


def run(*args: str | Path, **options: Any) -> Result:
    """The command in a process of its own."""
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=60, check=False, **options)
    return Result(done.returncode, done.stdout, done.stderr)


def at_once(count: int, *args: str | Path) -> list[Result]:
    processes = [
        subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    return [Result(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def limiter_on(state: Path, capacity: float = 5, rate: float = 0.001) -> Limiter:
    """What a worker has that declares the bucket in its own code."""
    return Limiter([Bucket("twitter_api", (Limit(capacity, rate),))], FileStore(state))


# -- check


def test_an_approved_plan(call: Call, config: Path) -> None:
    before = time.time()
    result = call("check", "--config", config)
    assert result.code == 0
    assert result.answer.keys() == {"all_approved", "timestamp", "plan"}
    assert result.answer["all_approved"] is True
    assert before <= result.answer["timestamp"] <= time.time()
    tokens = result.plan["twitter_api"].pop("current_tokens")
    assert result.plan == {"twitter_api": {"approved": True, "wait_time_seconds": 0.0, "current_tokens": tokens}}
    assert 4 <= tokens < 4.1


def test_scripts_and_workers_share_one_quota(call: Call, config: Path, state: Path) -> None:
    assert [call("check", "--config", config).code for _ in range(5)] == [0] * 5
    refused = run("check", "--config", config)
    assert (refused.code, refused.answer["all_approved"]) == (2, False)
    assert not limiter_on(state).acquire("twitter_api")


def test_what_workers_took_is_gone_for_scripts(call: Call, config: Path, state: Path) -> None:
    workers = limiter_on(state)
    assert [workers.acquire("twitter_api").allowed for _ in range(5)] == [True] * 5
    assert call("check", "--config", config).code == 2


@pytest.mark.parametrize("mode", [[], ["--each"]])
def test_first_checks_at_the_same_time_grant_the_quota_once(tmp_path: Path, mode: list[str]) -> None:
    config = write(tmp_path / "one.json", ONE)
    results = at_once(6, "check", "--config", config, *mode)
    assert sorted(result.code for result in results) == [0, 2, 2, 2, 2, 2]
    assert [result.err for result in results] == [""] * 6


def test_missing_numbers_are_10_1_and_1(call: Call, tmp_path: Path) -> None:
    config = write(tmp_path / "c.json", {"api": {}})
    assert 9 <= call("check", "--config", config).plan["api"]["current_tokens"] < 10
    limits = json.loads(call("status", "--json", "--config", config).out)["buckets"]["api"]["limits"]
    assert (limits[0]["capacity"], limits[0]["refill_rate"]) == (10, 1)


def test_all_or_nothing(call: Call, tmp_path: Path, clock: FakeClock) -> None:
    services = {"a": {"capacity": 5, "refill_rate": 1, "requested": 2}, "b": {"capacity": 1, "refill_rate": 0.1}}
    config = write(tmp_path / "c.json", services)
    assert call("check", "--config", config).code == 0
    refused = call("check", "--config", config)
    assert refused.code == 2
    assert refused.plan == {
        "a": {"approved": False, "current_tokens": 3.0, "wait_time_seconds": 0.0},
        "b": {"approved": False, "current_tokens": 0.0, "wait_time_seconds": 10.0},
    }
    clock.advance(10 * SECOND)
    assert call("check", "--config", config).plan["a"]["current_tokens"] == 3.0


def test_each_service_tells_its_own_wait(call: Call, tmp_path: Path, clock: FakeClock) -> None:
    services = {"a": {"capacity": 1, "refill_rate": 0.5}, "b": {"capacity": 1, "refill_rate": 0.1}}
    config = write(tmp_path / "c.json", services)
    call("check", "--config", config)
    plan = call("check", "--config", config).plan
    assert [plan[name]["wait_time_seconds"] for name in "ab"] == [2.0, 10.0]
    clock.advance(2 * SECOND)
    plan = call("check", "--config", config).plan
    assert [plan[name]["wait_time_seconds"] for name in "ab"] == [0.0, 8.0]


@pytest.mark.usefixtures("clock")
def test_each_takes_what_it_can(call: Call, tmp_path: Path) -> None:
    services = {"a": {"capacity": 5, "requested": 2}, "b": {"capacity": 1, "refill_rate": 0.1}}
    config = write(tmp_path / "c.json", services)
    assert call("check", "--each", "--config", config).code == 0
    result = call("check", "--each", "--config", config)
    assert result.code == 2
    assert result.plan == {
        "a": {"approved": True, "current_tokens": 1.0, "wait_time_seconds": 0.0},
        "b": {"approved": False, "current_tokens": 0.0, "wait_time_seconds": 10.0},
    }


@pytest.mark.parametrize("rate", [0.001, 0.3, 1, 3, 7.3, 33.3, 100, 7919, 1e6])
@pytest.mark.parametrize("mode", [[], ["--each"]])
def test_waiting_exactly_the_printed_wait_is_enough(
    call: Call, tmp_path: Path, clock: FakeClock, rate: float, mode: list[str]
) -> None:
    config = write(tmp_path / "c.json", {"api": {"capacity": 1, "refill_rate": rate}})
    asked: list[str | Path] = ["check", "--config", config, *mode]
    assert call(*asked).code == 0
    refused = call(*asked)
    wait = refused.plan["api"]["wait_time_seconds"]
    assert refused.code == 2
    assert 0 < wait <= 1 / rate * 1.001
    clock.advance(int(wait * SECOND) - 2)
    assert call(*asked).code == 2
    clock.advance(3)
    assert call(*asked).code == 0


@pytest.mark.usefixtures("clock")
def test_a_refusal_is_told_even_when_the_token_came_a_moment_later(
    call: Call, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path / "c.json", {"api": {"capacity": 1, "refill_rate": 1000}})
    call("check", "--config", config)
    peek = Limiter.peek

    def late(*args: Any, **options: Any) -> object:
        clock.advance(SECOND)
        return peek(*args, **options)

    monkeypatch.setattr(Limiter, "peek", late)
    refused = call("check", "--config", config)
    assert refused.code == 2
    assert refused.plan["api"]["wait_time_seconds"] == 0.001


def test_a_step_of_the_wall_clock_changes_nothing(call: Call, config: Path, clock: FakeClock) -> None:
    for _ in range(5):
        call("check", "--config", config)
    for hours in (1, -2):
        clock.step_wall(hours * 3600 * SECOND)
        assert call("check", "--config", config).plan["twitter_api"]["wait_time_seconds"] == 1000.0


def test_several_tokens_are_taken_as_one(call: Call, tmp_path: Path) -> None:
    config = write(tmp_path / "c.json", {"api": {"capacity": 5, "refill_rate": 0.001, "requested": 3}})
    assert [call("check", "--config", config).code for _ in range(2)] == [0, 2]
    assert 900 < call("check", "--config", config).plan["api"]["wait_time_seconds"] <= 1000


def test_rates_below_one_and_fractions_of_tokens(call: Call, tmp_path: Path, clock: FakeClock) -> None:
    config = write(tmp_path / "c.json", {"api": {"capacity": 2.5, "refill_rate": 0.001, "requested": 2.5}})
    assert call("check", "--config", config).code == 0
    assert call("check", "--config", config).plan["api"]["wait_time_seconds"] == 2500.0
    clock.advance(2500 * SECOND)
    assert call("check", "--config", config).code == 0


def test_a_config_on_stdin_and_a_byte_order_mark() -> None:
    assert run("check", "--config", "-", input="\ufeff" + json.dumps(ONE)).code == 0
    assert "--config on stdin" in run("check", "--config", "-", input="{").complaint
    closed = run("check", "--config", "-", preexec_fn=lambda: os.close(0))
    assert "--config on stdin cannot be read" in closed.complaint


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"api": {"capacity": 0}}, ["'api'", "capacity", "0"]),
        ({"api": {"refill_rate": 0}}, ["'api'", "refill_rate", "0"]),
        ({"api": {"capacity": -1}}, ["'api'", "capacity", "-1"]),
        ({"api": {"capacity": True}}, ["'api'", "capacity", "True"]),
        ({"api": {"capacity": "5"}}, ["'api'", "capacity", "'5'"]),
        ({"api": {"capacity": None}}, ["'api'", "capacity", "None"]),
        ({"api": {"refill_rate": 1e-30}}, ["'api'", "refill_rate"]),
        ({"api": {"requested": 0}}, ["'api'", "requested", "0"]),
        ({"api": {"requested": -1}}, ["'api'", "requested", "-1"]),
        ({"api": {"requested": True}}, ["'api'", "requested", "True"]),
        ({"api": {"requested": "1"}}, ["'api'", "requested", "'1'"]),
        ({"api": {"requested": None}}, ["'api'", "requested", "None"]),
        ({"api": {"capacity": 5, "requested": 7}}, ["'api'", "requested", "5", "7"]),
        ({"api": {"requested": 10**400}}, ["'api'", "requested"]),
        ({"api": {"capacity": 10**400}}, ["'api'", "capacity"]),
        ({"api": {"refill_rate": 10**400}}, ["'api'", "refill_rate"]),
        ({"api": {"burst": 5}}, ["'api'", "burst", "capacity"]),
        ({"api": {"request": 5}}, ["'api'", "request", "requested"]),
        ({"api": {"limits": []}}, ["'api'", "limits"]),
        ({"good": {}, "api": {"Capacity": 5}}, ["'api'", "Capacity"]),
        ({"api": "10/m"}, ["'api'", "10/m"]),
        ({"api": None}, ["'api'", "None"]),
        ({"": {}}, ["''", "name"]),
        ([], ["object"]),
        ({}, ["at least one"]),
        ("", ["JSON"]),
        ("{", ["JSON"]),
        ("5", ["object"]),
        ('{"api": {"capacity": NaN}}', ["NaN"]),
        ('{"api": {"capacity": -Infinity}}', ["Infinity"]),
        ('{"api": {"capacity": 1e400}}', ["'api'", "capacity"]),
        ('{"api": {"requested": 1e400}}', ["'api'", "requested"]),
        ('{"api": {}, "api": {}}', ["'api'", "twice"]),
        ('{"api": {"capacity": 1, "capacity": 2}}', ["'capacity'", "twice"]),
        ("[" * 100_000, ["JSON"]),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--each"]])
def test_a_wrong_config_is_one_sentence(
    call: Call, tmp_path: Path, state: Path, content: object, named: list[str], mode: list[str]
) -> None:
    config = write(tmp_path / "c.json", content)
    complaint = call("check", "--config", config, *mode).complaint
    assert [text for text in [str(config), *named] if text not in complaint] == []
    assert not state.exists()


def test_a_config_that_cannot_be_read(call: Call, tmp_path: Path) -> None:
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"\xfc": {}}')
    reasons = {tmp_path / "none.json": "No such file", tmp_path: "Is a directory", latin: "UTF-8"}
    for path, reason in reasons.items():
        complaint = call("check", "--config", path).complaint
        assert str(path) in complaint
        assert reason in complaint


# -- usage


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "Missing command"),
        (["nope"], "nope"),
        (["--nope"], "--nope"),
        (["check"], "--config"),
        (["check", "--config"], "--config"),
        (["check", "--config", "c.json", "--nope"], "--nope"),
        (["check", "--config", "c.json", "more"], "more"),
        (["check", "--config", "c.json", "--timeout", "soon"], "--timeout"),
        (["check", "--config", "c.json", "--timeout", "nan"], "--timeout"),
        (["check", "--config", "c.json", "--timeout", "-1"], "--timeout"),
        (["check", "--config", "c.json", "--timeout", "1e400"], "--timeout"),
        (["check", "--config", "c.json", "--state-file", "/"], "--state-file"),
        (["check", "--config", "c.json", "--state-file", "~no such user/state"], "--state-file"),
        (["check", "--config", ""], "--config"),
        (["check", "--config", "c.json", "--state-file", ""], "--state-file"),
        (["wait"], "BUCKET"),
        (["wait", "twitter_api", "--timeout", "inf"], "--timeout"),
        (["wait", "twitter_api", "--cost", "much"], "--cost"),
        (["wait", "twitter_api", "--cost", ""], "--cost"),
        (["wait", "twitter_api", "--cost", "nan"], "--cost"),
        (["wait", "twitter_api", "--cost", "-1"], "--cost"),
        (["wait", "twitter_api", "--cost", "1_0"], "--cost"),
        (["wait", "twitter_api", "--cost", "\u0661"], "--cost"),
        (["wait", "twitter_api", "--timeout", "\u06f1"], "--timeout"),
        (["wait", "twitter_api", "--cost", "0"], "cost"),
        (["wait", "twitter_api", "--cost", "6"], "cost 6.0 is above capacity 5"),
        (["wait", "twitter"], "did you mean 'twitter_api'"),
        (["run", "twitter_api", "true"], "--"),
        (["run", "twitter_api", "--"], "COMMAND"),
        (["run", "--", "twitter_api"], "COMMAND"),
        (["status", "nope"], "'nope'"),
        (["reset"], "BUCKET"),
        (["reset", "nope"], "'nope'"),
        (["dump", "twitter_api"], "twitter_api"),
    ],
)
@pytest.mark.usefixtures("declared")
def test_wrong_usage_exits_1(call: Call, args: list[str], named: str) -> None:
    assert named in call(*args).complaint


@pytest.mark.parametrize(
    "args",
    [
        ["{}"],
        ["--{}"],
        ["status", "--{}"],
        ["wait", "{}"],
        ["wait", "twitter_api", "--cost", "{}"],
        ["wait", "twitter_api", "--state-file", "{}"],
        ["status", "--app", "{}"],
        ["status", "--config", "{}"],
        ["run", "twitter_api", "--", "{}"],
    ],
)
@pytest.mark.usefixtures("declared")
def test_a_huge_argument_is_told_shortly(call: Call, args: list[str]) -> None:
    huge = "x" * 1_000_000  # more than a system lets through
    assert len(call(*(arg.format(huge) for arg in args)).complaint) < 2200


def test_a_process_has_the_same_exit_codes(config: Path) -> None:
    assert run("--nope").complaint
    assert run("check", "--config", config).code == 0
    assert run("--version").out.startswith("tb-celery, version ")


@pytest.mark.parametrize("name", ["check", "wait", "run", "status", "top", "dump", "reset", "doctor"])
def test_every_command_explains_itself_and_takes_the_common_options(call: Call, name: str) -> None:
    result = call(name, "--help")
    assert (result.code, result.err) == (0, "")
    assert all(option in result.out for option in ("--app", "--config", "--state-file"))


def test_shells_complete_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TB_CELERY_COMPLETE", "bash_complete")
    for words, at, completed in (
        ("tb-celery sta", "1", "plain,status\n"),
        ("tb-celery wait api --ti", "3", "plain,--timeout\n"),
        ("tb-celery check --config serv", "3", "file,serv\n"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", at)
        assert run() == (0, completed, "")


def test_a_wrong_setting_is_one_sentence(call: Call, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_LOCK_TIMEOUT", "soon")
    assert "TB_CELERY_LOCK_TIMEOUT" in call("check", "--config", config).complaint
    monkeypatch.delenv("TB_CELERY_LOCK_TIMEOUT")
    monkeypatch.setenv("TB_CELERY_STORE", "memory")
    assert "memory" in call("check", "--config", config).complaint


def test_an_answer_that_nobody_reads_is_no_traceback(config: Path) -> None:
    read, write_end = os.pipe()
    os.close(read)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(command("check", "--config", config), stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_answer_that_cannot_be_written_is_an_error(config: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("check", "--config", config), stdout=full, stderr=subprocess.PIPE, check=False, text=True
        )
    assert Result(done.returncode, "", done.stderr).complaint


def test_an_answer_that_has_no_encoding_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "c.json", '{"\u6771": {}}')
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    assert "cannot be written" in run("status", "--config", config).complaint


# -- the state file


def test_the_state_file_option_goes_before_the_settings(call: Call, config: Path, tmp_path: Path, state: Path) -> None:
    other = tmp_path / "elsewhere" / "state"
    for _ in range(5):
        call("check", "--config", config, "--state-file", other)
    assert not state.exists()
    assert call("check", "--config", config).code == 0
    assert call("check", "--config", config, "--state-file", other).code == 2


def test_a_home_that_the_shell_leaves_to_us(
    call: Call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call("check", "--config", config, "--state-file=~/mine").code == 0
    assert (tmp_path / "mine").is_file()


def test_the_environment_counts_when_it_was_set_after_the_import(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path / "c.json", ONE)
    for name in ("first", "second"):
        monkeypatch.setenv("TB_CELERY_STATE_FILE", str(tmp_path / name))
        assert [call("check", "--config", config).code for _ in range(2)] == [0, 2]


def test_the_default_state_file_outlives_temp_cleaners(
    call: Call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TB_CELERY_STATE_FILE")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert call("check", "--config", config).code == 0
    assert (tmp_path / "xdg" / "tb-celery" / "buckets.state").is_file()


def test_no_home_is_a_sentence_with_the_setting(
    call: Call, config: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TB_CELERY_STATE_FILE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "TB_CELERY_STATE_FILE" in call("check", "--config", config).complaint
    assert call("check", "--config", config, "--state-file", state).code == 0


@pytest.mark.usefixtures("declared")
def test_a_directory_that_cannot_be_read(call: Call, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    place = locked / "in" / "state"
    assert call("wait", "twitter_api", "--state-file", place).code == 0
    locked.chmod(0)
    user = os.geteuid()
    try:
        if not user:
            os.seteuid(65534)  # whom modes mean something to
        for name in ("status", "dump", "reset"):
            args = [name, "twitter_api"] if name == "reset" else [name]
            complaint = call(*args, "--state-file", place).complaint
            assert f"{place}: {os.strerror(errno.EACCES)}" in complaint
        found = checks(call("doctor", "--json", "--state-file", place))
    finally:
        os.seteuid(user)
        locked.chmod(0o700)
    assert found.keys() == {"settings", "directory"}
    assert found["directory"].startswith(f"FAIL {place.parent}: {os.strerror(errno.EACCES)}; ")


def test_one_file_that_stays_the_same(call: Call, config: Path, state: Path) -> None:
    call("check", "--config", config)
    inode = state.stat().st_ino
    for _ in range(20):
        call("check", "--config", config)
    assert state.stat().st_ino == inode
    assert [path.name for path in state.parent.iterdir()] == [state.name]


def test_places_where_no_state_can_be(call: Call, config: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(tmp_path / "target")
    foreign = write(tmp_path / "foreign", "precious")
    unwritable = Path("/proc/nowhere/state")  # even for root
    for place in (tmp_path, link, foreign, foreign / "state", unwritable):
        for args in (["check"], ["status"]) if place != unwritable else (["check"],):
            complaint = call(*args, "--config", config, "--state-file", place).complaint
            assert str(place) in complaint
            assert "TB_CELERY_STATE_FILE" in complaint
    assert foreign.read_text("utf-8") == "precious"
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(
    call: Call, config: Path, state: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_args: object, **_options: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tb_celery.stores.file.lock_descriptor", refuse)
    complaint = call("check", "--config", config).complaint
    assert str(state) in complaint
    assert "'twitter_api'" in complaint


def test_a_full_disk_takes_nothing(call: Call, config: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    call("check", "--config", config)
    before = state.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("tb_celery.stores.upkeep.write_at", full)
        complaint = call("check", "--config", config).complaint
    assert str(state) in complaint
    assert os.strerror(errno.ENOSPC) in complaint
    assert state.read_bytes() == before
    assert [path.name for path in state.parent.iterdir()] == [state.name]
    assert call("check", "--config", config).code == 0


@pytest.mark.parametrize("args", [["check", "--timeout", "0.2"], ["wait", "twitter_api"]])
def test_a_lock_that_others_hold(
    call: Call, config: Path, state: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.setenv("TB_CELERY_LOCK_TIMEOUT", "5" if args[0] == "check" else "0.2")
    call("check", "--config", config)
    with state.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        started = time.monotonic()
        complaint = call(*args, "--config", config).complaint
        assert time.monotonic() - started >= 0.2
    for named in (str(state), "'twitter_api'", "0.2 s", "TB_CELERY_LOCK_TIMEOUT"):
        assert named in complaint


def test_a_damaged_state_is_empty_and_mends(call: Call, config: Path, state: Path, clock: FakeClock) -> None:
    call("check", "--config", config)
    for damage in (b"x" * (state.stat().st_size - 64), b""):
        with state.open("r+b") as file:
            file.seek(64)
            file.write(damage)
            file.truncate()
        assert call("check", "--config", config).code == 2
        clock.advance(1000 * SECOND)
        assert call("check", "--config", config).code == 0


@pytest.mark.parametrize(("moment", "left"), [("before", 4), ("after", 3)])
def test_killed_at_the_write(call: Call, config: Path, moment: str, left: int) -> None:
    call("check", "--config", config)
    killed = f"""
import os, signal
from tb_celery import cli
from tb_celery.stores import upkeep

write_at = upkeep.write_at

def dying(*args):
    if {moment == "after"}:
        write_at(*args)
    os.kill(os.getpid(), signal.SIGKILL)

upkeep.write_at = dying
cli.main(["check", "--config", {str(config)!r}])
"""
    died = subprocess.run([sys.executable, "-c", killed], check=False, capture_output=True)
    assert (died.returncode, died.stdout, died.stderr) == (-signal.SIGKILL, b"", b"")
    codes = [call("check", "--config", config).code for _ in range(left + 1)]
    assert codes == [0] * left + [2]


# -- wait and run


@pytest.mark.usefixtures("declared")
def test_wait_takes_what_is_there_and_says_nothing(call: Call) -> None:
    assert call("wait", "twitter_api", "--cost", "3") == (0, "", "")
    assert (
        2 <= call("status", "twitter_api", "--json").answer["buckets"]["twitter_api"]["limits"][0]["current_tokens"] < 3
    )


@pytest.mark.usefixtures("declared")
def test_wait_sleeps_until_its_turn(call: Call, clock: FakeClock) -> None:
    call("wait", "twitter_api", "--cost", "5")
    before = clock.now()
    result = call("wait", "twitter_api", "--cost", "2", "--json")
    assert clock.now() - before == 2000 * SECOND
    assert result.code == 0
    assert result.out.count("\n") == 1
    waited = result.answer["waited_seconds"]
    assert 0 <= waited < 60  # the clock that is faked is the quota's, not the one that is told
    assert result.answer == {
        "bucket": "twitter_api",
        "approved": True,
        "current_tokens": 0.0,
        "wait_time_seconds": 0.0,
        "waited_seconds": waited,
    }


@pytest.mark.usefixtures("declared")
def test_wait_refuses_at_once_when_the_turn_is_too_far_off(call: Call, clock: FakeClock) -> None:
    call("wait", "twitter_api", "--cost", "5")
    before = clock.now()
    result = call("wait", "twitter_api", "--timeout", "999.9")
    assert (result.code, result.out) == (2, "")
    assert result.err == "tb-celery: bucket 'twitter_api' is over quota, and its next turn is in 1000.000 s\n"
    refused = call("wait", "twitter_api", "--timeout", "0", "--json")
    assert (refused.code, refused.answer["approved"], refused.answer["wait_time_seconds"]) == (2, False, 1000.0)
    assert clock.now() == before
    assert call("wait", "twitter_api", "--timeout", "1000").code == 0


@pytest.mark.usefixtures("declared", "clock")
def test_keys_have_quotas_of_their_own(call: Call) -> None:
    for key in ("a", "b"):
        assert call("wait", "twitter_api", "--cost", "5", "--key", key, "--timeout", "0").code == 0
        assert call("wait", "twitter_api", "--key", key, "--timeout", "0").code == 2
    assert call("wait", "twitter_api", "--timeout", "0").code == 0


@pytest.mark.usefixtures("declared")
def test_an_unlimited_bucket_is_always_granted(call: Call, tmp_path: Path) -> None:
    assert call("wait", "free", "--json").answer["current_tokens"] is None
    write(tmp_path / "c.json", {"free": {}})
    assert call("check", "--config", tmp_path / "c.json").plan["free"]["current_tokens"] is None


@pytest.mark.usefixtures("declared")
def test_run_becomes_the_command(state: Path) -> None:
    script = 'echo $$ "$@"; grep SigIgn /proc/self/status; ls -l /proc/self/fd; exit 7'
    args = ["run", "twitter_api", "--cost", "2", "--", "sh", "-c", script, "sh", "--timeout", "--", "-x y"]
    with subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, "") or not Path("/proc/self").exists()
    assert out.splitlines()[0] == f"{process.pid} --timeout -- -x y"
    if Path("/proc/self/status").exists():
        ignored = next(line for line in out.splitlines() if line.startswith("SigIgn"))
        assert not int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1)
        assert str(state) not in out
    assert 3 <= limiter_on(state).peek("twitter_api").tokens < 3.1


@pytest.mark.usefixtures("declared")
def test_run_without_a_turn_runs_nothing(call: Call, tmp_path: Path) -> None:
    call("wait", "twitter_api", "--cost", "5")
    made = tmp_path / "made"
    result = run("run", "twitter_api", "--timeout", "0.5", "--", "touch", made)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("tb-celery: bucket 'twitter_api' is over quota")
    assert not made.exists()


@pytest.mark.usefixtures("declared")
def test_a_command_that_does_not_exist_takes_no_token(call: Call, tmp_path: Path, state: Path) -> None:
    plain = write(tmp_path / "plain", "not a program")
    for program in ("no-such-command", tmp_path / "none", plain, tmp_path):
        assert str(program) in call("run", "twitter_api", "--", program, "x").complaint
    assert not state.exists()


@pytest.mark.usefixtures("declared")
def test_a_command_that_cannot_be_run_is_a_sentence(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken", "\x00\x01")
    broken.chmod(0o755)
    assert str(broken) in run("run", "twitter_api", "--", broken).complaint


def on_terminal(args: Sequence[str | Path], *, interrupt_at: bytes | None = None) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and what a terminal on stderr shows."""
    terminal, stderr = pty.openpty()
    # Whoever runs the tests in the background may have Ctrl-C ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=stderr) as process:
        signal.signal(signal.SIGINT, before)
        os.close(stderr)
        shown = b""
        while True:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if interrupt_at is not None and interrupt_at in shown:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
        out, _ = process.communicate(timeout=60)
    os.close(terminal)
    return process.returncode, out, shown


@pytest.mark.parametrize(("options", "bar"), [([], True), (["--json"], False)])
def test_waiting_on_a_terminal_shows_how_far_it_is(
    call: Call, tmp_path: Path, options: list[str], *, bar: bool
) -> None:
    # Starting the process may take a part of the wait: on a busy machine more than another has in all.
    began = time.monotonic()
    on_terminal(["--help"])
    wait = 1 + 4 * (time.monotonic() - began)
    config = write(tmp_path / "c.json", {"api": {"capacity": 1, "refill_rate": 1 / wait}})
    assert call("wait", "api", "--config", config).code == 0
    code, out, shown = on_terminal(["wait", "api", "--config", config, *options])
    assert code == 0
    assert (b"api" in shown and b"100%" in shown) == bar
    assert out.count(b"\n") == len(options)


@pytest.mark.usefixtures("declared")
def test_interrupted_while_waiting(call: Call) -> None:
    call("wait", "twitter_api", "--cost", "5")
    code, out, shown = on_terminal(["wait", "twitter_api"], interrupt_at=b"twitter_api")
    assert (code, out) == (130, b"")
    assert b"Traceback" not in shown


CTRL_C_AT_THE_IMPORT_OF = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[-1]:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs this in the background may have it ignored
sys.meta_path.insert(0, Finder())
from tb_celery.__main__ import main
main(sys.argv[1:-1])
"""


@pytest.mark.parametrize(
    "module", ["click", "tb_celery.limiter", "tb_celery.settings", "tb_celery.cli.keeping", "rich"]
)
def test_interrupted_while_it_starts(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_AT_THE_IMPORT_OF, "top", "--once", module], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, b"", b"")


LATE = """
import os, time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:  # as many modules do with one that may be missing
    os.write(1, b"caught")
"""


@pytest.mark.parametrize("way", [["-m", "tb_celery"], ["-c", "from tb_celery.__main__ import main; main()"]])
def test_interrupted_while_a_module_is_imported_that_catches_everything(way: Sequence[str], tmp_path: Path) -> None:
    """Importing takes most of the time of a short command; the second way is that of the script that is installed."""
    assert 'tb-celery = "tb_celery.__main__:main"' in (ROOT / "pyproject.toml").read_text("utf-8")
    write(tmp_path / "click.py", LATE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, *way, "status"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
    ) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


def test_the_package_by_itself_imports_nothing_that_takes_time() -> None:
    """Whoever interrupts that sees where: nobody has been asked yet what to do then."""
    script = "import sys, tb_celery; print([name for name in sys.modules if name.startswith('tb_celery.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.usefixtures("declared", "clock")
def test_what_is_not_enforced_goes_on_and_tells(call: Call, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_ENFORCE", '{"twitter_api": false}')
    assert call("wait", "twitter_api", "--cost", "5") == (0, "", "")
    told = "tb-celery: bucket 'twitter_api' is not enforced, or this would have waited {}.000 s\n"
    assert call("wait", "twitter_api", "--timeout", "1") == (0, "", told.format(1000))
    waited = call("wait", "twitter_api", "--timeout", "1", "--json")
    assert (waited.code, waited.err, json.loads(waited.out)["approved"]) == (0, told.format(2000), True)
    for wait, each in ((3000, []), (4000, ["--each"])):
        checked = call("check", "--config", config, *each)
        assert (checked.code, checked.err) == (0, told.format(wait))
        assert json.loads(checked.out)["all_approved"]
    assert "twitter_api (not enforced) " in call("status").out


@pytest.mark.usefixtures("declared")
def test_a_command_whose_bucket_is_not_enforced_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_ENFORCE", "false")
    done = [run("run", "twitter_api", "--cost", "5", "--timeout", "1", "--", "echo", "on") for _ in range(2)]
    assert [(each.code, each.out) for each in done] == [(0, "on\n")] * 2
    assert "is not enforced, or this would have waited" in done[1].err


# -- status, dump, reset


@pytest.mark.usefixtures("declared")
def test_status_of_a_bucket_never_used(call: Call, state: Path) -> None:
    result = call("status", "twitter_api", "--json")
    assert result.out.count("\n") == 1
    limit = {"capacity": 5, "refill_rate": 0.001, "current_tokens": 5.0, "wait_time_seconds": 0.0, "turns": 0.0}
    limit |= {"drained_in_seconds": 0.0}
    bucket = {
        "key": None,
        "limits": [limit | {"set": None}],
        "keys": 0,
        "turns_of_all_keys": 0.0,
        "paused_seconds": 0.0,
        "enforced_percent": 100.0,
    }
    assert result.answer["buckets"] == {"twitter_api": bucket}
    assert call("status").code == call("dump").code == call("reset", "twitter_api").code == 0
    assert not state.parent.exists()


@pytest.mark.usefixtures("declared")
def test_status_takes_nothing(call: Call, clock: FakeClock) -> None:
    call("wait", "twitter_api", "--cost", "2")
    clock.advance(500 * SECOND)
    for _ in range(3):
        (limit,) = call("status", "twitter_api", "--json").answer["buckets"]["twitter_api"]["limits"]
        assert (limit["current_tokens"], limit["wait_time_seconds"]) == (3.5, 0.0)


@pytest.mark.usefixtures("declared", "clock")
def test_status_is_a_table(call: Call, state: Path) -> None:
    for key in ("a", "b"):
        call("wait", "twitter_api", "--cost", "5", "--key", key)
    call("wait", "twitter_api", "--cost", "5")
    place = Place(soonest=0)
    workers = limiter_on(state)
    assert not any(workers.acquire("twitter_api", place=place) for _ in range(2))
    result = call("status")
    assert (result.code, result.err) == (0, "")
    assert [line.split() for line in result.out.splitlines()] == [
        ["BUCKET", "CAPACITY", "PER", "SECOND", "TOKENS", "NEXT", "IN", "TURNS", "DONE", "IN", "KEYS"],
        ["twitter_api", "(without", "a", "key)", "5", "0.001", "0.000", "1000.000", "s", "2", "2000.000", "s", "3"],
        ["fast", "10", "10", "10.000", "0.000", "s", "0", "-", "0"],
        ["fast", "1000", "0.0115741", "1000.000", "0.000", "s", "0", "-", "0"],
        ["free", "unlimited"],
    ]
    shown = call("status", "twitter_api", "--key", "c").out.splitlines()[1].split()
    assert shown[:3] + shown[5:6] + shown[-1:] == ["twitter_api", "(key", "'c')", "5.000", "3"]
    call("reset", "twitter_api")
    call("wait", "twitter_api")
    assert call("status").out.splitlines()[1].split()[:2] == ["twitter_api", "5"], "there is no other"


@pytest.mark.usefixtures("declared", "clock")
def test_dump_is_what_status_says(call: Call) -> None:
    call("wait", "twitter_api", "--cost", "2")
    dumped, told = call("dump").answer, call("status", "--json").answer
    assert dumped.pop("timestamp") <= told.pop("timestamp")
    assert dumped == told
    assert dumped["buckets"].keys() == {"twitter_api", "fast", "free"}


def test_status_without_buckets_says_where_they_come_from(call: Call) -> None:
    for name in ("status", "dump"):
        assert "--app" in call(name).complaint


@pytest.mark.usefixtures("declared", "clock")
def test_reset(call: Call) -> None:
    def refused() -> list[str]:
        keys = [["--key", key] for key in "ab"]
        return [key[1] for key in keys if call("wait", "twitter_api", "--timeout", "0", "--cost", "5", *key).code == 2]

    assert refused() == []
    assert refused() == ["a", "b"]
    assert call("reset", "twitter_api", "--key", "a").out == "bucket 'twitter_api' is full again; records cleared: 1\n"
    assert refused() == ["b"]
    assert call("reset", "twitter_api").out.endswith(": 2\n")
    assert refused() == []


# -- buckets of a Celery app


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in the working directory, whose module is noisy."""
    source = """
from celery import Celery
print("hello from the project")
app = Celery("shop", set_as_current=False)
app.conf.tb_celery = {"buckets": {"twitter_api": {"capacity": 3, "refill_rate": 0.001}, "free": None}}
"""
    folder = tmp_path / "project"
    folder.mkdir()
    write(folder / "cli_shop.py", source)
    write(folder / "cli_exits.py", "raise SystemExit('no settings')")
    write(folder / "cli_breaks.py", "1 / 0")
    write(folder / "cli_gives_up.py", "class GiveUp(BaseException): ...\nraise GiveUp('on two\\nlines')")
    write(folder / "cli_wrong.py", source.replace('{"buckets"', '{"bucket"'))
    write(folder / "cli_list.py", source + "app.conf.tb_celery = ['x']")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("app")
def test_buckets_of_an_app() -> None:
    result = run("status", "--app", "cli_shop:app", "--json")
    assert json.loads(result.out)["buckets"]["twitter_api"]["limits"][0]["capacity"] == 3
    assert result.err == "hello from the project\n"
    assert run("wait", "twitter_api", "--app", "cli_shop", "--cost", "4").err.endswith(
        "bucket 'twitter_api': cost 4.0 is above capacity 3 and could never be met\n"
    )


@pytest.mark.usefixtures("app")
def test_a_config_can_name_the_buckets_of_an_app(call: Call, tmp_path: Path) -> None:
    config = write(tmp_path / "c.json", {"twitter_api": {"requested": 2}, "free": {}, "other": {"capacity": 1}})
    asked = call("check", "--app", "cli_shop:app", "--config", config)
    plan = json.loads(asked.out)["plan"]
    assert 1 <= plan["twitter_api"]["current_tokens"] < 1.1
    assert plan["free"]["current_tokens"] is None
    assert plan["other"]["approved"]
    # Numbers in the config are the config's own business, and no token comes from their being others.
    config = write(tmp_path / "c.json", {"twitter_api": {"capacity": 50, "requested": 2}})
    assert call("check", "--app", "cli_shop:app", "--config", config).code == 2


@pytest.mark.usefixtures("app")
def test_a_service_without_numbers_is_the_declared_bucket(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TB_CELERY_BUCKETS__twitter_api", "1/d")
    config = str(write(tmp_path / "bare.json", {"twitter_api": {}}))
    assert [call("check", "--config", config).code for _ in range(3)] == [0, 2, 2]


def test_the_environment_is_stronger_than_the_app(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_BUCKETS__twitter_api__CAPACITY", "7")
    found = json.loads(call("status", "--app", "cli_shop:app", "--json").out)
    assert found["buckets"]["twitter_api"]["limits"][0]["current_tokens"] == 7.0


NO_MODULES = ["", ":", ":app", "cli_shop:", "cli_shop.py", "./cli_shop", "project/cli_shop:app", ".cli_shop", "a..b"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cli_none:app", "No module named 'cli_none'"),
        ("cli_none", "No module named 'cli_none'"),
        ("cli_shop:nothing", "module 'cli_shop' has no attribute 'nothing'"),
        ("json", "module 'json' has no attribute 'celery'"),
        ("json:dumps", "'function' object has no attribute 'conf'"),
        ("cli_exits:app", "no settings"),
        ("cli_breaks:app", "ZeroDivisionError"),
        ("cli_gives_up:app", "GiveUp: on two lines"),
        ("cli_wrong:app", "bucket"),
        ("cli_list:app", "'x'"),
        *((name, f"{name!r} must be a module, or a module and its") for name in NO_MODULES),
    ],
)
@pytest.mark.usefixtures("app")
def test_an_app_that_is_none(call: Call, name: str, reason: str, state: Path) -> None:
    for more in ([], ["--state-file", str(state)]):
        result = call("status", "--app", name, *more)
        assert result.code == 1
        assert result.out == ""
        assert result.err.count("\n") == 1 + result.err.count("hello from the project\n")
        assert reason in result.err
        assert "--app proj.celery:app" in result.err or name in {"cli_wrong:app", "cli_list:app"}


# -- doctor


def checks(result: Result) -> dict[str, str]:
    """Every check with its detail; those that failed begin with FAIL."""
    found = {each["name"]: each for each in json.loads(result.out)["checks"]}
    failed = [name for name, each in found.items() if not each["ok"]]
    assert result.code == (1 if failed else 0)
    assert json.loads(result.out)["ok"] is (not failed)
    return {name: f"{'ok' if each['ok'] else 'FAIL'} {each['detail']}" for name, each in found.items()}


@pytest.mark.usefixtures("declared")
def test_a_sound_host(call: Call, state: Path) -> None:
    call("wait", "twitter_api")
    before = state.read_bytes()
    result = call("doctor")
    assert (result.code, result.err) == (0, "")
    assert [line.split()[:2] for line in result.out.splitlines()] == [
        ["ok", name] for name in ("settings", "directory", "file", "state", "clock", "lock")
    ]
    for named in ("twitter_api", str(state.parent), str(state), "identity"):
        assert named in result.out
    assert state.read_bytes() == before
    assert [path.name for path in state.parent.iterdir()] == [state.name]


def test_a_directory_that_is_still_to_be_made(call: Call, state: Path, tmp_path: Path) -> None:
    found = checks(call("doctor", "--json"))
    assert found["directory"].startswith(f"ok {state.parent} is missing and will be made in {tmp_path}")
    assert found["state file"].startswith("ok")
    assert found["lock"].startswith("ok")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_doctor_has_left_is_removed_by_a_later_one(call: Call, state: Path) -> None:
    state.parent.mkdir()
    for name, age in (("old", ABANDONED + 1), ("new", 0)):
        place = state.parent / f"{PROBE}{name}"
        place.mkdir()
        (place / "state").touch()
        os.utime(place, times=(time.time() - age,) * 2)
    assert checks(call("doctor", "--json"))["lock"].startswith("ok")
    assert [place.name for place in state.parent.iterdir()] == [f"{PROBE}new"]


def test_a_lock_that_never_excludes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tb_celery.stores.hosting.lock_descriptor", lambda *_args, **_options: True)
    assert "do not exclude" in checks(call("doctor", "--json"))["lock"]


def test_a_lock_that_excludes_in_one_process_only(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: set[int] = set()

    def lock(fd: int, **_options: object) -> bool:
        before = set(held)
        held.add(os.fstat(fd).st_ino)
        return held > before

    monkeypatch.setattr("tb_celery.stores.file.lock_descriptor", lock)
    monkeypatch.setattr("tb_celery.stores.file.unlock_descriptor", lambda fd: held.discard(os.fstat(fd).st_ino))
    found = checks(call("doctor", "--json", "--state-file", tmp_path / "state"))
    assert found["lock"].startswith("FAIL a second process got the lock")
    assert "TB_CELERY_STATE_FILE" in found["lock"]
    assert str(tmp_path) in found["lock"]


def test_locks_that_are_not_there(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("tb_celery.stores.file.lock_descriptor", refuse)
    assert checks(call("doctor", "--json"))["lock"].startswith("FAIL")


def test_a_network_file_system(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tb_celery.doctor.network_file_system", lambda _path: "nfs4")
    assert checks(call("doctor", "--json"))["file system"].startswith("FAIL nfs4")


def test_places_that_the_doctor_does_not_like(call: Call, tmp_path: Path) -> None:
    foreign = write(tmp_path / "foreign", "precious")
    (link := tmp_path / "link").symlink_to(foreign)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for place, name in (
        (foreign, "state file"),
        (link, "state file"),
        (tmp_path, "state file"),
        (foreign / "state", "directory"),
        (Path("/proc/nowhere/state"), "directory"),
        (tmp_path / "dangling" / "state", "directory"),
    ):
        result = call("doctor", "--json", "--state-file", place)
        found = checks(result)
        assert [wrong for wrong, detail in found.items() if detail.startswith("FAIL")] == [name]
        assert "TB_CELERY_STATE_FILE" in found[name]
    assert foreign.read_text("utf-8") == "precious"


def test_a_damaged_state_file_is_left_as_it_is(call: Call, config: Path, state: Path) -> None:
    call("check", "--config", config)
    damaged = b"TBCELERY" + bytes(100)
    state.write_bytes(damaged)
    assert "damaged" in checks(call("doctor", "--json"))["state file"]
    assert state.read_bytes() == damaged


def test_a_state_file_that_somebody_holds(
    call: Call, config: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tb_celery.doctor.PATIENCE", 0.1)
    call("check", "--config", config)
    with state.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = checks(call("doctor", "--json"))
    assert "locked by others" in found["state file"]
    assert found["lock"].startswith("ok")


@pytest.mark.server
def test_a_server_that_answers_and_one_that_does_not(server: str) -> None:
    nobody = "redis://127.0.0.1:1/0"
    for address, ok in ((server, True), (nobody, False)):
        limiter = Limiter([], RedisStore(address))
        settings, found = examine(lambda limiter=limiter: limiter, None)  # type: ignore[misc]
        assert (settings.name, settings.ok, found.name, found.ok) == ("settings", True, "server", ok)
        assert address.removesuffix("/0") in found.detail


def test_settings_that_do_not_parse(call: Call, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_BUCKETS", '{"api": 5}')
    found = checks(call("doctor", "--json"))
    assert found.keys() == {"settings"}
    assert "'api'" in found["settings"]
    found = checks(call("doctor", "--json", "--state-file", state))
    assert [name for name, detail in found.items() if detail.startswith("FAIL")] == ["settings"]
    assert "lock" in found


def test_a_second_process_with_another_clock(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tb_celery.clock.zlib.crc32", lambda _name: 1)
    found = checks(call("doctor", "--json"))
    assert found["clock"].startswith("FAIL")
    assert found["lock"].startswith("ok")


def test_a_service_that_neither_the_file_nor_the_app_gives_numbers(tmp_path: Path) -> None:
    write(tmp_path / "shop.py", 'from celery import Celery\napp = Celery(broker="memory://")\n')
    with (tmp_path / "shop.py").open("a") as module:
        module.write('app.conf.tb_celery = {"buckets": {"twitter_api": "1/s"}}\n')
    config = write(tmp_path / "c.json", {"twiter_api": {"requested": 1}})
    done = subprocess.run(
        [sys.executable, "-m", "tb_celery", "check", "--config", config, "--app", "shop:app"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "service 'twiter_api' has no numbers, and the app declares only twitter_api" in done.stderr


# -- the examples


def test_the_cron_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write(tmp_path / "tb-celery", f'#!/bin/sh\nexec "{sys.executable}" -m tb_celery "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    # Two hours for a token, so that none comes back however slow the machine is.
    slow = {"capacity": 5, "refill_rate": 0.0001}
    services = write(tmp_path / "services.json", {"twitter_api": {**slow, "requested": 1}})
    script = write(tmp_path / "cron.sh", (EXAMPLES / "cron.sh").read_text().replace("services.json", services.name))
    script.chmod(0o755)

    def cron() -> str:
        return subprocess.run([script], check=True, capture_output=True, text=True).stdout

    assert cron() == "calling the API\n"
    drained = write(tmp_path / "c.json", {"twitter_api": {**slow, "requested": 4}})
    assert run("wait", "twitter_api", "--config", drained, "--cost", "4").code == 0
    assert cron().startswith("over quota")


# -- verify


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of five grants of a bucket, of which the settings know too."""
    path = tmp_path / "grants"
    monkeypatch.setenv("TB_CELERY_BUCKETS", json.dumps(SLOW))
    monkeypatch.setenv("TB_CELERY_GRANT_LOG", str(path))
    for _ in range(5):
        assert open_limiter().acquire("twitter_api", key="alice")
    return path


def test_verify_finds_that_a_log_is_within_the_limit(call: Call, log: Path) -> None:
    done = call("verify", log)
    expected = "ok    twitter_api: 5 and 0.001 a second: 5 tokens in 5 grants, keys: 1; every window is within it\n"
    assert done == Result(0, expected, "")
    answer = call("verify", log, "--bucket", "twitter_api", "--json").answer
    assert answer["ok"]
    assert answer["limits"][0]["violation"] is None


def test_verify_finds_a_doctored_log(call: Call, log: Path) -> None:
    lines = log.read_text().splitlines()
    late = json.loads(lines[-1])
    late["at"] += SECOND
    log.write_text("\n".join([*lines, json.dumps(late)]) + "\n")
    done = call("verify", log)
    assert (done.code, done.err) == (2, "")
    first, last = json.loads(lines[0])["at"], late["at"]
    assert f"from {first} ns to {last} ns, where 5.001" in done.out
    answer = call("verify", log, "--json").answer
    over = answer["limits"][0]["violation"]
    assert not answer["ok"]
    assert (over["begin"], over["end"], over["granted"], over["key"]) == (first, last, 6, late["key"])


def test_verify_judges_by_the_numbers_that_were_set(call: Call, log: Path) -> None:
    assert call("set", "twitter_api", "--capacity", "7").code == 0
    assert call("wait", "twitter_api", "--cost", "2").code == 0
    done = call("verify", log)
    assert done.code == 0
    assert "(other numbers ordered: 1)" in done.out
    assert call("pause", "twitter_api", "1d").code == 0
    assert call("resume", "twitter_api").code == 0
    assert call("unset", "twitter_api").code == 0
    assert call("verify", log, "--json").answer["limits"][0]["orders"] == 2


def test_verify_takes_the_numbers_from_anywhere(call: Call, log: Path, tmp_path: Path) -> None:
    config = tmp_path / "services.json"
    config.write_text(json.dumps({"twitter_api": {"capacity": 4, "refill_rate": 0.001}}))
    assert call("verify", log, "--capacity", "5", "--refill-rate", "1e-8").code == 0
    assert call("verify", log, "--capacity", "4.5", "--refill-rate", "0.001").code == 2
    assert call("verify", log, "--config", config).code == 2
    assert "must be a number above 0" in call("verify", log, "--capacity", "x", "--refill-rate", "1").complaint
    assert "above 0" in call("verify", log, "--capacity", "0", "--refill-rate", "0").complaint
    assert "'--refill-rate', or neither" in call("verify", log, "--capacity", "5").complaint


def test_verify_complains_of_what_it_cannot_judge(
    call: Call, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "'nowhere' cannot be read: No such file" in call("verify", "nowhere").complaint.replace(f"{Path.cwd()}/", "")
    assert "bucket 'twitter' is not declared" in call("verify", log, "--bucket", "twitter").complaint
    monkeypatch.delenv("TB_CELERY_BUCKETS")
    assert "bucket 'twitter_api' is not declared" in call("verify", log).complaint
    (tmp_path / "empty").touch()
    assert "holds no grant" in call("verify", tmp_path / "empty").complaint
    with log.open("a") as file:
        file.write("more\n")
    assert "line 6 is no line of a log" in call("verify", log).complaint


def test_commands_that_only_look_make_no_log(call: Call, log: Path) -> None:
    log.unlink()
    for command in ("status", "top", "dump", "doctor"):
        assert call(command, *(["-n", "0.1"] if command == "top" else [])).code == 0
    assert not log.exists()


def test_reset_is_logged(call: Call, log: Path) -> None:
    assert call("reset", "twitter_api").code == 0
    assert call("wait", "twitter_api", "--key", "alice", "--cost", "5").code == 0
    assert call("verify", log).code == 0
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "null" not in line))
    assert call("verify", log).code == 2
