"""What README shows is run, and what it lists is all there is."""

import ast
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from pages import Sandbox, jobs, texts
from servers import PATIENCE, until
from test_layers import ORDER, modules

from tb_celery.cli import cli
from tb_celery.declaration import parse_bucket
from tb_celery.settings import PREFIX, Settings, default_state_file
from tb_celery.task import RateLimitedTask

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
NOT_RUN = {
    "pip install tb-celery": "needs the registry",
    "make demo": "a minute of real workers; CI runs it by itself",
    "make test": "that is us",
    (WORKER := "celery -A tasks worker --loglevel INFO"): "runs until it is ended; here with a server of its own",
    (
        SEND := """python -c 'from tasks import post; [post.delay(f"post {number}") for number in range(9)]'"""
    ): "likewise",
}
EXAMPLES_SHOWN = {
    "cron.sh": "tests/test_cli.py runs it",
    "demo.py": "make demo runs it; here it only has to load",
    "quickstart.py": "it is README's example, which is run here",
    "services.json": "it is README's, which the commands here read",
    "twitter.py": "docker-compose.yml runs it; here its tasks are checked",
    "valkey_server.py": "demo.py imports it",
}


def table(head: str) -> list[list[str]]:
    """The rows of the one table whose first column is headed so."""
    found = []
    for text in re.findall(r"(?:^\|.*\|\n)+", README, re.MULTILINE):
        first, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
        if first[0] == head:
            found.append(rows)
    (rows,) = found
    return rows


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


QUICKSTART, TASKS, PROJECT, ROUTES, LIBRARY = texts(README, "python")
(SERVICES,) = texts(README, "json")
SHELL = [line for text in texts(README, "sh") for line in text.splitlines()]
(CRONTAB,) = texts(README, "crontab")


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A folder with what README's reader has by then."""
    made = Sandbox(tmp_path)
    made.write("services.json", SERVICES)
    made.write("proj.py", PROJECT)
    return made


# -- the examples


def test_the_example_runs_as_pasted(sandbox: Sandbox) -> None:
    assert QUICKSTART.count("\n") < 30
    done = sandbox.python(QUICKSTART)
    assert (done.code, done.err) == (0, "")
    found = [re.fullmatch(r" *([0-9.]+) s  post ([1-9])", line) for line in done.out.splitlines()]
    posts = sorted((float(one[1]), int(one[2])) for one in found if one)
    assert sorted(number for _, number in posts) == list(range(1, 10))
    assert len(found) == 9
    # Three from the burst, the others paid for at two a second since the script began.
    assert all(at >= (count - 3) / 2 for count, (at, _) in enumerate(posts, 1))


def test_the_project_would_start(sandbox: Sandbox) -> None:
    started = sandbox.python("from proj import app; from tb_celery.worker import check_at_start; check_at_start(app)")
    assert started == (0, "", "")


def test_the_routes_do_what_is_said_of_them(sandbox: Sandbox) -> None:
    done = sandbox.python(f"""{ROUTES}
from tb_celery.quota import quota_of
from tb_celery.worker import check_at_start

@app.task(name="proj.twitter.post", shared=False)
def post(): ...

tb_celery.install(app)
app.finalize()
check_at_start(app)
quota = quota_of(app)
print([rule.bucket for rule in quota.rules(app.tasks["proj.twitter.post"], {{"routing_key": "mail"}})])
print([quota.terms(app.tasks["proj.twitter.post"], {{"routing_key": key}}).holds for key in ("mail", "celery")])
""")
    assert done == (0, "['twitter_api', 'smtp']\n[True, False]\n", "")


def test_tasks_are_spread_as_shown(sandbox: Sandbox) -> None:
    (shown,) = re.findall(r"`(tb_celery\.spread\(.*?\))`", README)
    done = sandbox.python(f"""{PROJECT}
import tb_celery
from celery import group
from datetime import datetime, timedelta, UTC
app.finalize()
texts = "abcdefghij"
before = datetime.now(UTC)
spreading = {shown}
print(len(spreading.result))
print(before <= spreading.last - timedelta(seconds=10.1) <= datetime.now(UTC))
""")
    assert done == (0, "10\nTrue\n", "")


