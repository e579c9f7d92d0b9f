"""Commands of `annotation`: agreement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from annotation.cli_options import DEFAULT_HOME, HomeFolder, Json, ProjectName
from annotation.home import Home
from rlhf.commands import EXIT_CODES, Outcome

if TYPE_CHECKING:
    from annotation.agreement import Agreement
    from annotation.agreement_tables import Table

PAGE_FILE = "agreement.html"
WIDE = 130
"""Columns of a terminal that has room for figures and intervals side by side."""


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog=EXIT_CODES)(agreement)


def agreement(
    name: ProjectName,
    output: Annotated[Path | None, typer.Option(metavar="FILE.html", help="page with plots; without it, agreement.html in the project's "
                                                "folder", show_default=False)] = None,
    min_alpha: Annotated[float | None, typer.Option(metavar="ALPHA", min=-1, max=1, help="exit code 1 where Krippendorff's alpha of "
                                                    "choices is lower, or cannot be told", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="of the resamples behind the intervals of alpha")] = 0,
    show_texts: Annotated[bool, typer.Option("--show-texts", help="prompts and responses of the most disputed tasks in the page; they are "
                                             "left out otherwise, because they may be offensive or secret")] = False,
    home: HomeFolder = DEFAULT_HOME,
    as_json: Json = False,
) -> Outcome:
    """How far annotators agree, and how good each of them is: Krippendorff's alpha, gold items, position bias, pace, Dawid-Skene skill.

    Reads the verdicts that `annotation pull` has written, and asks no server. docs/agreement.md defines every figure.
    """
    from annotation.agreement import measure
    from annotation.agreement_tables import agreement_table, annotator_table, confidence_table, meaning_of_flags, notes_of
    from annotation.page import write_page
    from annotation.project import load_project, load_tasks
    from annotation.verdicts import VerdictLog

    console = Console(stderr=as_json)
    project = load_project(Home(home), name)
    tasks = load_tasks(project)
    report = measure(tasks, VerdictLog(project.verdicts_file).current(), seed=seed, console=console)
    page = output or project.folder / PAGE_FILE
    write_page(report, page, project=project.name, texts=tasks if show_texts else None)
    for table in (agreement_table(report), annotator_table(report.annotators), confidence_table(report)):
        if table.rows:
            console.print(terminal_table(table, width=console.width))
    if any(one.flags for one in report.annotators):
        console.print(meaning_of_flags(), soft_wrap=True, highlight=False)
    for note in notes_of(report):
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    passed = min_alpha is None or passes(report.overall, min_alpha)
    if min_alpha is not None:
        console.print(verdict_on(report.overall, min_alpha), style="green" if passed else "red", highlight=False, soft_wrap=True)
    console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    return Outcome({"ok": passed, "page": page, "notes": notes_of(report), **asdict(report)}, 0 if passed else 1)


def passes(overall: Agreement, min_alpha: float) -> bool:
    return overall.alpha is not None and overall.alpha.value >= min_alpha


def verdict_on(overall: Agreement, min_alpha: float) -> str:
    if overall.alpha is None:
        return f"alpha cannot be told, so it does not reach {min_alpha:g}"
    word = "reaches" if passes(overall, min_alpha) else "is below"
    return f"alpha {overall.alpha.value:.3f} {word} {min_alpha:g}"


def terminal_table(table: Table, *, width: int) -> TerminalTable:
    """Words to the left, figures to the right, what wants looking at in red. A narrow terminal has intervals below their figures."""
    shown = TerminalTable(title=table.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    narrow = width < WIDE
    for head in table.head:
        words = head in (table.head[0], "look at")
        shown.add_column(head.replace(" ", "\n") if narrow else head, justify="left" if words else "right", no_wrap=not words,
                         overflow="fold")
    for row in table.rows:
        texts = [cell.text.replace(" [", "\n[") if narrow else cell.text for cell in row]
        shown.add_row(*(Text(text, style="red" if cell.bad else "") for text, cell in zip(texts, row, strict=True)))
    return shown
