"""What a report shows of a stage in which people annotated: annotation.json as tables.

    overall       figures of `annotation agreement --json`: tasks, annotators, verdicts, alpha, same_choice
    annotators    name, tasks, discarded, and gold, skill, position_bias: value, low, high, and `true` where the truth is known (simulated
                  annotators); a figure may be missing
    known         how many figures have a `true`; `outside` names those whose interval misses it
    page          the whole page of `annotation agreement`, in the stage's folder
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.evaluate.run_folder import RunView, StageView
from rlhf.evaluate.tables import Table, Tile, interval_text, number

FIGURES = {"gold": "gold items", "skill": "skill", "position_bias": "1st place"}
"""Figures of annotators by their names in annotation.json, as the tables call them."""


class AnnotationSection(NamedTuple):
    run: str
    stage: str
    overall: Table
    annotators: Table
    note: str
    page: str
    """Where the whole page lies, as the report links to it."""


def annotation_sections(runs: Sequence[RunView], output: Path) -> list[AnnotationSection]:
    """One a stage that holds annotation.json."""
    return [AnnotationSection(run.name if len(runs) > 1 else "", stage.name, overall_table(stage.annotation),
                              annotator_table(stage.annotation, counts=True), truth_note(stage.annotation),
                              os.path.relpath(run.folder / stage.name / stage.annotation["page"], output.parent))
            for run in runs for stage in run.stages if stage.annotation]


def agreement_tile(stage: StageView) -> Tile:
    """The one figure that says whether the labels can be learned from."""
    alpha = stage.annotation["overall"]["alpha"]
    if alpha is None:
        return Tile(f"{stage.name}: agreement", "–", "no pair was judged twice")
    return Tile(f"{stage.name}: agreement, alpha", f"{alpha['value']:.2f}", f"95 %: [{alpha['low']:.2f}, {alpha['high']:.2f}]")


def overall_table(content: Mapping[str, Any]) -> Table:
    overall = content["overall"]
    rows = [(label, number(overall[key])) for label, key in (("tasks", "tasks"), ("annotators", "annotators"), ("verdicts", "verdicts"))]
    rows.append(("Krippendorff's alpha of choices", estimate_text(overall["alpha"], percent=False)))
    rows.append(("two votes on a pair are the same", estimate_text(overall["same_choice"], percent=True)))
    return Table(("agreement", ""), tuple(rows))


def annotator_table(content: Mapping[str, Any], *, counts: bool) -> Table:
    """A row an annotator, figures in percent; an estimate is followed by the true value where one is known. `counts`: of tasks, too."""
    known = [figure for figure in FIGURES if any(figure in row["figures"] for row in content["annotators"])]
    true = {figure for figure in known if any("true" in row["figures"].get(figure, ()) for row in content["annotators"])}
    head = [column for figure in known for column in (f"{FIGURES[figure]}, %", *(("true",) if figure in true else ()))]
    rows = []
    for row in content["annotators"]:
        cells = []
        for figure in known:
            estimate = percents(row["figures"].get(figure, {}))
            cells.append("{value} [{low}, {high}]".format(**estimate) if estimate else "–")
            cells += [str(estimate["true"]) if "true" in estimate else "–"] if figure in true else []
        rows.append((row["name"], *((number(row["tasks"]), number(row["discarded"])) if counts else ()), *cells))
    return Table(("annotator", *(("tasks", "discarded") if counts else ()), *head), tuple(rows))


def percents(estimate: Mapping[str, float]) -> dict[str, int]:
    """Whole ones: intervals of annotators are wide."""
    return {name: round(value * 100) for name, value in estimate.items()}


def truth_note(content: Mapping[str, Any]) -> str:
    if not content["known"]:
        return ""
    missed = f"; outside: {', '.join(content['outside'])}" if content["outside"] else ""
    return (f"The annotators are simulated, so the truth is known: {content['known'] - len(content['outside'])} of {content['known']} "
            f"intervals hold it, stretched to 95 % for all of them at once{missed}.")


def estimate_text(estimate: Mapping[str, float] | None, *, percent: bool) -> str:
    return interval_text(None if estimate is None else {"mean": estimate["value"], "low": estimate["low"], "high": estimate["high"]},
                         percent=percent)
