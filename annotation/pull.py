"""Responses of the server -> verdicts in the log: every one of them, each once, whenever it is stopped. docs/verdicts.md argues why.

Times are the server's: this machine's clock says only how long ago something was done here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rich.console import Console

from annotation.backend import Answer, Backend, Sheet, now
from annotation.project import Project, load_tasks
from annotation.pull_mark import NOTHING_SEEN, Mark, SheetMark, age_seconds, earlier, load_mark, save_mark
from annotation.tasks import Task
from annotation.verdicts import Statement, Verdict, VerdictLog, standing
from rlhf.errors import DataError, Problem
from rlhf.progress import progress

OVERLAP_SECONDS = 120.0
"""How far a reading goes back behind what was seen: a response gets its time before it is stored, and a server that waits for its database
stores it up to 30 s later (the timeout of SQLite)."""
WHOLE_AFTER_SECONDS = 24 * 3600.0
"""Age of the last whole reading at which another one is due, whatever the counts say."""
MOST_DELETED = 50
"""Deletions in one sheet at once that are believed without --accept-deletions."""
BATCH = 1000
"""Verdicts that are brought to the disk together."""


# What is reported

@dataclass(frozen=True, kw_only=True)
class SheetPull:
    """Of one sheet."""

    sheet: str
    read: int = 0
    """Responses that the server gave: with repetitions, those in the overlap of the last pull and, in a whole reading, all."""
    whole: bool = False
    """Whether every response was read, which finds deletions."""
    new: int = 0
    """Votes of an annotator on a task where none stood."""
    changed: int = 0
    """Votes that supersede one."""
    discarded: int = 0
    withdrawn: int = 0
    """Votes and discards that were made a draft again, or deleted."""
    drafts: int = 0
    """Drafts that were read; none of them is a vote."""


@dataclass(frozen=True, kw_only=True)
class PullReport:
    project: str
    verdicts: tuple[Verdict, ...]
    """Those that are new in the log, in its order."""
    sheets: tuple[SheetPull, ...]
    problems: tuple[Problem, ...]
    """Responses that could not be taken as they are: each named, none passed over."""
    cut_off_bytes: int
    """Of a torn last line that an interrupted pull had left; what it said was read again."""

    def counts(self) -> dict[str, int]:
        """New, changed, discarded, withdrawn, drafts and read, over all sheets."""
        return {"new": sum(sheet.new for sheet in self.sheets), "changed": sum(sheet.changed for sheet in self.sheets),
                "discarded": sum(sheet.discarded for sheet in self.sheets), "withdrawn": sum(sheet.withdrawn for sheet in self.sheets),
                "drafts": sum(sheet.drafts for sheet in self.sheets), "read": sum(sheet.read for sheet in self.sheets)}


# One response

def verdict_of(answer: Answer, task: Task, *, guideline: str) -> Verdict:
    """What a submitted or discarded response says, unblinded. Raises DataError for ranks that rank something else than this task."""
    assert answer.status != "draft", "a draft says nothing yet"
    ranks: tuple[int, ...] = ()
    if answer.status == "submitted":
        places = len(task.order)
        if any(isinstance(rank, bool) or not 1 <= rank <= places for rank in answer.ranks):
            raise DataError(f"ranks of {places} responses are from 1 to {places}, got {answer.ranks}")
        ranks = task.unblind(answer.ranks)
    return Verdict(task_id=task.id, annotator=answer.annotator, kind=answer.status, ranks=ranks, order=task.order,
                   confidence=answer.confidence, reason=answer.reason, comment=answer.comment, began=answer.inserted_at,
                   at=answer.updated_at, guideline=guideline, response_id=answer.response_id)


def withdrawal_of(verdict: Verdict, *, at: str) -> Verdict:
    """That a verdict no longer holds. When a response was deleted nobody knows: `at` is then the time at which it was said, and the
    withdrawal supersedes because it comes after it. Read twice it is the same verdict, so that it is written once."""
    return replace(verdict, kind="withdrawn", ranks=(), confidence=None, reason=None, comment=None, at=at)


def is_behind(answer: Answer, said: Verdict | None, before: Verdict) -> bool:
    """Whether the log knows a later state than the server: never, unless the server's data or its clock were put back."""
    back_again = before.kind == "withdrawn" and said is not None and said.at == before.at
    return answer.updated_at < before.at or back_again


