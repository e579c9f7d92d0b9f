"""What `annotation agreement` says in words: tables for the terminal and for the page, with what wants looking at marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from annotation.agreement import Agreement, AgreementReport
from annotation.annotator_quality import LEAST_ACCURACY, SIGNIFICANCE, Annotator, Estimate, Flag, Pace, PositionBias

NOTHING = "–"
ORDER_MATTERS = 0.05
"""Difference between the alphas from which on the order of the responses is worth a word."""


class Cell(NamedTuple):
    text: str
    bad: bool = False


class Table(NamedTuple):
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share * 100:.0f} %"


def share_of(estimate: Estimate | None) -> str:
    """91 % [88,94]: a narrow terminal breaks it before the interval."""
    if estimate is None:
        return NOTHING
    return f"{percent(estimate.value)} [{estimate.low * 100:.0f},{estimate.high * 100:.0f}]"


def alpha_of(estimate: Estimate | None) -> str:
    """0.86 [0.84,0.89]"""
    return NOTHING if estimate is None else f"{estimate.value:.2f} [{estimate.low:.2f},{estimate.high:.2f}]"


def bias_of(bias: PositionBias | None) -> str:
    """+12 % [+5,+19]: points above one half for the response shown first."""
    if bias is None:
        return NOTHING
    return f"{bias.value * 100:+.0f} % [{bias.low * 100:+.0f},{bias.high * 100:+.0f}]"


def pace_of(pace: Pace | None) -> str:
    return NOTHING if pace is None else f"{pace.median:.0f} s"


def annotator_table(annotators: Iterable[Annotator]) -> Table:
    """A row an annotator."""
    head = ("annotator", "tasks", "discarded", "gold", "with the rest", "skill", "first place", "ties", "pace", "look at")
    rows = tuple((Cell(one.name), Cell(str(one.tasks)), Cell(str(one.discarded)), Cell(share_of(one.gold), "gold" in one.flags),
                  Cell(share_of(one.with_the_rest)), Cell(share_of(one.skill), "skill" in one.flags),
                  Cell(bias_of(one.position_bias), "position" in one.flags), Cell(percent(one.ties)),
                  Cell(pace_of(one.pace), "pace" in one.flags), Cell(", ".join(flag_text(flag, one) for flag in one.flags), True))
                 for one in annotators)
    return Table("Annotators", head, rows)


def flag_text(flag: Flag, annotator: Annotator) -> str:
    """What wants looking at, in a word or two; `meaning_of_flags` says when."""
    match flag:
        case "gold" | "skill":
            return flag
        case "position":
            bias = annotator.position_bias
            return f"prefers {'first' if bias is not None and bias.value > 0 else 'last'}"
        case "pace":
            return "too fast"


def meaning_of_flags() -> str:
    return (f"Look at: gold, skill – surely below {percent(LEAST_ACCURACY)} (the whole interval is); prefers first, prefers last – too "
            f"often for chance ({percent(SIGNIFICANCE)} to flag anybody by mistake); too fast – most tasks faster than their responses can "
            "be read.")


def agreement_table(report: AgreementReport) -> Table:
    """Everything together, then each part of it, where there are several parts."""
    head = ("", "tasks", "shared pairs", "alpha", "alpha, either order", "alpha of ranks", "same choice")
    return Table("Agreement", head, tuple(_agreement_row(name, part) for name, part in parts_of(report)))


def parts_of(report: AgreementReport) -> list[tuple[str, Agreement]]:
    """Everything, then what it divides into where that is more than one part; each with its name."""
    parts = [("all", report.overall)]
    if len(report.by_responses) > 1:
        parts += [(f"{count} responses", part) for count, part in report.by_responses.items()]
    if len(report.by_guideline) > 1:
        parts += [(version or "no version", part) for version, part in report.by_guideline.items()]
    return parts


def _agreement_row(name: str, part: Agreement) -> tuple[Cell, ...]:
    return (Cell(name), Cell(str(part.tasks)), Cell(str(part.shared_pairs)), Cell(alpha_of(part.alpha)),
            Cell(alpha_of(part.alpha_either_order)), Cell(alpha_of(part.rank_alpha)), Cell(share_of(part.same_choice)))


def disputed_table(report: AgreementReport) -> Table:
    rows = tuple((Cell(task.task_id), Cell(str(task.annotators)), Cell(percent(task.same_choice)), Cell(task.source or NOTHING))
                 for task in report.disputed)
    return Table("Most disputed tasks", ("task", "annotators", "same choice", "from"), rows)


def confidence_table(report: AgreementReport) -> Table:
    rows = tuple((Cell(str(level.confidence)), Cell(str(level.votes)), Cell(share_of(level.with_the_rest))) for level in report.confidence)
    return Table("Confidence", ("confidence", "votes on pairs", "with the rest"), rows)


def overlap_table(overlap: Mapping[int, int]) -> Table:
    rows = tuple((Cell(str(count)), Cell(str(tasks))) for count, tasks in overlap.items())
    return Table("Overlap", ("annotators of a task", "tasks"), rows)


def notes_of(report: AgreementReport) -> list[str]:
    """What the figures cannot say by themselves."""
    overall, notes = report.overall, []
    if not overall.verdicts:
        notes.append("Nobody has submitted a verdict yet.")
    elif not overall.shared_pairs:
        notes.append("No two annotators judged the same task, so nothing can be told about agreement. Ask for an overlap of 2 or more.")
    elif overall.alpha is None:
        notes.append("All votes that could be compared are the same, so that chance alone would agree as well: alpha is not defined.")
    if (overall.alpha is not None and overall.alpha_either_order is not None
            and overall.alpha_either_order.value - overall.alpha.value > ORDER_MATTERS):
        notes.append("Alpha is lower than with either order: the candidates list their responses in an order that tells which one tends "
                     "to win, so that part of the agreement counts as chance. Annotators do not see that order.")
    if not report.truth_settled:
        notes.append("The Dawid-Skene fit has not settled; its skills are rough.")
    flagged = [one.name for one in report.annotators if one.flags]
    if flagged:
        notes.append(f"{len(flagged)} of {len(report.annotators)} annotators want looking at: {', '.join(flagged)}.")
    return notes
