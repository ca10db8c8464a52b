from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

# The demo, the tests and the benchmarks start their servers in one way.
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from line import START, Line, make_app
from private_rabbitmq import PrivateRabbitMQ, missing
from valkey_server import NoServerError, find_binary, valkey_server

from tb_celery.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

# Beside workers that start, an example may take any time.
hypothesis.settings.register_profile(
    "beside others", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("beside others")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two processes a core, for tests mostly wait; more than sixteen would only take longer to start."""
    return min(2 * (os.cpu_count() or 1), 16)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable reaches the settings, and the default state file is in a home of the test's own."""
    # Of the last two xdist's processes have those of the terminal that it was started at.
    for variable in [
        name for name in os.environ if name.startswith(("TB_CELERY_", "XDG_STATE_HOME", "COLUMNS", "LINES"))
    ]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """Or a later test, whichever comes next here, would wait for a warning in vain."""

    def levels() -> list[int]:
        return [logging.getLogger(name).level for name in (None, "tb_celery")]

    before = levels()
    yield
    assert levels() == before


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns after each few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


# -- deliveries made by hand


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture
def app(clock: FakeClock) -> Celery:
    return make_app(clock)


@pytest.fixture
def line(app: Celery, clock: FakeClock) -> Line:
    return Line(app, clock)


# -- worker nodes, and what they need


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a private Valkey or Redis server. Without one: a failure in CI, else a skip."""
    try:
        find_binary()
    except NoServerError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    with valkey_server() as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[str]:
    """The tests' own end of the application; the address of its broker, where nothing of other tests' is left."""
    import app as tasks  # noqa: PLC0415 - only for those who start workers

    tasks.app.conf.update(broker_url=server, result_backend=server)
    vars(tasks.app._local).pop("backend", None)  # noqa: SLF001 - whoever used it before may have had none
    tasks.app._backend_cache = None  # noqa: SLF001
    tasks.app.backend.client.flushall()
    yield server
    with warnings.catch_warnings():
        # Celery's and kombu's clients leave sockets to the collector, which on Python 3.14 comes to them later.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # results unsubscribe
    tasks.app.backend.result_consumer.stop()
    tasks.app.backend.client.connection_pool.disconnect()  # which close() leaves to whoever made it
    tasks.app.close()


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a private RabbitMQ server. Where there is none: a skip."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    broker = PrivateRabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    try:
        broker.start()
        yield broker.address
    finally:
        broker.stop()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users can get at, which pytest's own are not."""
    directory = Path(tempfile.mkdtemp(prefix="tb_celery-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system with the given arguments of mount(8), where the tests may."""
    point = tmp_path / "mounted"
    point.mkdir()

    def mount(*arguments: str | Path) -> Path:
        done = subprocess.run(["/bin/mount", *arguments, point], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
        return point

    yield mount
    while point.is_mount():
        subprocess.run(["/bin/umount", "--lazy", point], check=True)
