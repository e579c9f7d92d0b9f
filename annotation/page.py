"""The page of `annotation agreement`: one self-contained HTML file, in the look of the training reports.

It holds names of annotators and ids of tasks. Prompts and responses are left out unless they are asked for: they may be offensive, or
secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib import colormaps

from annotation.agreement import AgreementReport
from annotation.agreement_tables import (
    agreement_table,
    alpha_of,
    annotator_table,
    confidence_table,
    disputed_table,
    meaning_of_flags,
    notes_of,
    overlap_table,
    parts_of,
    share_of,
)
from annotation.annotator_quality import SECONDS_EDGES, Annotator, Estimate, PositionBias
from annotation.tasks import Task
from rlhf.evaluate.plots import COLOURS, INK, data_uri, new_figure
from rlhf.whole_files import replace_file

MOST_IN_PLOTS = 30
"""Annotators: those with flags first, then those with the most tasks. The tables hold all."""
MOST_WITH_FIGURES = 14
"""Annotators up to which the cells of the agreement matrix hold their figures."""
FEWEST_SHARED = 10
"""Pairs that two annotators must both have judged to have a cell in the matrix."""
LONGEST_NAME = 22
"""Characters in plots."""


class Plot(NamedTuple):
    title: str
    image: str


class Tile(NamedTuple):
    label: str
    value: str
    detail: str


class Dots(NamedTuple):
    """One figure of each annotator."""

    label: str
    estimates: Sequence[Estimate | PositionBias | None]
    colour: int


def write_page(report: AgreementReport, output: Path, *, project: str, texts: Mapping[str, Task] | None = None) -> None:
    """Write the page to `output`, as a whole. `texts` are the tasks whose prompts and responses may be shown, by id; None: none."""
    # Names and texts must never become markup: everything is escaped, and the page's policy allows no script at all.
    environment = Environment(loader=ChoiceLoader([PackageLoader("annotation"), PackageLoader("rlhf.evaluate")]), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    shown = sorted(report.annotators, key=lambda one: (not one.flags, -one.tasks, one.name))[:MOST_IN_PLOTS]
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, environment.get_template("agreement.html").render(
        project=project, tiles=tiles(report), notes=notes_of(report), flags=meaning_of_flags(), agreement=agreement_table(report),
        agreement_plot=agreement_plot(report), annotators=annotator_table(report.annotators), plots=annotator_plots(shown),
        matrix=matrix_plot(report, shown), left_out=len(report.annotators) - len(shown), disputed=disputed_table(report),
        disputed_tasks=[texts[task.task_id] for task in report.disputed] if texts is not None else [],
        confidence=confidence_table(report), overlap=overlap_table(report.overlap)))


def tiles(report: AgreementReport) -> list[Tile]:
    overall = report.overall
    flagged = sum(bool(one.flags) for one in report.annotators)
    return [_tile("alpha", "nominal, of choices", alpha_of(overall.alpha)),
            _tile("alpha, either order", "nominal, of choices", alpha_of(overall.alpha_either_order)),
            _tile("alpha of ranks", "ordinal, of places", alpha_of(overall.rank_alpha)),
            _tile("same choice", "two votes on a pair", share_of(overall.same_choice)),
            Tile("votes", f"{overall.verdicts:,}", f"on {overall.tasks:,} tasks; {overall.shared_pairs:,} shared pairs"),
            Tile("annotators", str(len(report.annotators)), f"{flagged} want looking at" if flagged else "none stands out")]


def _tile(label: str, kind: str, figure: str) -> Tile:
    """A figure such as 0.86 [0.84,0.89], its interval below it."""
    value, _, interval = figure.partition(" [")
    return Tile(label, value, f"{kind} [{interval}" if interval else kind)


# Plots

def short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME - 1] + "…"


def dot_plot(title: str, names: Sequence[str], figures: Sequence[Dots], *, line_at: float | None, percent: bool = True,
             from_zero: bool = False) -> Plot:
    """A row a name, a mark with its interval for each figure; percent of a share, or the number itself."""
    figure, axes = new_figure(4.8, 0.9 + 0.3 * max(2, len(names)))
    scale = 100.0 if percent else 1.0
    known = [dots for dots in figures if any(dots.estimates)]
    for number, dots in enumerate(known):
        offset = 0.24 * (number - (len(known) - 1) / 2)
        for row, estimate in enumerate(dots.estimates):
            if estimate is not None:
                value, low, high = (scale * number for number in (estimate.value, estimate.low, estimate.high))
                axes.errorbar(value, row + offset, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], fmt="o", markersize=4.5,
                              capsize=2, linewidth=1.3, color=COLOURS[dots.colour])
        axes.plot([], [], "o", color=COLOURS[dots.colour], label=dots.label)
    if line_at is not None:
        axes.axvline(line_at * scale, color=INK, linewidth=1, linestyle="--")
    if from_zero:
        axes.set_xlim(left=0)
    axes.set_ylim(max(2, len(names)) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.xaxis.set_major_formatter("{x:.0f} %" if percent else "{x:g}")
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    if len(known) > 1 or known != list(figures):
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.12 * 8 / (len(names) + 6)),
                    ncols=len(known))
    return Plot(title, data_uri(figure))


def agreement_plot(report: AgreementReport) -> Plot | None:
    """Alpha of everything and of each part."""
    names, parts = zip(*parts_of(report), strict=True)
    if all(part.alpha is None for part in parts):
        return None
    return dot_plot("Krippendorff's alpha", names, [
        Dots("of choices", [part.alpha for part in parts], 0),
        Dots("either order", [part.alpha_either_order for part in parts], 2),
        Dots("of ranks", [part.rank_alpha for part in parts], 1)], line_at=0.0, percent=False)


def annotator_plots(annotators: Sequence[Annotator]) -> list[Plot]:
    """Those for which there is anything to show."""
    names = [one.name for one in annotators]
    gold, skill = [one.gold for one in annotators], [one.skill for one in annotators]
    rest, bias = [one.with_the_rest for one in annotators], [one.position_bias for one in annotators]
    plots = []
    if any(gold) or any(skill):
        plots.append(dot_plot("Right choices", names, [Dots("on gold items", gold, 4), Dots("skill (Dawid-Skene)", skill, 0)],
                              line_at=None))
    if any(rest):
        plots.append(dot_plot("Same choice as most of the others", names, [Dots("with the rest", rest, 2)], line_at=None))
    if any(bias):
        plots.append(dot_plot("Preference for what is shown first", names, [Dots("first place", bias, 3)], line_at=0.0))
    if any(one.ties is not None for one in annotators):
        plots.append(bar_plot("Ties", names, [100 * (one.ties or 0.0) for one in annotators]))
    paces = [None if one.pace is None else Estimate(value=one.pace.median, low=one.pace.quartiles[0], high=one.pace.quartiles[1],
                                                    count=one.pace.count) for one in annotators]
    if any(paces):
        plots.append(dot_plot("Seconds a task: median and quartiles", names, [Dots("seconds", paces, 6)], line_at=None, percent=False,
                              from_zero=True))
        plots.append(seconds_plot(annotators))
    return plots


def bar_plot(title: str, names: Sequence[str], percents: Sequence[float]) -> Plot:
    figure, axes = new_figure(4.8, 0.9 + 0.3 * max(2, len(names)))
    axes.barh(range(len(names)), percents, height=0.6, color=COLOURS[5], alpha=0.85)
    axes.set_ylim(max(2, len(names)) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.xaxis.set_major_formatter("{x:g} %")
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    return Plot(title, data_uri(figure))


def seconds_plot(annotators: Sequence[Annotator]) -> Plot:
    """All annotators together."""
    counts = [sum(column) for column in zip(*(one.pace.histogram for one in annotators if one.pace is not None), strict=True)]
    labels = [f"< {SECONDS_EDGES[0]}", *(f"{low}–{high}" for low, high in pairwise(SECONDS_EDGES)),
              f"≥ {SECONDS_EDGES[-1]}"]
    figure, axes = new_figure(4.8, 2.7)
    axes.bar(range(len(counts)), counts, width=0.9, color=COLOURS[6], alpha=0.85)
    axes.set_xticks(range(len(counts)), labels, rotation=45, ha="right")
    axes.set_xlabel("seconds", fontsize=8, color=INK)
    axes.set_title("Tasks by the time they took", fontsize=10, color=INK, loc="left")
    return Plot("Tasks by the time they took", data_uri(figure))


def matrix_plot(report: AgreementReport, annotators: Sequence[Annotator]) -> Plot | None:
    """How often any two annotators chose the same, as colours; empty where they share too little to tell."""
    place = {one.name: number for number, one in enumerate(annotators)}
    known = [work for work in report.shared_work if work.first in place and work.second in place and work.pairs >= FEWEST_SHARED]
    if not known:
        return None
    size = len(annotators)
    cells = [[float("nan")] * size for _ in range(size)]
    for work in known:
        cells[place[work.first]][place[work.second]] = cells[place[work.second]][place[work.first]] = 100 * work.same_choice
    figure, axes = new_figure(2.4 + 0.34 * max(6, size), 1.8 + 0.34 * max(6, size))
    axes.grid(False)
    colours = colormaps["viridis"]
    image = axes.imshow(cells, cmap=colours, vmin=0, vmax=100)
    if size <= MOST_WITH_FIGURES:
        for work in known:
            for row, column in ((place[work.first], place[work.second]), (place[work.second], place[work.first])):
                axes.text(column, row, f"{100 * work.same_choice:.0f}", ha="center", va="center", fontsize=7,
                          color="black" if work.same_choice > 0.45 else "white")
    names = [short(one.name) for one in annotators]
    axes.set_xticks(range(size), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(size), names)
    axes.spines["bottom"].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, format="{x:.0f} %")
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    bar.outline.set_visible(False)
    axes.set_title("Same choice, of two annotators", fontsize=10, color=INK, loc="left")
    return Plot("Same choice, of two annotators", data_uri(figure))