@pytest.mark.server
def test_a_worker_runs_what_is_sent(sandbox: Sandbox, client: str) -> None:
    (sandbox.folder / "tasks.py").write_text(TASKS.replace("redis://localhost:6379/0", client))
    sandbox.environment["TMPDIR"] = str(sandbox.folder)
    log = sandbox.folder / "log"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {WORKER}"],
            cwd=sandbox.folder,
            env=sandbox.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert sandbox.sh(SEND) == (0, "", "")
        until(lambda: log.read_text().count(" succeeded in ") == 9, "nine tasks have run")
    finally:
        worker.terminate()
        try:
            worker.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    assert sorted(re.findall(r"WARNING/.*\] post (.*)", log.read_text())) == list("012345678")


def test_the_library_example_runs(sandbox: Sandbox) -> None:
    done = sandbox.python(LIBRARY)
    assert done == (0, "allowed, 3 tokens left\n", "")


@pytest.mark.parametrize("command", [line for line in SHELL if line not in NOT_RUN])
def test_shell_commands_run(sandbox: Sandbox, command: str) -> None:
    done = sandbox.sh(command)
    assert (done.code, done.err) == (0, "")
    assert ("called https://" in done.out) == ("curl" in command)


def test_commands_that_are_not_run_are_shown() -> None:
    assert NOT_RUN.keys() <= set(SHELL)


def test_cron_jobs_run_while_there_is_quota(sandbox: Sandbox) -> None:
    for job in jobs(CRONTAB, sandbox.folder):
        assert sandbox.sh(job) == (0, "called https://api.example.com/\n", "")


def test_a_cron_job_calls_nothing_when_over_quota(sandbox: Sandbox) -> None:
    job = CRONTAB.splitlines()[0].partition(" cd /srv/proj && ")[2]
    (sandbox.folder / "services.json").write_text(SERVICES.replace("0.5", "0.001"))  # no token comes meanwhile
    assert sandbox.sh("tb-celery wait twitter_api --config services.json --cost 5").code == 0
    assert sandbox.sh(job) == (2, "", "")


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == EXAMPLES_SHOWN.keys()
    assert (EXAMPLES / "quickstart.py").read_text() == QUICKSTART
    assert json.loads((EXAMPLES / "services.json").read_text()) == json.loads(SERVICES)


def test_the_composed_application_would_start(sandbox: Sandbox) -> None:
    sandbox.environment["PYTHONPATH"] += f"{os.pathsep}{EXAMPLES}"
    started = sandbox.python(
        "from twitter import app; from tb_celery.worker import check_at_start; check_at_start(app)"
    )
    assert started == (0, "", "")


def test_the_demo_loads(sandbox: Sandbox) -> None:
    done = sandbox.run(sys.executable, str(EXAMPLES / "demo.py"), "--help")
    assert (done.code, done.err) == (0, "")
    assert "--tasks" in done.out


# -- what it lists


def test_every_setting_is_listed_with_its_default() -> None:
    listed = {}
    for setting, default, _, variable, _ in table("setting"):
        (name,) = code(setting)
        assert code(variable) == [f"{PREFIX}{name.upper()}"]
        listed[name] = json.loads(code(default)[0]) if code(default) else None
    known = {name: field.default for name, field in Settings.model_fields.items()}
    assert listed == known | {"state_file": None}


def test_the_default_state_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert f"`{default_state_file()}`" in README
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert f"`{default_state_file()}`".replace("/xdg", "$XDG_STATE_HOME") in README
    monkeypatch.delenv("XDG_STATE_HOME")
    state_home = str(default_state_file().parent.parent)
    assert f"`{state_home}`".replace("/home/somebody", "~") in README


def test_every_form_of_a_bucket_is_one() -> None:
    forms = [form for row in table("form of a bucket") for form in code(row[0])]
    assert len(forms) >= 9
    for form in forms:
        bucket = parse_bucket("twitter_api", json.loads(form) if form == "null" else ast.literal_eval(form))
        assert (bucket is None) == (form in {"None", "null"})


def test_every_variable_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(re.findall(rf"\b{PREFIX}[A-Z_]+(?=[`=])", README))
    assert names == {PREFIX + "CONFIG", *(PREFIX + name.upper() for name in Settings.model_fields)}
    for assignment in re.findall(rf"`({PREFIX}BUCKETS__[^`]+)`", README):
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            monkeypatch.delenv(name)
        monkeypatch.setenv(*assignment.split("=", 1))
        # Over what README's project declares.
        assert Settings(buckets={"twitter_api": {"capacity": 5, "refill_rate": 0.5}}).buckets.keys() == {"twitter_api"}


