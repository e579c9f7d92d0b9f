"""How a round of annotation is going: what is done, by whom, how fast, how far people agree, and when it will be over.

Figures come from the verdicts that were pulled, except for what only the server knows: drafts, and its own counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from annotation.backend import SheetProgress
from annotation.project import Project
from annotation.pull_mark import Mark, earlier
from annotation.tasks import Task
from annotation.verdicts import Verdict, standing
from annotation.vote_table import vote_table
from annotation.votes import pair_votes
from rlhf.maths.agreement import krippendorff_alpha

DAY = 24 * 3600.0
PACE_DAYS = 7
LONGEST_GAP = 600.0
"""Seconds between two submissions of one person above which there was a break, not work."""
STOPPED_DAYS = 3
"""Without a submission for so long, somebody who once began is named."""


@dataclass(frozen=True, kw_only=True)
class AnnotatorStatus:
    name: str
    submitted: int
    """Votes that stand."""
    discarded: int
    drafts: int | None
    """On the server; None where it was not asked."""
    last_day: int
    """Tasks first answered in the last 24 h."""
    per_day: float
    """Over the last 7 days, or as many as there were since this project's first answer; at least one."""
    seconds_per_task: float | None
    """Median from one submission to the next, breaks left out; None where there are no two in a row."""
    last_at: str | None
    """Of the latest answer; None: none yet."""
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class SheetStatus:
    name: str
    tasks: int
    completed: int
    """Tasks with as many votes as the overlap asks for."""
    begun: int
    """Tasks with fewer votes than that, but some."""


@dataclass(frozen=True, kw_only=True)
class AgreementSoFar:
    """None where nothing can be told yet."""

    shared_pairs: int
    """Pairs of responses with at least two votes."""
    same_choice: float | None
    """Chance that two votes on a pair are the same, ties among them."""
    alpha: float | None
    """Krippendorff's, nominal, over pairs; also None where all votes are the same, so that chance would agree as well."""


@dataclass(frozen=True, kw_only=True)
class ProjectStatus:
    project: str
    overlap: int
    sheets: tuple[SheetStatus, ...]
    annotators: tuple[AnnotatorStatus, ...]
    """By name. Whoever has an answer on the server or in the log."""
    agreement: AgreementSoFar
    votes_missing: int
    """Until every task has as many votes as the overlap asks for."""
    per_day: float
    """Answers of all annotators, as AnnotatorStatus.per_day."""
    last_day: int
    days_left: float | None
    """At that pace; None where nobody answered in the last 7 days."""
    pulled_at: str | None
    """This machine's time; None: never."""
    not_pulled: int | None
    """Votes that the server counts beyond those in the log (below 0: that were deleted there since); None where it was not asked."""

    def total(self) -> SheetStatus:
        """Over the sheets."""
        return SheetStatus(name=self.project, tasks=sum(sheet.tasks for sheet in self.sheets),
                           completed=sum(sheet.completed for sheet in self.sheets), begun=sum(sheet.begun for sheet in self.sheets))


def status_of(project: Project, tasks: Mapping[str, Task], log: Sequence[Verdict], progress: Mapping[str, SheetProgress] | None,
              mark: Mark | None, *, now: str) -> ProjectStatus:
    """`log` is every verdict; `progress` the server's counts by sheet, or None where it does not answer; `now` is a `backend.utc`."""
    log = [verdict for verdict in log if verdict.task_id in tasks]
    stands = standing(log).values()
    votes = Counter(verdict.task_id for verdict in stands if verdict.kind == "submitted")
    firsts = first_answers(log)
    everything = sorted(moment for times in firsts.values() for moment in times)
    days = days_counted(everything, now)
    missing = sum(max(0, project.overlap - votes[task_id]) for task_id in tasks)
    per_day = since(everything, earlier(now, PACE_DAYS * DAY)) / days
    return ProjectStatus(
        project=project.name, overlap=project.overlap,
        sheets=tuple(_sheet_status(project, places, tasks, votes) for places in project.places),
        annotators=tuple(_annotator_status(name, stands, firsts.get(name, []), days, progress, now)
                         for name in sorted({verdict.annotator for verdict in stands} | set(_names(progress)))),
        agreement=agreement_so_far(stands), votes_missing=missing, per_day=per_day, last_day=since(everything, earlier(now, DAY)),
        days_left=missing / per_day if per_day else None,
        pulled_at=mark.at if mark is not None else None,
        not_pulled=None if progress is None else _submitted_on_server(progress) - sum(votes.values()))


