"""The figures drawn, as SVG files beside the page; the same figures give the same files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers import OURS, OURS_REDIS, PEERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.figsize": (8, 4.2),
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "tb_celery",
}
OTHERS = ("#2471a3", "#28b463", "#8e44ad", "#17a589", "#7f8c8d", "#5d6d7e", "#a569bd", "#1a5276", "#b7950b", "#784212")
EMPHASIS = {OURS: "#c0392b", OURS_REDIS: "#e67e22", "retry": "#c0392b", "hold": "#e67e22"}


def draw(found: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write the pictures of what was measured into ``folder``; what each shows, by file name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (tb-celery[bench]).
    """
    import matplotlib as mpl  # noqa: PLC0415 - not everybody has it

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    drawn = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (text, plot) in PICTURES.items():
        with mpl.rc_context(STYLE):
            figure, axes = plt.subplots(layout="constrained")
            if plot(found, axes):
                path = folder / f"performance-{name}.svg"
                figure.savefig(path, metadata={"Date": None, "Creator": None})
                # Its lines end in blanks.
                path.write_text("\n".join(map(str.rstrip, path.read_text("utf-8").splitlines())) + "\n", "utf-8")
                drawn[path.name] = text
            plt.close(figure)
    return drawn


def rate(found: Mapping[str, Any], axes: Any) -> bool:  # noqa: ANN401 - it has no types
    """Decisions a second over the number of processes."""
    scenes = [each for title, each in found["beside"]["scenes"].items() if title.startswith("granted")]
    for number, name in enumerate(PEERS):
        points = [(each["processes"], each["peers"][name]["rate"]) for each in scenes if name in each["peers"]]
        if points:
            _line(axes, name, points, OTHERS[number % len(OTHERS)], marker="o")
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="decisions a second")
    axes.set_xticks([each["processes"] for each in scenes], [str(each["processes"]) for each in scenes])
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return True


def latency(found: Mapping[str, Any], axes: Any) -> bool:  # noqa: ANN401
    """What a decision takes where the most that is usual compete, from p50 over p99 to p99.9."""
    title = [each for each in found["beside"]["scenes"] if each.startswith("granted")][-2]
    cells = found["beside"]["scenes"][title]["peers"]
    names = list(reversed(cells))
    for place, name in enumerate(names):
        cell, colour = cells[name], EMPHASIS.get(name, "#566573")
        axes.plot([cell["p50"], cell["p999"]], [place, place], color=colour, linewidth=2)
        for field, marker in (("p50", "o"), ("p99", "|"), ("p999", ">")):
            axes.plot(cell[field], place, marker=marker, markersize=8, color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel=f"microseconds; {title}: p50 (dot), p99 (bar), p99.9 (arrow)")
    return bool(names)


def drain(found: Mapping[str, Any], axes: Any) -> bool:  # noqa: ANN401
    """A backlog, task by task."""
    rows = found["end to end"].get("celery_drain")
    if not rows:
        return False
    for number, row in enumerate(rows):
        _line(
            axes, row["mode"], [(at, count) for count, at in enumerate(row["starts"], 1)], OTHERS[number % len(OTHERS)]
        )
    count, ideal = rows[0]["tasks"], rows[0]["ideal"]
    first = count - rows[0]["rate"] * ideal
    axes.plot([0, ideal], [first, count], "--", color="black", label="ideal", linewidth=1)
    axes.set(xlabel="seconds since the first began", ylabel="tasks begun")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return True


PICTURES = {
    "rate": ("Decisions a second, one key, every answer yes, over the number of processes", rate),
    "latency": ("How long a decision takes while others ask", latency),
    "drain": ("A backlog on two nodes: tasks begun over time", drain),
}


def _line(axes: Any, name: str, points: Sequence[tuple[float, float]], colour: str, marker: str = "") -> None:  # noqa: ANN401
    look = {"color": EMPHASIS.get(name, colour), "linewidth": 2.5 if name in EMPHASIS else 1.2}
    axes.plot(*zip(*points, strict=True), marker=marker, label=name, **look)
