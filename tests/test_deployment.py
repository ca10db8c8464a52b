"""Workers as docker-compose.yml deploys them keep one quota: as processes of this machine, and in real containers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from deployment import CAPACITY, HEALTH_CHECK, RATE, containers, no_engine, processes
from servers import PATIENCE, until

from tb_celery.bucket import Bucket, Limit
from tb_celery.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deployment import Deployment

pytestmark = pytest.mark.slow
BUCKET = Bucket("twitter_api", (Limit(CAPACITY, RATE),))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(processes, marks=pytest.mark.server, id="processes"),
        pytest.param(containers, marks=pytest.mark.docker, id="containers"),
    ],
)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    if request.param is containers and (reason := no_engine()):
        if os.environ.get("REQUIRE_DOCKER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with request.param(tmp_path_factory.mktemp("deployment")) as deployment:
        yield deployment


def names(word: str, number: int) -> list[str]:
    return [f"{word}-{each}" for each in range(number)]


def until_posted(deployment: Deployment, texts: list[str]) -> None:
    until(lambda: set(texts) <= set(deployment.posted()), "all tasks run", 2 * PATIENCE)


def times_posted(deployment: Deployment, texts: list[str]) -> list[int]:
    posted = deployment.posted()
    return [posted.count(text) for text in texts]


def assert_one_quota(deployment: Deployment, folder: Path) -> None:
    """Over all that any of the workers has ever been granted."""
    (verdict,) = verify(deployment.grants(folder), {BUCKET.name: BUCKET})
    assert verdict.violation is None


def work_for_all(deployment: Deployment, word: str) -> list[str]:
    """Tasks that have run by then, of which every worker had some."""
    before = [len(worker.posted()) for worker in deployment.workers]
    texts: list[str] = []
    while not texts or any(len(worker.posted()) == had for worker, had in zip(deployment.workers, before, strict=True)):
        more = names(f"{word}-{len(texts)}", 20)
        deployment.post(*more)
        until_posted(deployment, more)
        texts += more
    return texts


def test_workers_share_one_quota(deployment: Deployment, tmp_path: Path) -> None:
    before = len(deployment.grants(tmp_path))
    texts = work_for_all(deployment, "shared")
    assert times_posted(deployment, texts) == [1] * len(texts)
    assert len(deployment.grants(tmp_path)) - before == len(texts)
    assert_one_quota(deployment, tmp_path)


def test_the_health_check_passes_and_disturbs_nobody(deployment: Deployment, tmp_path: Path) -> None:
    texts = names("checked", 30)
    deployment.post(*texts)
    for worker in deployment.workers:
        code, output = worker.run(*HEALTH_CHECK)
        assert (code, "FAIL" in output) == (0, False), output
    until_posted(deployment, texts)
    assert times_posted(deployment, texts) == [1] * len(texts)
    assert_one_quota(deployment, tmp_path)


def test_a_killed_worker_holds_up_nobody_and_comes_back(deployment: Deployment, tmp_path: Path) -> None:
    killed = deployment.workers[0]
    begun = len(deployment.grants(tmp_path))
    deployment.post(*names("lost", 30))
    until(lambda: len(deployment.grants(tmp_path)) >= begun + CAPACITY, "some tasks run")
    killed.kill()
    assert killed.ended()
    texts = names("meanwhile", 20)
    deployment.post(*texts)
    until_posted(deployment, texts)

    killed.start_again()
    texts += work_for_all(deployment, "afterwards")
    assert times_posted(deployment, texts) == [1] * len(texts)
    assert_one_quota(deployment, tmp_path)


def test_a_stopped_worker_hands_its_waiting_tasks_over(deployment: Deployment, tmp_path: Path) -> None:
    stopped, other, _ = deployment.workers
    # Nothing starts while it stops: what Celery has just handed to its pool by then may run twice.
    assert other.run("tb-celery", "pause", BUCKET.name, "20", "--app", "twitter")[0] == 0
    texts = names("handed-over", 20)
    ids = deployment.post(*texts)
    until(lambda: deployment.at_rest(ids), "all tasks wait")
    stopped.kill("SIGTERM")
    assert stopped.exit_code() == 0
    until_posted(deployment, texts)
    assert times_posted(deployment, texts) == [1] * len(texts)
    assert_one_quota(deployment, tmp_path)
    stopped.start_again()


@pytest.mark.docker
@pytest.mark.parametrize("deployment", [pytest.param(containers, id="containers")], indirect=True)
def test_a_container_is_healthy_and_can_write_nothing_but_the_state(deployment: Deployment) -> None:
    for worker in deployment.workers:
        until(worker.healthy, f"worker {worker.name()} is healthy")
        assert worker.run("id", "--user")[1] == "1000\n"
        assert worker.run("touch", str(deployment.state.with_name("try")))[0] == 0
        assert worker.run("rm", str(deployment.state.with_name("try")))[0] == 0
        for place in ("/app", "/venv", "/etc", "/var/lib"):
            assert worker.run("touch", f"{place}/try")[0] == 1
