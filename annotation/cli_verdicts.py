"""Commands of `annotation`: pull and status."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from annotation.cli_options import DEFAULT_HOME, HomeFolder, Json
from annotation.home import Home
from rlhf.commands import EXIT_CODES, Outcome, as_rows
from rlhf.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from annotation.backend import Backend, SheetProgress
    from annotation.pull import PullReport
    from annotation.status import ProjectStatus

SECONDS_POLLING, SECONDS_WITH_HINTS = 15.0, 60.0
MOST_SHOWN = 10
"""Problems on the screen; --json has all of them."""
BAR_WIDTH = 40
OptionalName = Annotated[str | None, typer.Argument(metavar="NAME", show_default=False, help="project: one round of annotation, for "
                                                    "example week-48")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (pull, status):
        app.command(epilog=EXIT_CODES)(command)


def pull(
    name: OptionalName = None,
    all_projects: Annotated[bool, typer.Option("--all", help="every project of the home")] = False,
    full: Annotated[bool, typer.Option("--full", help="read every response again; done by itself once a day, and whenever the server has "
                                       "fewer than the log")] = False,
    accept_deletions: Annotated[bool, typer.Option("--accept-deletions", help="more than 50 responses that are gone from the server at "
                                                   "once are meant to be gone: their votes no longer count")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="go on until Ctrl-C, a line for each change")] = False,
    every: Annotated[float | None, typer.Option(metavar="SECONDS", min=1, help="of --watch: how often to look; 15, or 60 with --webhook",
                                                show_default=False)] = None,
    webhook: Annotated[int | None, typer.Option(metavar="PORT", min=0, max=65535, help="of --watch: let the server, on this machine, tell "
                                                "when something happens; 0: any free port", show_default=False)] = None,
    home: HomeFolder = DEFAULT_HOME,
    as_json: Json = False,
) -> Outcome:
    """Verdicts from the server into the log: every ranking of every annotator, each once, drafts and suggestions never."""
    place, console = Home(home), Console(stderr=as_json)
    names = named_projects(place, name, all_projects=all_projects)
    if watch:
        if full or accept_deletions:
            raise ConfigError("--full and --accept-deletions are for one pull; run it once without --watch")
        seconds = every or (SECONDS_POLLING if webhook is None else SECONDS_WITH_HINTS)
        return follow_projects(place, None if all_projects else names, console, every=seconds, webhook=webhook)
    if every is not None or webhook is not None:
        raise ConfigError("--every and --webhook belong to --watch")
    reports = pull_once(place, names, console, full=full, accept_deletions=accept_deletions)
    return Outcome({"ok": not any(report.problems for report in reports), "projects": [answer_of(report) for report in reports]},
                   code=1 if any(report.problems for report in reports) else 0)


def named_projects(home: Home, name: str | None, *, all_projects: bool) -> list[str]:
    """Raises ConfigError unless one is named, or all of at least one."""
    known = home.projects()
    if name is not None and all_projects:
        raise ConfigError(f"name one project or give --all, not both (got {name} and --all)")
    if name is not None:
        return [name]
    if not all_projects:
        raise ConfigError(f"name a project or give --all; {home.folder} has {', '.join(known) or 'none yet: annotation push makes one'}")
    if not known:
        raise ConfigError(f"{home.folder} has no project yet; `annotation push` makes one, --home names another folder")
    return known


@contextmanager
def connected(home: Home) -> Iterator[Backend]:
    backend = connect(home)
    try:
        yield backend
    finally:
        backend.close()


def connect(home: Home) -> Backend:
    from annotation.argilla import ArgillaBackend

    return ArgillaBackend(home.connection())


# pull

def pull_once(home: Home, names: Sequence[str], console: Console, *, full: bool, accept_deletions: bool) -> list[PullReport]:
    from annotation.project import load_project
    from annotation.pull import pull as pull_project

    projects = [load_project(home, name) for name in names]
    reports = []
    with connected(home) as backend:
        for project in projects:
            report = pull_project(project, backend, console, whole=full, accept_deletions=accept_deletions)
            show_report(report, console)
            reports.append(report)
    return reports


def follow_projects(home: Home, names: Sequence[str] | None, console: Console, *, every: float, webhook: int | None) -> Outcome:
    """Until Ctrl-C or SIGTERM, which end it well."""
    from annotation.project import load_project
    from annotation.watch import Watch, follow
    from annotation.webhook import hints

    for name in names or ():
        load_project(home, name)    # a wrong name is said now
    watch = Watch(home, names, lambda: connect(home), console)
    try:
        with nullcontext(threading.Event()) if webhook is None else hints(home.connection(), webhook, watch.say) as rung:
            follow(watch.look, rung, every=every, say=watch.say)
    except KeyboardInterrupt:
        watch.say("stopped; what was shown is in the log")
    finally:
        watch.close()
    return Outcome({"ok": True, "stopped": True, "projects": [{"project": name, **counts} for name, counts in watch.counts.items()]})


def show_report(report: PullReport, console: Console) -> None:
    table = Table("sheet", "new", "changed", "discarded", "withdrawn", "drafts", "read", "", title=report.project, title_justify="left")
    for column in table.columns[1:7]:
        column.justify = "right"
    for sheet in report.sheets:
        counts = (sheet.new, sheet.changed, sheet.discarded, sheet.withdrawn, sheet.drafts, sheet.read)
        table.add_row(sheet.sheet, *(f"{count:,}" for count in counts), "every response" if sheet.whole else "since the last pull")
    console.print(table)
    if report.cut_off_bytes:
        say(console, f"an interrupted pull had left {report.cut_off_bytes} bytes of a line; they were cut off, and read again")
    for problem in report.problems[:MOST_SHOWN]:
        say(console, f"{problem.where}: {problem.what}", style="yellow")
    if len(report.problems) > MOST_SHOWN:
        say(console, f"and {len(report.problems) - MOST_SHOWN} more; --json has all of them", style="yellow")


def answer_of(report: PullReport) -> dict[str, Any]:
    return {"project": report.project, **report.counts(), "sheets": [asdict(sheet) for sheet in report.sheets],
            "problems": as_rows(report.problems), "cut_off_bytes": report.cut_off_bytes}


def say(console: Console, text: str, *, style: str = "") -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


# status

def status(name: OptionalName = None, home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> Outcome:
    """How far a project is, or every project: tasks, annotators, agreement so far, pace, days left."""
    place, console = Home(home), Console(stderr=as_json)
    found, silent = statuses(place, named_projects(place, name, all_projects=name is None))
    for project in found:
        show_status(project, console)
    if silent:
        say(console, f"from the log alone, without drafts: {silent}", style="yellow")
    return Outcome({"ok": True, "server_answers": not silent, "projects": [asdict(project) for project in found]})


def statuses(home: Home, names: Sequence[str]) -> tuple[list[ProjectStatus], str]:
    """Of each project, and why the server does not answer; empty where it does."""
    from annotation.backend import now
    from annotation.project import load_project, load_tasks
    from annotation.pull_mark import load_mark
    from annotation.status import status_of
    from annotation.verdicts import VerdictLog

    projects = [load_project(home, name) for name in names]
    progress: dict[str, dict[str, SheetProgress]] = {}
    silent = ""
    try:
        with connected(home) as backend:
            for project in projects:
                progress[project.name] = {sheet.name: backend.progress(sheet) for sheet in project.sheets()}
    except BackendError as error:
        silent = str(error)
    return [status_of(project, load_tasks(project), VerdictLog(project.verdicts_file).read(), progress.get(project.name),
                      load_mark(project), now=now()) for project in projects], silent


def show_status(status: ProjectStatus, console: Console) -> None:
    from annotation.pull_mark import age_seconds

    whole = status.total()
    cells = cells_of([whole.completed, whole.begun, whole.tasks - whole.completed - whole.begun])
    bar = f"[green]{'█' * cells[0]}[/][yellow]{'▒' * cells[1]}[/][bright_black]{'░' * cells[2]}[/]"
    console.print(f"[bold]{status.project}[/]  {bar}  {whole.completed:,} of {whole.tasks:,} tasks have {status.overlap} votes, "
                  f"{whole.begun:,} have some", highlight=False, soft_wrap=True)
    if len(status.sheets) > 1:
        for sheet in status.sheets:
            say(console, f"  {sheet.name}: {sheet.completed:,} of {sheet.tasks:,}, {sheet.begun:,} begun")
    say(console, f"  {pace_text(status)}")
    say(console, f"  {agreement_text(status)}")
    age = f"never; annotation pull {status.project}" if status.pulled_at is None else f"{duration(age_seconds(status.pulled_at))} ago"
    waiting = f"; {status.not_pulled:,} votes wait on the server" if status.not_pulled else ""
    say(console, f"  last pull: {age}{waiting}")
    if status.annotators:
        console.print(annotators_table(status))
    stopped = [person.name for person in status.annotators if person.stopped]
    if stopped:
        say(console, f"  stopped, nothing for 3 days: {', '.join(stopped)}", style="yellow")


def cells_of(counts: Sequence[int]) -> list[int]:
    """Widths that add up to the bar's; whatever is not 0 has at least one cell."""
    whole = sum(counts)
    if not whole:
        return [0] * len(counts)
    cells = [max(1, BAR_WIDTH * count // whole) if count else 0 for count in counts]
    cells[counts.index(max(counts))] += BAR_WIDTH - sum(cells)
    return cells


def pace_text(status: ProjectStatus) -> str:
    if not status.votes_missing:
        return "every task has its votes" if status.total().tasks else "no tasks yet: annotation push"
    if status.days_left is None:
        nobody = "nobody answered in the last 7 days" if any(person.last_at for person in status.annotators) else "nobody has answered yet"
        return f"{status.votes_missing:,} votes missing; {nobody}, so nothing can be said of when"
    return (f"{status.votes_missing:,} votes missing; {status.per_day:,.1f} answers a day over the last 7 days, {status.last_day:,} in the "
            f"last 24 h; {status.days_left:,.1f} days left at that pace")


def agreement_text(status: ProjectStatus) -> str:
    found = status.agreement
    if found.same_choice is None:
        return "agreement: nothing yet, no pair of responses has two votes"
    alpha = "not defined, all votes are the same" if found.alpha is None else f"{found.alpha:.3f}"
    return f"agreement so far: {found.same_choice:.1%} of votes on a pair are the same, alpha {alpha} ({found.shared_pairs:,} pairs)"


def annotators_table(status: ProjectStatus) -> Table:
    from annotation.pull_mark import age_seconds

    table = Table("name", "votes", "discards", "drafts", "24 h", "a day", "s a task", "last answer")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for person in status.annotators:
        table.add_row(person.name, f"{person.submitted:,}", f"{person.discarded:,}", "?" if person.drafts is None else f"{person.drafts:,}",
                      f"{person.last_day:,}", f"{person.per_day:,.1f}",
                      "" if person.seconds_per_task is None else f"{person.seconds_per_task:,.0f}",
                      "none yet" if person.last_at is None else f"{duration(age_seconds(person.last_at))} ago")
    return table


def duration(seconds: float) -> str:
    """90 s, 12 min, 5 h, 3 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