class Intake:
    """One pull: takes responses in the order in which the server gives them, writes what is new, and counts."""

    def __init__(self, project: Project, tasks: Mapping[str, Task], log: VerdictLog) -> None:
        self.project, self.tasks, self.log = project, tasks, log
        self.stands = standing(log.read())
        self.counts: Counter[str] = Counter()
        """Over all sheets; the names are fields of SheetPull."""
        self.new: list[Verdict] = []
        self.unknown: Counter[str] = Counter()
        """Task id -> responses to a task that the project does not have."""
        self.problems: list[Problem] = []
        self._waiting: list[Verdict] = []

    def take(self, answer: Answer) -> None:
        """What cannot be used becomes a problem; the vote that it replaces, if there is one, is withdrawn."""
        self.counts["read"] += 1
        self.counts["drafts"] += answer.status == "draft"
        task = self.tasks.get(answer.task_id)
        if task is None:
            self.unknown[answer.task_id] += 1
            return
        said = self._said(answer, task)
        before = self.stands.get((answer.task_id, answer.annotator))
        if before is not None and is_behind(answer, said, before):
            self._keep_behind(answer, said, before)
        elif said is not None:
            self._state(said, before)
        elif before is not None and before.kind != "withdrawn":
            self._state(withdrawal_of(before, at=answer.updated_at), before)

    def withdraw(self, verdict: Verdict) -> None:
        """The server no longer has it."""
        self._state(withdrawal_of(verdict, at=verdict.at), verdict)

    def write(self) -> None:
        """Bring to the disk what was taken."""
        self.log.append(self._waiting)
        self._waiting = []

    def _said(self, answer: Answer, task: Task) -> Verdict | None:
        """None: no statement, a draft or one that cannot be read."""
        if answer.status == "draft":
            return None
        try:
            return verdict_of(answer, task, guideline=self.project.guideline_at(answer.updated_at))
        except DataError as error:
            self.problems.append(Problem(f"response {answer.response_id} of {answer.annotator}", f"{error}. It is no vote. Ask the "
                                         "annotator to rank the task again, and look at what writes to the server besides its page."))
            return None

    def _keep_behind(self, answer: Answer, said: Verdict | None, before: Verdict) -> None:
        """Into the history, which holds whatever was seen; the log's state stands."""
        if said is not None:
            self._waiting.append(said)
        self.problems.append(Problem(
            f"response {answer.response_id} of {answer.annotator}",
            f"the server has it as {answer.status} at {answer.updated_at}, the log as {before.kind} at {before.at}, which stands. Was an "
            "older backup of the server restored, or its clock put back? It is settled when the annotator submits it again."))

    def _state(self, verdict: Verdict, before: Verdict | None) -> None:
        if before is not None and before.content_id == verdict.content_id:
            return
        voted = before is not None and before.kind == "submitted"
        self.counts[("changed" if voted else "new") if verdict.kind == "submitted" else verdict.kind] += 1
        self.stands[verdict.about] = verdict
        self.new.append(verdict)
        self._waiting.append(verdict)
        if len(self._waiting) >= BATCH:
            self.write()


# A sheet

class SheetReading:
    """Reads one sheet: what happened since the last time, and everything where that is due or answers went away."""

    def __init__(self, sheet: Sheet, backend: Backend, intake: Intake, console: Console | None) -> None:
        self.sheet, self.backend, self.intake, self.console = sheet, backend, intake, console

    def since(self, mark: SheetMark) -> SheetMark:
        """Read what was stored after the mark. Deletions leave no trace that could be read."""
        latest, seconds = self._take(self.backend.answers(self.sheet, after=earlier(mark.seen_until, OVERLAP_SECONDS)), set())
        return replace(mark, seen_until=max(mark.seen_until, earlier(latest, seconds)))

    def whole(self) -> tuple[SheetMark, list[Verdict]]:
        """Read every response. Also the standing verdicts whose response is gone."""
        before = self._standing()
        seen: set[Statement] = set()
        began = now()
        total = sum(sum(counts.values()) for counts in self.backend.progress(self.sheet).by_annotator.values())
        with progress(self.console, f"pull {self.sheet.name}", total) as bar:
            def shown() -> Iterator[Answer]:
                for answer in self.backend.answers(self.sheet):
                    bar.advance()
                    yield answer
            latest, seconds = self._take(shown(), seen)
        gone = [verdict for verdict in before if verdict.about not in seen]
        return SheetMark(seen_until=earlier(latest, seconds), whole_at=began), gone

    def lacks_answers(self) -> bool:
        """Whether the server counts fewer answers of somebody than stand in the log: some were deleted. A deletion beside a new answer that
        was not read yet stays hidden until the next time."""
        stand = Counter((verdict.annotator, verdict.kind) for verdict in self._standing())
        counts = self.backend.progress(self.sheet).by_annotator
        return any(counts.get(annotator, {}).get(kind, 0) < number for (annotator, kind), number in stand.items() if kind != "withdrawn")

    def _take(self, answers: Iterator[Answer], seen: set[Statement]) -> tuple[str, float]:
        """Latest time among the answers, and the seconds that reading them took: what was changed behind the reader's back meanwhile may
        be that much older than the latest."""
        start, latest = time.monotonic(), NOTHING_SEEN
        for answer in answers:
            self.intake.take(answer)
            seen.add((answer.task_id, answer.annotator))
            latest = max(latest, answer.updated_at)
        self.intake.write()
        return latest, time.monotonic() - start

    def _standing(self) -> list[Verdict]:
        """Votes and discards on tasks of this sheet."""
        return [verdict for verdict in self.intake.stands.values()
                if len(verdict.order) == self.sheet.places and verdict.kind != "withdrawn"]


