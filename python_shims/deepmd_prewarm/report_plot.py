# SPDX-License-Identifier: LGPL-3.0-or-later
"""A prewarm report as a picture: who compiled when, who waited, what it cost.

Above, one line per rank over time; below, host (and device) memory after each
task and the bytes each task gave back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import PrewarmReport, RankRecord

__all__ = ["draw"]

# Colour-blind safe (Okabe-Ito); waiting is the only hatched one.
_KINDS: dict[str, tuple[str, str]] = {
    "trace": ("#56B4E9", "trace"),
    "compile": ("#D55E00", "compile"),
    "load": ("#009E73", "load from the compile cache"),
    "run": ("#0072B2", "run the samples"),
    "release": ("#CC79A7", "release memory"),
    "wait": ("#E8E8E8", "wait for the other ranks"),
}
_RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MOST_RANKS = 24
_MEGA = 1e6


def _shown(report: PrewarmReport) -> list[RankRecord]:
    """All ranks, or where they are too many those that compiled longest."""

    def busy(record: RankRecord) -> float:
        return sum(t.trace_s + t.compile_s + t.load_s for t in record.tasks)

    ranks = sorted(report.ranks, key=busy, reverse=True)[:_MOST_RANKS]
    return sorted(ranks, key=lambda record: record.rank)


def _timeline(axes: Any, ranks: list[RankRecord]) -> None:
    used: set[str] = set()
    end = max((s.end_s for r in ranks for t in r.tasks for s in t.spans), default=1.0)
    for line, record in enumerate(ranks):
        for task in record.tasks:
            for span in task.spans:
                used.add(span.kind)
                axes.barh(
                    line,
                    span.end_s - span.start_s,
                    left=span.start_s,
                    height=0.5,
                    color=_KINDS[span.kind][0],
                    hatch="////" if span.kind == "wait" else None,
                    edgecolor="#9A9A9A" if span.kind == "wait" else "none",
                    linewidth=0,
                )
            work = [s for s in task.spans if s.kind != "wait"] or task.spans
            if not work:
                continue
            begin, finish = work[0].start_s, task.spans[-1].end_s
            axes.plot([begin, begin], [line - 0.33, line + 0.33], color="black", lw=1)
            # A name that does not fit its bar would run into the next one.
            room = (finish - begin) / end * 100
            name = task.name if len(task.name) <= room else f"{task.name[: int(room)]}…"
            if room >= 2:
                axes.text(begin, line - 0.36, f" {name}", fontsize=8, va="bottom")
    axes.set_yticks(
        range(len(ranks)), [f"rank {record.rank}\n{record.host}" for record in ranks]
    )
    axes.set_ylim(len(ranks) - 0.5, -0.75)
    axes.set_xlim(0, end * 1.01)
    axes.set_xlabel("time since all ranks had arrived (s)")
    axes.grid(axis="x", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    from matplotlib.patches import Patch

    axes.legend(
        handles=[
            Patch(
                facecolor=colour,
                hatch="////" if kind == "wait" else None,
                edgecolor="#9A9A9A" if kind == "wait" else "none",
                label=label,
            )
            for kind, (colour, label) in _KINDS.items()
            if kind in used
        ],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=6,
        frameon=False,
        fontsize=8,
        title="before step 1, each rank did this with each task (name above its bar):",
        title_fontsize=8,
    )


def _task_names(ranks: list[RankRecord]) -> list[str]:
    longest = max(ranks, key=lambda record: len(record.tasks))
    return [task.name for task in longest.tasks]


def _tilt(axes: Any) -> None:
    axes.tick_params(axis="x", labelsize=8)
    for label in axes.get_xticklabels():
        label.set(rotation=20, ha="right", rotation_mode="anchor")


def _slope(ranks: list[RankRecord]) -> str:
    """Say what each task after the first one adds, on the worst rank."""
    grown = [
        (r.tasks[-1].rss_after - r.tasks[0].rss_after) / (len(r.tasks) - 1) / _MEGA
        for r in ranks
        if len(r.tasks) > 1
    ]
    return f"\n({max(grown):+.1f} MB for each further task)" if grown else ""


def _memory(axes: Any, ranks: list[RankRecord]) -> None:
    names = _task_names(ranks)
    on_device = any(t.device_after for r in ranks for t in r.tasks)
    for line, record in enumerate(ranks):
        if not record.tasks:
            continue
        colour = _RANK_COLOURS[line % len(_RANK_COLOURS)]
        for before, after, style, where in (
            ("rss_before", "rss_after", "o-", "host"),
            ("device_before", "device_after", "s--", "device"),
        ):
            if where == "device" and not on_device:
                continue
            sizes = [getattr(record.tasks[0], before)]
            sizes += [getattr(task, after) for task in record.tasks]
            axes.plot(
                range(len(sizes)),
                [size / _MEGA for size in sizes],
                style,
                color=colour,
                ms=4,
                label=f"rank {record.rank}" + (f", {where}" if on_device else ""),
            )
    axes.set_xticks(range(len(names) + 1), ["before", *names])
    _tilt(axes)
    axes.set_xlabel("after task")
    axes.set_ylabel("memory (MB)")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_title(
        "Memory after each task: "
        + ("host and device" if on_device else "resident, host")
        + _slope(ranks),
        fontsize=10,
    )
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _released(axes: Any, ranks: list[RankRecord]) -> None:
    names = _task_names(ranks)
    width = 0.8 / len(ranks)
    highest = max((t.bytes_released for r in ranks for t in r.tasks), default=0)
    unit, scale = ("MB", 1e6) if highest >= 1e6 else ("kB", 1e3)
    for line, record in enumerate(ranks):
        bars = axes.bar(
            [n - 0.4 + width * (line + 0.5) for n in range(len(record.tasks))],
            [task.bytes_released / scale for task in record.tasks],
            width,
            color=_RANK_COLOURS[line % len(_RANK_COLOURS)],
            label=f"rank {record.rank}",
        )
        if len(ranks) * len(names) <= 16:
            axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    axes.set_xticks(range(len(names)), names)
    _tilt(axes)
    axes.set_xlabel("task")
    axes.set_ylabel(f"released ({unit})")
    axes.margins(y=0.3)
    axes.set_title("Trace-time memory each task gave back", fontsize=10)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False, ncols=len(ranks), loc="upper right")


def draw(report: PrewarmReport, path: Path) -> Path:
    """Draw a report.

    Parameters
    ----------
    report
        What to draw.
    path
        Image to write; its folder is made, its suffix chooses the format.

    Returns
    -------
    pathlib.Path
        The file.
    """
    # Not pyplot: the program that trains may have its own backend and figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = _shown(report)
    height = 4.6 + 0.62 * max(2, len(ranks))
    figure = Figure(figsize=(10, height), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    counted = report.compiled_after_start
    some = "" if report.is_complete else f", {len(ranks)} of them shown"
    figure.suptitle(
        f"deepmd-prewarm: {report.world_size} rank(s){some} ready after"
        f" {report.wall_s:.1f} s; graphs compiled from step 1 on:"
        f" {'not counted' if counted is None else counted}",
        fontsize=12,
        fontweight="bold",
    )
    if any(record.tasks for record in ranks):
        grid = figure.add_gridspec(2, 2, height_ratios=[0.62 * len(ranks) + 0.9, 2.8])
        _timeline(figure.add_subplot(grid[0, :]), ranks)
        # More lines than that are a thicket, and the ranks are alike.
        _memory(figure.add_subplot(grid[1, 0]), ranks[: len(_RANK_COLOURS)])
        _released(figure.add_subplot(grid[1, 1]), ranks[: len(_RANK_COLOURS)])
    else:
        figure.text(0.5, 0.5, "no task was prewarmed", ha="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