def test_every_task_option_is_listed() -> None:
    assert [code(row[0])[0] for row in table("option")] == list(inspect.get_annotations(RateLimitedTask))


def test_every_command_is_listed_and_no_other() -> None:
    listed = {code(row[0])[0].split()[0]: row for row in table("command")}
    assert listed.keys() == cli.commands.keys()
    for name, row in listed.items():
        options = {option for param in cli.commands[name].params for option in param.opts}
        assert set(re.findall(r"--[a-z-]+", row[1])) <= options
    assert set(re.findall(r"\btb-celery ([a-z]+)", README.replace("tb-celery` and", ""))) <= cli.commands.keys()


def test_every_make_target_is_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [line for line in [*SHELL, *code(README)] if line.startswith("make ")]
    assert {"make demo", "make test"} <= set(named)
    assert {command.split()[1] for command in named} <= targets


def test_every_link_leads_somewhere() -> None:
    for text in (README, CONTRIBUTING):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert links
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_contributors_are_told_every_make_target_and_every_layer() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^\| `make ([a-z]+)` \|", CONTRIBUTING, re.MULTILINE)) == targets - {"help"}
    layers = {name.split(".")[0] for name in modules()} - {"__init__", "__main__"}
    assert re.findall(r"^    ([a-z]+)  +", CONTRIBUTING, re.MULTILINE) == [name for name in ORDER if name in layers]


def test_contributors_are_shown_tests_that_exist() -> None:
    shown = re.findall(r'^    make test ARGS="(.*)"$', CONTRIBUTING, re.MULTILINE)
    places = [word.partition("::") for args in shown for word in args.split() if word.startswith("tests/")]
    assert places
    for path, _, test in places:
        assert f"def {test}" in (ROOT / path).read_text()


Line = tuple[str, str, int, int, int, int]
TENTH = 100_000_000
GOOD: list[Line] = [
    *(("limited", "a", number, 1, 1, 0) for number in range(5)),
    ("limited", "a", 5, TENTH + 1, TENTH + 1, 0),
    ("sent-back", "a", 5, 0, 0, 0),
]
JUDGE = """
import json, sys
from collections import Counter
from demo import Record, verdict
records = [Record(*line) for line in json.load(sys.stdin)]
tasks = Counter(("limited", number) for number in range(6))
sys.exit(0 if verdict(records, tasks, 0) else 3)
"""


@pytest.mark.server
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
@pytest.mark.usefixtures("server")  # or there is no server program
def test_a_server_ends_with_whoever_started_it(end: signal.Signals, tmp_path: Path) -> None:
    script = """
import signal, valkey_server
with valkey_server.valkey_server() as url:
    print(url, flush=True)
    signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=EXAMPLES,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline().rpartition(":")[2].partition("/")[0])
        assert answers(port)
        parent.send_signal(end)
    until(lambda: not answers(port), f"nobody answers on port {port}")


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.parametrize(
    ("lines", "good"),
    [
        pytest.param(GOOD, True, id="good"),
        pytest.param(
            [*GOOD[:4], ("limited", "a", 4, 4, 4, 0), ("limited", "a", 5, 5, 5, 0)], False, id="over the bound"
        ),
        pytest.param([*GOOD[:5], ("limited", "a", 5, 90 * TENTH, 90 * TENTH, 0)], False, id="quota unused"),
        pytest.param([*GOOD, *GOOD[-1:] * 6], False, id="sent back too often"),
        pytest.param([*GOOD[:5], ("limited", "a", 5, TENTH, TENTH, 1)], False, id="a retry spent"),
        pytest.param(GOOD[:5], False, id="a task missing"),
        pytest.param([*GOOD, ("limited", "a", 5, 2 * TENTH, 2 * TENTH, 0)], False, id="a task twice"),
        pytest.param(GOOD[-1:], False, id="nothing ran"),
    ],
)
def test_the_demo_tells_good_from_bad(lines: list[Line], good: bool) -> None:  # noqa: FBT001
    # In a process of its own: the demo's tasks would join every application here.
    done = subprocess.run(
        [sys.executable, "-c", JUDGE],
        input=json.dumps(lines),
        text=True,
        cwd=EXAMPLES,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, "BAD" in done.stdout) == ((0, False) if good else (3, True)), done