def pull_sheet(reading: SheetReading, mark: SheetMark | None, *, whole: bool, accept_deletions: bool) -> tuple[SheetMark, SheetPull]:
    """Bring the log up to date with one sheet."""
    before = reading.intake.counts.copy()
    due = whole or mark is None or age_seconds(mark.whole_at) > WHOLE_AFTER_SECONDS
    if mark is not None and not due:
        mark = reading.since(mark)
        due = reading.lacks_answers()
    if mark is None or due:
        mark, gone = reading.whole()
        if len(gone) <= MOST_DELETED or accept_deletions:
            for verdict in gone:
                reading.intake.withdraw(verdict)
            reading.intake.write()
        else:
            reading.intake.problems.append(Problem(
                f"sheet {reading.sheet.name}", f"{len(gone)} responses that stand in the log are gone from the server. They still "
                "count. Was the data set or an account deleted, or an older backup restored? Put it back, or say with "
                "--accept-deletions that they are meant to be gone."))
    counts = reading.intake.counts - before
    return mark, SheetPull(sheet=reading.sheet.name, whole=due, **counts)


# A project

class Puller:
    """Pulls one project, as often as one likes. What was read from the disk is kept, so that following a project costs little."""

    def __init__(self, log: VerdictLog) -> None:
        self.log = log
        self._tasks: Mapping[str, Task] = {}
        self._tasks_size = -1

    def pull(self, project: Project, backend: Backend, console: Console | None, *, whole: bool = False,
             accept_deletions: bool = False) -> PullReport:
        """Bring the log up to date. Raises BackendError where the server fails, StorageError where another pull runs or the disk is full:
        what was written until then stays, and the next pull continues."""
        with self.log.alone():
            cut_off_before = self.log.cut_off_bytes
            intake = Intake(project, self._ledger(project), self.log)
            mark = load_mark(project)
            known = mark.sheets if mark is not None and mark.verdicts <= len(self.log.read()) else {}
            sheets, marks = [], {}
            for sheet in project.sheets():
                reading = SheetReading(sheet, backend, intake, console)
                marks[sheet.name], counts = pull_sheet(reading, known.get(sheet.name), whole=whole, accept_deletions=accept_deletions)
                sheets.append(counts)
            save_mark(project, Mark(at=now(), verdicts=len(self.log.read()), sheets=marks))
        unknown = [Problem(f"task {task_id}", f"{count} responses on the server, but the project has no such task, so they cannot be "
                           "unblinded. Was tasks.jsonl replaced by an older one? `annotation restore` brings it back.")
                   for task_id, count in intake.unknown.items()]
        return PullReport(project=project.name, verdicts=tuple(intake.new), sheets=tuple(sheets), problems=(*intake.problems, *unknown),
                          cut_off_bytes=self.log.cut_off_bytes - cut_off_before)

    def _ledger(self, project: Project) -> Mapping[str, Task]:
        size = project.tasks_file.stat().st_size if project.tasks_file.exists() else 0
        if size != self._tasks_size:
            self._tasks, self._tasks_size = load_tasks(project), size
        return self._tasks


def pull(project: Project, backend: Backend, console: Console | None, *, whole: bool = False, accept_deletions: bool = False) -> PullReport:
    """Bring a project's log up to date, once: see Puller.pull."""
    return Puller(VerdictLog(project.verdicts_file)).pull(project, backend, console, whole=whole, accept_deletions=accept_deletions)
