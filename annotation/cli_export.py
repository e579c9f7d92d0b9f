"""Commands of `annotation`: export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from annotation.cli_options import DEFAULT_HOME, HomeFolder, Json, ProjectName
from annotation.home import Home
from rlhf.commands import EXIT_CODES, Outcome

if TYPE_CHECKING:
    from annotation.export import Export

MANY_DISPUTES = 0.3
"""Share of the judged tasks above which the guidelines, or the annotators, want looking at before the records are used."""
TASKS = {"ranking": ("ranking", "rankings.jsonl, pairs.jsonl"), "tie": ("all responses equally good", "ties.jsonl"),
         "undecided": ("no response has the votes that the policy asks for", "disputes.jsonl"),
         "contradiction": ("the decided pairs go round in a circle", "disputes.jsonl"),
         "unplaced": ("decided pairs leave a response without a place", "disputes.jsonl, pairs.jsonl"),
         "too_few_votes": ("fewer votes than --min-votes", "disputes.jsonl"), "no_votes": ("nobody ranked them yet", ""),
         "gold": ("gold items", "")}
"""Kind -> what it means, and where such tasks are."""
PAIRS = {"strict": ("one response is better", "pairs.jsonl"), "tie": ("decided to be equally good", ""), "open": ("not decided", ""),
         "contradiction": ("of tasks whose pairs go round in a circle", ""),
         "too_few_votes": ("of tasks with fewer votes than --min-votes", ""),
         "repeated": ("shown by several tasks, which agree", "pairs.jsonl, once"),
         "tasks_disagree": ("shown by several tasks, which disagree", "")}


VERDICTS = {"used": ("votes that were counted", ""), "gold": ("on gold items", ""), "discarded": ("seen and refused, no vote", ""),
            "withdrawn": ("taken back, no vote", ""), "other_annotator": ("of people who were not asked for", ""),
            "other_guideline": ("under another version than was asked for", ""),
            "unknown_task": ("on tasks that the project does not have", "")}


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog=EXIT_CODES)(export)


def export(
    name: ProjectName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new folder; nothing is ever overwritten", show_default=False)],
    policy: Annotated[Literal["majority", "unanimous", "dawid-skene", "all"],
                      typer.Option(help="what decides a pair: more than half of its votes; all of them; the likeliest truth, given how "
                                        "reliable each annotator is; or nothing (all: every ranking as it was given)")] = "majority",
    min_votes: Annotated[int | None, typer.Option(help="annotators that must have ranked a task; without it the project's overlap, at "
                                                       "least 2 for unanimous, 1 for all")] = None,
    min_posterior: Annotated[float, typer.Option(help="of dawid-skene: a choice decides when it is likelier than this, from 0.5")] = 0.8,
    holdout_percent: Annotated[float, typer.Option(help="share of the prompts to hold out, by hash: the same in every export")] = 5.0,
    annotators: Annotated[list[str] | None, typer.Option(metavar="NAME", help="count only these; repeat it", show_default=False)] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="NAME", help="leave these out; repeat it", show_default=False)] = None,
    guideline: Annotated[str | None, typer.Option(metavar="VERSION", help="count only votes given under this version: v2")] = None,
    home: HomeFolder = DEFAULT_HOME,
    as_json: Json = False,
) -> Outcome:
    """Verdicts become records: rankings and pairs with votes, agreement and smoothing, for train and holdout; ties; disputes."""
    from annotation.export import ExportSettings, make_export
    from annotation.export_folder import origin_of, require_new, write_export
    from annotation.project import load_project, load_tasks
    from annotation.verdicts import VerdictLog

    console = Console(stderr=as_json)
    project = load_project(Home(home), name)
    require_new(out)
    if min_votes is None:
        min_votes = {"unanimous": max(2, project.overlap), "all": 1}.get(policy, project.overlap)
    settings = ExportSettings(policy=policy, min_votes=min_votes, min_posterior=min_posterior, holdout_percent=holdout_percent,
                              annotators=tuple(annotators or ()), without=tuple(without or ()), guideline=guideline)
    standing = VerdictLog(project.verdicts_file).current()
    found = make_export(load_tasks(project), standing, settings, project=project.name, console=console)
    manifest = write_export(found, out, origin=origin_of(project.name, settings, standing), console=console)
    warnings = warnings_of(found)
    for table in (counts_table("verdicts", found.verdicts, VERDICTS), counts_table("tasks", found.tasks, TASKS),
                  counts_table("pairs", found.pairs, PAIRS), files_table(manifest["files"])):
        console.print(table)
    for warning in warnings:
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"export: {out} (content {manifest['content_id']})", markup=False, highlight=False, soft_wrap=True)
    return Outcome({"ok": True, "folder": out, "warnings": warnings, **manifest})


def counts_table(title: str, counts: Mapping[str, int], meaning: Mapping[str, tuple[str, str]]) -> Table:
    """Every kind that occurs; the rows add up to the last one."""
    table = Table(title, "", "file", "number", title_justify="left")
    table.columns[-1].justify = "right"
    for kind, count in counts.items():
        if count:
            table.add_row(kind, *meaning[kind], f"{count:,}")
    table.add_section()
    table.add_row("all", "", "", f"{sum(counts.values()):,}")
    return table


def files_table(files: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("file", "rows", "records")
    table.columns[1].justify = "right"
    for name, file in files.items():
        table.add_row(name, f"{file['rows']:,}", file["records"])
    return table


def warnings_of(export: Export) -> list[str]:
    """What to know before anything is trained on these records."""
    tasks, agreement = export.tasks, export.strict_agreement
    disputed = tasks["undecided"] + tasks["contradiction"] + tasks["unplaced"]
    judged = disputed + tasks["ranking"] + tasks["tie"]
    found = []
    if judged and disputed / judged > MANY_DISPUTES:
        found.append(f"{disputed} of {judged} judged tasks ({disputed / judged:.0%}) are disputed. Read disputes.jsonl, look at "
                     "`annotation agreement`, and sharpen the guidelines.")
    if agreement.error_rate is None:
        found.append("no pair has two strict votes, so nothing is known of how often a vote is wrong: records have no smoothing. An "
                     "overlap of 2 or more, on some tasks at least, tells.")
    elif agreement.error_rate == 0.5:
        found.append(f"only {agreement.agreeing} of {agreement.vote_pairs} pairs of strict votes agree, no more than coins would: every "
                     "smoothing by votes is 0.5, and such a preference teaches nothing.")
    if export.verdicts["unknown_task"]:
        found.append(f"{export.verdicts['unknown_task']} verdicts are on tasks that the project does not have, and were left out.")
    if export.pairs["tasks_disagree"]:
        found.append(f"{export.pairs['tasks_disagree']} pairs were shown by several tasks that disagree, and were left out.")
    if not any((export.sides["holdout"].rankings, export.sides["holdout"].pairs)):
        found.append("nothing is held out: there are too few prompts for --holdout-percent. Training stages can hold out prompts by "
                     "themselves; the sides are the same.")
    return found
