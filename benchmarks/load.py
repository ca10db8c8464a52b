"""Processes that ask as fast as they can, or with a pause for thought, and how long each answer took."""

from __future__ import annotations

import multiprocessing
import time
from array import array
from operator import sub
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

clock = time.perf_counter_ns


class Cell(NamedTuple):
    """What some processes did in one stretch of time."""

    rate: float
    """Decisions a second, of all processes together."""
    p50: float
    """Microseconds that a decision took."""
    p99: float
    p999: float
    """The longest, where there were fewer than a thousand."""
    fairness: float
    """Of the decisions over the processes: 1 if all had as many, 1/n if one of n had them all (Jain's index)."""
    allowed: float
    """The share of the answers that was yes."""


class Answers(NamedTuple):
    """What one process asked, question by question."""

    began: Sequence[int]
    """When, in nanoseconds of one clock for all processes."""
    ended: Sequence[int]
    allowed: bytearray


def measure(make: Callable[[], Callable[[], object]], processes: int, seconds: float, think: float = 0) -> Cell:
    """Let ``processes`` ask for ``seconds``, with ``think`` seconds of sleep before each question.

    Raises:
        RuntimeError: one of them failed; what went wrong is on stderr, its last line in the message.
    """
    by_process = answers(make, processes, seconds, think)
    took = sorted(each for own in by_process for each in map(sub, own.ended, own.began))
    count = len(took)
    p50, p99, p999 = (took[count * part // 1000] / 1e3 for part in (500, 990, 999))
    fairness = jain(len(own.began) for own in by_process)
    return Cell(count / seconds, p50, p99, p999, fairness, sum(sum(own.allowed) for own in by_process) / count)


def answers(
    make: Callable[[], Callable[[], object]], processes: int, seconds: float, think: float = 0
) -> list[Answers]:
    """The same, answer by answer and process by process."""
    context = multiprocessing.get_context("fork")
    begin = context.Value("q", 0)

    def everyone_is_ready() -> None:
        begin.value = clock() + 5_000_000

    barrier = context.Barrier(processes, everyone_is_ready)

    def ask(results: Connection) -> None:
        try:
            decide = make()
            decide()
            barrier.wait(60)
            time.sleep(max(0, begin.value - clock()) / 1e9)
            results.send(_ask(decide, begin.value + round(seconds * 1e9), think))
        except BaseException as error:
            barrier.abort()
            results.send(f"{type(error).__name__}: {error}")
            raise

    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    children = [context.Process(target=ask, args=(results,)) for _, results in pipes]
    for child in children:
        child.start()
    said: list[Any] = []
    for (answered, results), child in zip(pipes, children, strict=True):
        results.close()
        try:
            said.append(answered.recv())
        except EOFError:
            said.append("it ended without a word")
        child.join()
    failed = [each for each in said if isinstance(each, str)]
    if failed:
        # Those who waited for the one that failed only say that it did.
        cause = next((each for each in failed if not each.startswith("BrokenBarrierError")), failed[0])
        message = f"a process of the benchmark failed: {cause}"
        raise RuntimeError(message)
    return said


def typical(cells: Sequence[Cell]) -> dict[str, float]:
    """Of each figure the median."""
    return {
        field: rounded(median(figures)) for field, figures in zip(Cell._fields, zip(*cells, strict=True), strict=True)
    }


def rounded(figure: float) -> float:
    return round(figure, 3) if figure < 100 else round(figure)


def jain(shares: Iterable[float]) -> float:
    """How evenly something is shared: from 1, all alike, to 1/n, all to one."""
    shares = list(shares)
    squares = sum(each * each for each in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _ask(decide: Callable[[], object], end: int, think: float) -> Answers:
    began, ended, allowed = array("q"), array("q"), bytearray()
    before = clock()
    while before < end or not began:  # on a machine that is busy, someone may come too late for a short stretch
        if think:
            time.sleep(think)
            before = clock()
        answer = decide()
        after = clock()
        began.append(before)
        ended.append(after)
        allowed.append(bool(answer))
        before = after
    return Answers(began, ended, allowed)
