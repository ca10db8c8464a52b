"""Where somebody is ahead of tb_celery, read off the figures: every row in which anybody is, by any measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.markdown import short
from benchmarks.peers import OURS, OURS_REDIS, PEERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OUR_MODES = ("retry", "hold", "hold, by the queue")


class Measure(NamedTuple):
    field: str
    text: str
    more_is_better: bool = False
    digits: int | None = None
    """That are looked at; else those that the tables show."""

    def shown(self, figures: Mapping[str, Any]) -> str:
        number = figures[self.field]
        return short(number) if self.digits is None else f"{number:.{self.digits}f}"

    def ahead(self, other: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        """By so much that the figures shown differ."""
        if self.shown(other) == self.shown(ours):
            return False
        return bool((other[self.field] > ours[self.field]) == self.more_is_better)


COST = (
    Measure("rate", "decisions a second", more_is_better=True),
    Measure("p50", "p50 in us"),
    Measure("p99", "p99 in us"),
    Measure("p999", "p99.9 in us"),
    Measure("fairness", "fairness", more_is_better=True, digits=2),
)
QUOTA = (
    Measure("used", "quota used", more_is_better=True, digits=3),
    Measure("over", "too many", digits=1),
    Measure("fairness", "fairness", more_is_better=True, digits=2),
)
BACKLOG = (
    Measure("ran", "tasks run", more_is_better=True, digits=0),
    Measure("late", "seconds beyond the ideal", digits=2),
    Measure("republished", "published again, a task", digits=2),
    Measure("used", "quota used", more_is_better=True, digits=3),
    Measure("over", "too many", digits=0),
    Measure("jitter p50", "off the beat, p50 in ms", digits=1),
    Measure("jitter p99", "off the beat, p99 in ms", digits=1),
)
MEMORY = (Measure("more", "MB more"),)


def behind(found: Mapping[str, Any]) -> list[list[str]]:
    """A row for each figure of ours that somebody is ahead of: where, who of us, of what, ours, and who with what."""
    rows: list[list[str]] = []
    for count, cells in found["stores"].items():
        rows += _rows(f"one bucket, {count} at once", COST, cells, OURS)
    rows += _rows("one bucket, paced", COST, found["paced"], OURS)
    on_server = {name for name, peer in PEERS.items() if peer.server}
    for title, scene in found["beside"]["scenes"].items():
        cells = scene["peers"]
        rows += _rows(title, COST, cells, OURS)
        rows += _rows(title, COST, {name: cells[name] for name in cells if name in on_server}, OURS_REDIS)
    kept = {name: {**figures, "used": min(figures["used"], 1)} for name, figures in found["beside"]["kept"].items()}
    # Who gives more than there is has used it up, and is ahead in nothing by that.
    honest = {name: figures for name, figures in kept.items() if figures["over"] < 1 or name in {OURS, OURS_REDIS}}
    for ours in (OURS, OURS_REDIS):
        rows += _rows("who keeps to a quota", QUOTA, honest, ours)
    backlog = {
        row["mode"]: {**row, "late": row["took"] - row["ideal"]} for row in found["end to end"].get("celery_drain", ())
    }
    in_order = {mode: row for mode, row in backlog.items() if not row["over"] or mode in OUR_MODES}
    memory = {
        row["mode"]: {**row, "more": row["after"] - row["before"]} for row in found["end to end"].get("memory", ())
    }
    for title, measures, modes in (("a backlog", BACKLOG, in_order), ("memory of a worker", MEMORY, memory)):
        others = {mode: row for mode, row in modes.items() if mode not in OUR_MODES}
        for mode in OUR_MODES:
            if mode in modes:
                rows += _rows(title, measures, {**others, mode: modes[mode]}, mode)
    return rows


def _rows(title: str, measures: tuple[Measure, ...], cells: Mapping[str, Any], ours: str) -> Iterator[list[str]]:
    if ours not in cells:
        return
    for measure in measures:
        ahead = [name for name, figures in cells.items() if measure.ahead(figures, cells[ours])]
        ahead.sort(key=lambda name: cells[name][measure.field], reverse=measure.more_is_better)
        if ahead:
            others = "; ".join(f"{name} {measure.shown(cells[name])}" for name in ahead)
            yield [title, ours, measure.text, measure.shown(cells[ours]), others]
