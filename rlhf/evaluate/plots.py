"""Small plots as PNG data URIs. Backgrounds are transparent and ink is mid-grey, so that they read on a light page and on a dark one."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#757b86"
COLOURS = ("#2f7de1", "#e0662f", "#2e9e62", "#a65bd0", "#c9971c", "#d4467e", "#1d9aa8", "#8a6d5a")
SMOOTH_FROM = 40
"""Series with at least so many points get a moving average over a twentieth of them, and the raw line fades."""


class Series(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    """Index into COLOURS: the run, or the role in a plot of one run."""
    dashed: bool = False
    points: bool = False
    """Marks instead of a line: evaluations."""


class Bar(NamedTuple):
    label: str
    mean: float
    low: float
    high: float
    colour: int


def curves(title: str, series: Sequence[Series]) -> str:
    """Lines over steps."""
    figure, axes = new_figure(4.4, 2.7)
    for one in series:
        colour, style = COLOURS[one.colour % len(COLOURS)], "--" if one.dashed else "-"
        if one.points:
            joined = ":" if len(one.x) > 2 else ""      # a line between before and after would tell of steps in between
            axes.plot(one.x, one.y, linestyle=joined, marker="o", markersize=4, linewidth=1, color=colour, label=one.label)
        elif len(one.y) < SMOOTH_FROM:
            axes.plot(one.x, one.y, style, color=colour, linewidth=1.6, label=one.label)
        else:
            axes.plot(one.x, one.y, style, color=colour, linewidth=0.7, alpha=0.3)
            axes.plot(one.x, moving_average(one.y, len(one.y) // 40), style, color=colour, linewidth=1.7, label=one.label)
    lowest, highest = min(min(one.y) for one in series), max(max(one.y) for one in series)
    if lowest == highest:
        axes.set_ylim(lowest - (abs(lowest) or 1.0) / 2, highest + (abs(highest) or 1.0) / 2)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel("step", fontsize=8, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if len(series) > 1:
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return data_uri(figure)


def bars(title: str, rows: Sequence[Bar], *, percent: bool, line_at: float | None = None) -> str:
    """Horizontal bars with their intervals, the first on top."""
    figure, axes = new_figure(4.8, 0.75 + 0.36 * len(rows))
    scale = 100.0 if percent else 1.0
    span = max(abs(edge) for row in rows for edge in (row.low, row.high)) * scale
    for place, row in enumerate(rows):
        mean, low, high = (value * scale for value in (row.mean, row.low, row.high))
        axes.barh(place, mean, height=0.62, color=COLOURS[row.colour % len(COLOURS)], alpha=0.85)
        axes.errorbar(mean, place, xerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]], color=INK, capsize=3, linewidth=1.3)
        axes.annotate(f" {mean:.1f} %" if percent else f" {mean:.2f}", (max(high, 0.0), place), va="center", fontsize=8, color=INK,
                      xytext=(4, 0), textcoords="offset points")
    if line_at is not None:
        axes.axvline(line_at * scale, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=112.0 if percent else span * 1.2 or 1.0)
    if percent:
        axes.set_xticks(range(0, 101, 20), [f"{value} %" for value in range(0, 101, 20)])
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    return data_uri(figure)


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and its neighbours up to `reach` places away, fewer but as many on each side near the ends."""
    sums = [0.0, *accumulate(values)]
    widths = (min(reach, place, len(values) - 1 - place) for place in range(len(values)))
    return [(sums[place + width + 1] - sums[place - width]) / (2 * width + 1) for place, width in enumerate(widths)]


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Inches at 160 dots, without pyplot, whose figures are global."""
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    axes.grid(True, color=INK, alpha=0.22, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(INK)
    return figure, axes


def data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
