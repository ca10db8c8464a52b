"""What came out of all cells, as a page: the table, and above and below it what people need to know."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from celery_matrix.cell import MODES, POOLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_matrix.cell import Outcome

    Place = tuple[str, str, str, str]
    """Of a cell: pool, broker, mode and store."""
    Cells = Mapping[Place, Mapping[str, Outcome]]

TABLES = {
    ("redis", "file"): "Redis and Valkey",
    ("rabbitmq", "file"): "RabbitMQ, classic queues",
    ("quorum", "file"): "RabbitMQ, quorum queues",
    ("redis", "redis"): "Redis and Valkey, and the buckets on another such server",
}
"""Brokers and stores, as the page has them."""
CELLS: list[Place] = [(pool, broker, mode, store) for broker, store in TABLES for pool, mode in product(POOLS, MODES)]
TEXT = Path(__file__).parent / "page.md"
FIGURE = "a burst"


def page(cells: Cells, versions: str) -> str:
    """The text around the tables is in page.md, with a line for each."""
    text = TEXT.read_text("utf-8")
    return (
        text.replace("(versions)", versions)
        .replace("(tables)", "\n\n".join(table(cells, *where) for where in TABLES))
        .replace("(figures)", figures(cells))
    )


def row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"


def head(*columns: str) -> list[str]:
    return [row(*columns), row(*["---"] * len(columns))]


def table(cells: Cells, broker: str, store: str) -> str:
    titles = list(next(iter(cells.values())))
    lines = [f"## {TABLES[broker, store]}", "", *head("", *POOLS)]
    whys: list[str] = []
    for title in titles:
        columns = []
        for pool in POOLS:
            outcomes = [cells[pool, broker, mode, store][title] for mode in MODES]
            columns.append(mark(outcomes, whys))
        lines.append(row(title, *columns))
    notes = [f"{number}. {why}" for number, why in enumerate(whys, 1)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def mark(outcomes: list[Outcome], whys: list[str]) -> str:
    """What stands in a cell of the table: of its two modes, or of both in one word."""
    words = []
    for outcome in outcomes:
        if outcome.verdict == "unsupported":
            if outcome.text not in whys:
                whys.append(outcome.text)
            words.append(f"no ({whys.index(outcome.text) + 1})")
        else:
            words.append("ok" if outcome.verdict == "ok" else "**failed**")
    if len(set(words)) == 1:
        return words[0]
    return ", ".join(f"{mode}: {word}" for mode, word in zip(MODES, words, strict=True))


def figures(cells: Cells) -> str:
    lines = head("", *[f"{name}, {mode}" for name in TABLES.values() for mode in MODES])
    for pool in POOLS:
        found = [cells[pool, broker, mode, store] for broker, store in TABLES for mode in MODES]
        texts = [
            each.text if each.verdict == "ok" else each.verdict
            for cell in found
            for title, each in cell.items()
            if title.startswith(FIGURE)
        ]
        lines.append(row(pool, *texts))
    return "\n".join(lines)
