"""Processes that ask as fast as they can, or with a pause for thought, and how long each answer took."""

from __future__ import annotations

import multiprocessing
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

clock = time.perf_counter_ns


class Cell(NamedTuple):
    """What some processes did in one stretch of time."""

    rate: float
    """Decisions a second, of all processes together."""
    p50: float
    """Microseconds that a decision took."""
    p99: float


def measure(make: Callable[[], Callable[[], object]], processes: int, seconds: float, think: float = 0) -> Cell:
    """Let ``processes`` ask for ``seconds``, with ``think`` seconds of sleep before each question.

    Raises:
        RuntimeError: one of them failed; what went wrong is on stderr.
    """
    context = multiprocessing.get_context("fork")
    begin = context.Value("q", 0)

    def everyone_is_ready() -> None:
        begin.value = clock() + 5_000_000

    barrier = context.Barrier(processes, everyone_is_ready)

    def ask(results: Connection) -> None:
        decide = make()
        decide()
        barrier.wait(60)
        time.sleep(max(0, begin.value - clock()) / 1e9)
        results.send_bytes(_ask(decide, begin.value + round(seconds * 1e9), think))

    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    children = [context.Process(target=ask, args=(results,)) for _, results in pipes]
    for child in children:
        child.start()
    took = array("Q")
    for (answers, results), child in zip(pipes, children, strict=True):
        results.close()
        try:
            took.frombytes(answers.recv_bytes())
        except EOFError:
            message = "a process of the benchmark failed"
            raise RuntimeError(message) from None
        child.join()
    ranked = sorted(took)
    return Cell(len(ranked) / seconds, ranked[len(ranked) // 2] / 1e3, ranked[len(ranked) * 99 // 100] / 1e3)


def _ask(decide: Callable[[], object], end: int, think: float) -> array[int]:
    took = array("Q")
    note = took.append
    before = clock()
    while before < end:
        if think:
            time.sleep(think)
            before = clock()
        if not decide():
            message = "refused, in a bucket that never runs out"
            raise RuntimeError(message)
        after = clock()
        note(after - before)
        before = after
    return took