# Pace

def first_answers(log: Iterable[Verdict]) -> dict[str, list[str]]:
    """Annotator -> when each task was first submitted or discarded, ascending. A change later on is no new task."""
    first: dict[tuple[str, str], str] = {}
    for verdict in log:
        if verdict.kind != "withdrawn":
            first[verdict.about] = min(first.get(verdict.about, verdict.at), verdict.at)
    times: defaultdict[str, list[str]] = defaultdict(list)
    for (_, annotator), moment in first.items():
        times[annotator].append(moment)
    return {annotator: sorted(moments) for annotator, moments in times.items()}


def since(times: Iterable[str], moment: str) -> int:
    """How many are not earlier."""
    return sum(time >= moment for time in times)


def days_counted(times: Sequence[str], now: str) -> float:
    """What a pace is divided by: the days since the first answer, at most 7, and at least one: nobody works around the clock."""
    if not times:
        return 1.0
    return min(float(PACE_DAYS), max(1.0, seconds_between(times[0], now) / DAY))


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def seconds_per_task(times: Sequence[str]) -> float | None:
    """Median gap between successive times of one person; gaps above 10 min are breaks."""
    gaps = [gap for gap in (seconds_between(before, after) for before, after in pairwise(times)) if gap <= LONGEST_GAP]
    return median(gaps) if gaps else None


# Parts

def agreement_so_far(stands: Iterable[Verdict]) -> AgreementSoFar:
    """As `annotation agreement` has it, without the intervals."""
    table = vote_table(pair_votes(stands))
    votes = table.votes_of_pair.double()
    count = votes.sum(1)
    votes, count = votes[count >= 2], count[count >= 2]
    if not len(count):
        return AgreementSoFar(shared_pairs=0, same_choice=None, alpha=None)
    same = (votes * (votes - 1)).sum(1) / (count * (count - 1))
    return AgreementSoFar(shared_pairs=len(count), same_choice=((same * count).sum() / count.sum()).item(),
                          alpha=krippendorff_alpha(table.choices, level="nominal"))


def _sheet_status(project: Project, places: int, tasks: Mapping[str, Task], votes: Mapping[str, int]) -> SheetStatus:
    given = [votes.get(task.id, 0) for task in tasks.values() if len(task.order) == places]
    completed = sum(count >= project.overlap for count in given)
    return SheetStatus(name=project.sheet(places).name, tasks=len(given), completed=completed,
                       begun=sum(count > 0 for count in given) - completed)


def _annotator_status(name: str, stands: Iterable[Verdict], times: Sequence[str], days: float,
                      progress: Mapping[str, SheetProgress] | None, now: str) -> AnnotatorStatus:
    kinds = Counter(verdict.kind for verdict in stands if verdict.annotator == name)
    drafts = None if progress is None else sum(sheet.by_annotator.get(name, {}).get("draft", 0) for sheet in progress.values())
    return AnnotatorStatus(
        name=name, submitted=kinds["submitted"], discarded=kinds["discarded"], drafts=drafts,
        last_day=since(times, earlier(now, DAY)), per_day=since(times, earlier(now, PACE_DAYS * DAY)) / days,
        seconds_per_task=seconds_per_task(times), last_at=times[-1] if times else None,
        stopped=bool(times) and times[-1] < earlier(now, STOPPED_DAYS * DAY))


def _names(progress: Mapping[str, SheetProgress] | None) -> set[str]:
    """Annotators with any answer on the server."""
    return {name for sheet in (progress or {}).values() for name, counts in sheet.by_annotator.items() if any(counts.values())}


def _submitted_on_server(progress: Mapping[str, SheetProgress]) -> int:
    return sum(counts.get("submitted", 0) for sheet in progress.values() for counts in sheet.by_annotator.values())
