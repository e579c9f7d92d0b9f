"""Small projects whose tasks lie in a backend, for tests of pull, watch and status."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from annotation.backend import Answer, Sheet
from annotation.memory import MemoryBackend
from annotation.project import Project, add_to_ledger, next_guideline, save_project
from annotation.tasks import Candidates, Task, make_task
from annotation.verdicts import Statement, VerdictLog
from rlhf.errors import BackendError
from rlhf.records import Prompt


def made_task(number: int, places: int, *, gold: Sequence[int] = ()) -> Task:
    responses = tuple(f"response {letter} to {number}" for letter in "abcdefgh"[:places])
    return make_task(Candidates(prompt=Prompt.of_text(f"question {number}"), responses=responses, gold=tuple(gold)), seed=0)


def project_with(folder: Path, tasks: Sequence[Task], *, overlap: int = 2, workspace: str = "preferences") -> Project:
    """A project on the disk with these tasks in its ledger; nothing is sent."""
    guideline = next_guideline((), "Rank the responses.", since="2026-01-01T00:00:00.000000Z")
    project = Project(folder=folder, workspace=workspace, overlap=overlap, confidence=True, comment=True,
                      places=tuple(sorted({len(task.order) for task in tasks})), guidelines=(guideline,))
    save_project(project)
    add_to_ledger(project, tasks)
    return project


def filled(project: Project, tasks: Sequence[Task]) -> MemoryBackend:
    backend = MemoryBackend()
    for sheet in project.sheets():
        backend.ensure_sheet(sheet)
        backend.add(sheet, [task.shown() for task in tasks if len(task.order) == sheet.places])
    return backend


def sheet_of(project: Project, task: Task) -> Sheet:
    return project.sheet(len(task.order))


def votes_in(log: VerdictLog) -> dict[Statement, tuple[int, ...]]:
    """The ranks that stand."""
    return {verdict.about: verdict.ranks for verdict in log.current() if verdict.kind == "submitted"}


def votes_on(backend: MemoryBackend, project: Project, tasks: Sequence[Task]) -> dict[Statement, tuple[int, ...]]:
    """The ranks that annotators have submitted, each where its response is in the task."""
    by_id = {task.id: task for task in tasks}
    submitted = [answer for sheet in project.sheets() for answer in backend.answers(sheet) if answer.status == "submitted"]
    return {(answer.task_id, answer.annotator): unblinded(by_id[answer.task_id], answer.ranks) for answer in submitted}


def unblinded(task: Task, ranks_by_place: Sequence[int]) -> tuple[int, ...]:
    """By texts: the rank that was given to the response that was shown at its place."""
    rank_of = dict(zip(task.shown().responses, ranks_by_place, strict=True))
    return tuple(rank_of[response] for response in task.responses)


class BreaksOff(MemoryBackend):
    """The connection breaks after so many answers of a reading."""

    def __init__(self, whole: MemoryBackend, after_answers: int) -> None:
        super().__init__()
        self._stored = whole._stored
        self.left = after_answers

    def answers(self, sheet: Sheet, *, after: str | None = None) -> Iterator[Answer]:
        for answer in super().answers(sheet, after=after):
            if not self.left:
                raise BackendError("the connection broke")
            self.left -= 1
            yield answer


class Slow(MemoryBackend):
    """Takes a while over each answer of a reading."""

    def __init__(self, whole: MemoryBackend, *, seconds: float) -> None:
        super().__init__()
        self._stored = whole._stored
        self.seconds = seconds

    def answers(self, sheet: Sheet, *, after: str | None = None) -> Iterator[Answer]:
        for answer in super().answers(sheet, after=after):
            time.sleep(self.seconds)
            yield answer


class Altered(MemoryBackend):
    """Tells ranks of one annotator that no page would send."""

    def __init__(self, whole: MemoryBackend, annotator: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self._stored = whole._stored
        self.annotator, self.ranks = annotator, ranks

    def answers(self, sheet: Sheet, *, after: str | None = None) -> Iterator[Answer]:
        for answer in super().answers(sheet, after=after):
            yield replace(answer, ranks=self.ranks) if answer.annotator == self.annotator else answer
