"""Pull: every response of everybody, each once, as it was ranked; what is no vote never becomes one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pulled_projects import Altered, BreaksOff, Slow, filled, made_task, project_with, sheet_of, unblinded, votes_in, votes_on

from annotation import pull as pull_module
from annotation.backend import now
from annotation.memory import MemoryBackend
from annotation.project import Project, save_project, take_back
from annotation.pull import pull
from annotation.pull_mark import earlier, load_mark, save_mark
from annotation.tasks import Task
from annotation.verdicts import Verdict, VerdictLog
from rlhf.errors import BackendError, StorageError

TASKS = [made_task(number, places) for number, places in enumerate((2, 2, 3, 4))]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return project_with(tmp_path / "week-48", TASKS)


@pytest.fixture
def backend(project: Project) -> MemoryBackend:
    return filled(project, TASKS)


def log_of(project: Project) -> VerdictLog:
    return VerdictLog(project.verdicts_file)


def submit(backend: MemoryBackend, project: Project, task: Task, annotator: str, ranks: Sequence[int]) -> None:
    backend.respond(sheet_of(project, task), task.id, annotator, "submitted", ranks)


def kinds(project: Project) -> list[str]:
    return [verdict.kind for verdict in log_of(project).read()]


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (1, 1)])
def test_ranks_reach_the_log_as_they_were_given_for_the_places(project: Project, backend: MemoryBackend, ranks: tuple[int, int]) -> None:
    task = TASKS[0]
    submit(backend, project, task, "ann", ranks)
    pull(project, backend, None)
    assert votes_in(log_of(project)) == {(task.id, "ann"): unblinded(task, ranks)}


def test_a_verdict_says_all_that_the_response_said(project: Project, backend: MemoryBackend) -> None:
    task = TASKS[3]
    given = backend.respond(sheet_of(project, task), task.id, "ann", "submitted", (3, 1, 4, 2), confidence=4, comment="second\nis right")
    pull(project, backend, None)
    assert log_of(project).read() == [Verdict(
        task_id=task.id, annotator="ann", kind="submitted", ranks=unblinded(task, (3, 1, 4, 2)), order=task.order, confidence=4,
        comment="second\nis right", began=given.inserted_at, at=given.updated_at, guideline=project.guideline.version,
        response_id=given.response_id)]


def test_drafts_and_discards_are_no_votes(project: Project, backend: MemoryBackend) -> None:
    sheet = sheet_of(project, TASKS[0])
    backend.respond(sheet, TASKS[0].id, "drafts", "draft", (1, 2))
    backend.respond(sheet, TASKS[0].id, "discards", "discarded", (1, 2))
    report = pull(project, backend, None)
    assert (report.counts()["drafts"], report.counts()["discarded"], report.counts()["new"]) == (1, 1, 0)
    assert [(verdict.annotator, verdict.kind, verdict.ranks) for verdict in log_of(project).read()] == [("discards", "discarded", ())]


def test_each_change_is_a_line_and_the_last_one_stands(project: Project, backend: MemoryBackend) -> None:
    task, sheet = TASKS[0], sheet_of(project, TASKS[0])
    for status, ranks in (("submitted", (1, 2)), ("submitted", (2, 1)), ("draft", (2, 1)), ("submitted", (1, 1)), ("discarded", ()),
                          ("draft", (2, 1)), ("discarded", ())):
        backend.respond(sheet, task.id, "ann", status, ranks)    # type: ignore[arg-type]
        pull(project, backend, None)
    assert kinds(project) == ["submitted", "submitted", "withdrawn", "submitted", "discarded", "withdrawn", "discarded"]
    assert [verdict.kind for verdict in log_of(project).current()] == ["discarded"]
    assert len({verdict.response_id for verdict in log_of(project).read()}) == 1


def test_pulling_again_adds_nothing(project: Project, backend: MemoryBackend) -> None:
    for task in TASKS:
        submit(backend, project, task, "ann", range(1, len(task.order) + 1))
    assert pull(project, backend, None).counts()["new"] == 4
    before = project.verdicts_file.read_bytes()
    assert pull(project, backend, None).verdicts == ()
    assert pull(project, backend, None, whole=True).verdicts == ()
    assert project.verdicts_file.read_bytes() == before


def test_ten_thousand_and_fifty_responses_give_as_many_votes(tmp_path: Path) -> None:
    tasks = [made_task(number, 2) for number in range(3350)]
    project = project_with(tmp_path / "week-48", tasks)
    backend = filled(project, tasks)
    for task in tasks:
        for annotator in ("a", "b", "c"):
            submit(backend, project, task, annotator, (1, 2) if task.id < "8" else (2, 1))
    report = pull(project, backend, None)
    assert report.counts() == {"new": 10_050, "changed": 0, "discarded": 0, "withdrawn": 0, "drafts": 0, "read": 10_050}
    assert votes_in(log_of(project)) == votes_on(backend, project, tasks)
    assert len(log_of(project).read()) == 10_050


def test_a_quiet_project_is_not_read_again(project: Project, backend: MemoryBackend) -> None:
    submit(backend, project, TASKS[0], "ann", (1, 2))
    assert pull(project, backend, None).sheets[0].whole
    mark = load_mark(project)
    assert mark is not None
    later = {name: replace(sheet, seen_until="2100-01-01T00:00:00.000000Z") for name, sheet in mark.sheets.items()}
    save_mark(project, replace(mark, sheets=later))
    report = pull(project, backend, None)
    assert (report.counts()["read"], report.sheets[0].whole) == (0, False)


@pytest.mark.parametrize("seconds", [1, 100])
def test_a_response_that_was_stored_later_than_its_time_says_is_found(project: Project, backend: MemoryBackend, seconds: int) -> None:
    """The server gives the time when it begins; another response may be stored, and read, before this one is."""
    submit(backend, project, TASKS[0], "quick", (1, 2))
    late = backend.respond(sheet_of(project, TASKS[0]), TASKS[0].id, "late", "submitted", (2, 1))
    answers = backend._stored[sheet_of(project, TASKS[0]).name].answers
    del answers[TASKS[0].id, "late"]
    pull(project, backend, None)
    answers[TASKS[0].id, "late"] = replace(late, updated_at=earlier(late.updated_at, seconds))
    assert pull(project, backend, None).counts()["new"] == 1


def test_the_mark_stays_behind_what_may_have_changed_while_it_was_read(project: Project, backend: MemoryBackend) -> None:
    submit(backend, project, TASKS[0], "ann", (1, 2))
    for whole in (True, False):
        latest = backend.respond(sheet_of(project, TASKS[1]), TASKS[1].id, f"ben {whole}", "submitted", (1, 2)).updated_at
        assert pull(project, Slow(backend, seconds=0.1), None).sheets[0].whole == whole
        mark = load_mark(project)
        assert mark is not None and mark.sheets["week-48-k2"].seen_until <= earlier(latest, 0.2)
    ahead = replace(mark.sheets["week-48-k2"], seen_until=earlier(now(), -60))
    save_mark(project, replace(mark, sheets={**mark.sheets, "week-48-k2": ahead}))
    pull(project, backend, None)
    after = load_mark(project)
    assert after is not None and after.sheets["week-48-k2"] == ahead


@pytest.mark.parametrize(("hours", "whole"), [(23.9, False), (24.1, True)])
def test_everything_is_read_once_a_day(project: Project, backend: MemoryBackend, hours: float, whole: bool) -> None:
    pull(project, backend, None)
    mark = load_mark(project)
    assert mark is not None
    aged = {name: replace(sheet, whole_at=earlier(sheet.whole_at, hours * 3600)) for name, sheet in mark.sheets.items()}
    save_mark(project, replace(mark, sheets=aged))
    assert [sheet.whole for sheet in pull(project, backend, None).sheets] == [whole] * 3


def test_a_vote_after_a_discard_or_a_withdrawal_is_a_new_one(project: Project, backend: MemoryBackend) -> None:
    sheet = sheet_of(project, TASKS[0])
    found = []
    for status in ("discarded", "submitted", "submitted", "draft", "submitted"):
        backend.respond(sheet, TASKS[0].id, "ann", status, () if status == "discarded" else (1, 2))     # type: ignore[arg-type]
        counts = pull(project, backend, None).counts()
        found.append([kind for kind in ("new", "changed", "discarded", "withdrawn") if counts[kind]])
    assert found == [["discarded"], ["new"], ["changed"], ["withdrawn"], ["new"]]


# Deletions

def test_a_deleted_response_is_withdrawn_by_the_next_pull(project: Project, backend: MemoryBackend) -> None:
    for annotator in ("a", "b"):
        submit(backend, project, TASKS[0], annotator, (1, 2))
    pull(project, backend, None)
    backend.delete_response(sheet_of(project, TASKS[0]), TASKS[0].id, "a")
    report = pull(project, backend, None)
    assert (report.counts()["withdrawn"], report.sheets[0].whole) == (1, True)
    assert {annotator for _, annotator in votes_in(log_of(project))} == {"b"}
    assert kinds(project) == ["submitted", "submitted", "withdrawn"]
    assert pull(project, backend, None).verdicts == ()


def test_a_deletion_beside_a_new_response_is_found(project: Project, backend: MemoryBackend) -> None:
    submit(backend, project, TASKS[0], "a", (1, 2))
    pull(project, backend, None)
    backend.delete_response(sheet_of(project, TASKS[0]), TASKS[0].id, "a")
    submit(backend, project, TASKS[1], "a", (1, 2))
    pull(project, backend, None)
    assert votes_in(log_of(project)) == votes_on(backend, project, TASKS)


def all_deleted(folder: Path, *, count: int) -> tuple[Project, MemoryBackend]:
    """So many votes, in the log, and no longer on the server."""
    tasks = [made_task(number, 2) for number in range(count)]
    project = project_with(folder / "week-48", tasks)
    backend = filled(project, tasks)
    for task in tasks:
        submit(backend, project, task, "ann", (1, 2))
    pull(project, backend, None)
    for task in tasks:
        backend.delete_response(sheet_of(project, task), task.id, "ann")
    return project, backend


def test_fifty_deletions_at_once_are_believed(tmp_path: Path) -> None:
    project, backend = all_deleted(tmp_path, count=50)
    assert pull(project, backend, None).counts()["withdrawn"] == 50
    assert votes_in(log_of(project)) == {}


def test_more_deletions_at_once_are_not_believed_without_being_told(tmp_path: Path) -> None:
    project, backend = all_deleted(tmp_path, count=51)
    report = pull(project, backend, None)
    assert report.counts()["withdrawn"] == 0
    assert "51 responses" in report.problems[0].what
    assert len(votes_in(log_of(project))) == 51
    assert pull(project, backend, None, accept_deletions=True).counts()["withdrawn"] == 51
    assert votes_in(log_of(project)) == {}


# What cannot be used is named

@pytest.mark.parametrize("ranks", [(), (1,), (1, 2, 3), (0, 1), (1, 3)])
def test_ranks_that_rank_something_else_are_a_named_problem_and_no_vote(project: Project, backend: MemoryBackend,
                                                                        ranks: tuple[int, ...]) -> None:
    for annotator in ("odd", "right"):
        submit(backend, project, TASKS[0], annotator, (2, 1))
    report = pull(project, Altered(backend, "odd", ranks), None)
    assert [problem.where.split()[-1] for problem in report.problems] == ["odd"]
    assert {annotator for _, annotator in votes_in(log_of(project))} == {"right"}


def test_a_vote_that_became_unreadable_no_longer_counts(project: Project, backend: MemoryBackend) -> None:
    submit(backend, project, TASKS[0], "odd", (2, 1))
    pull(project, backend, None)
    submit(backend, project, TASKS[0], "odd", (1, 2))
    for _ in range(2):
        report = pull(project, Altered(backend, "odd", (7, 7)), None)
        assert len(report.problems) == 1
    assert kinds(project) == ["submitted", "withdrawn"]


def test_responses_to_tasks_that_the_project_lacks_are_counted_by_task(project: Project, backend: MemoryBackend) -> None:
    for annotator in ("a", "b"):
        submit(backend, project, TASKS[0], annotator, (1, 2))
    take_back(project, {TASKS[0].id: "test"})
    report = pull(project, backend, None)
    assert [(problem.where, problem.what.split()[0]) for problem in report.problems] == [(f"task {TASKS[0].id}", "2")]
    assert not project.verdicts_file.read_bytes()


def test_a_server_that_was_put_back_does_not_undo_what_is_known(project: Project, backend: MemoryBackend) -> None:
    submit(backend, project, TASKS[0], "ann", (1, 2))
    old = filled(project, TASKS)
    old._stored[sheet_of(project, TASKS[0]).name].answers = dict(backend._stored[sheet_of(project, TASKS[0]).name].answers)
    submit(backend, project, TASKS[0], "ann", (2, 1))
    pull(project, backend, None)
    report = pull(project, old, None, whole=True)
    assert "an older backup" in " ".join(report.problems[0].what.split())
    assert votes_in(log_of(project)) == votes_on(backend, project, TASKS)
    assert len(log_of(project).read()) == 2     # the older state was never pulled; now it is in the history


def test_a_deleted_response_that_a_server_has_again_is_named_and_no_vote(project: Project, backend: MemoryBackend) -> None:
    sheet = sheet_of(project, TASKS[0])
    submit(backend, project, TASKS[0], "ann", (1, 2))
    old = filled(project, TASKS)
    old._stored[sheet.name].answers = dict(backend._stored[sheet.name].answers)
    pull(project, backend, None)
    backend.delete_response(sheet, TASKS[0].id, "ann")
    pull(project, backend, None)
    report = pull(project, old, None, whole=True)
    assert (report.counts()["new"], report.verdicts, len(report.problems)) == (0, (), 1)
    assert kinds(project) == ["submitted", "withdrawn"]
    assert votes_in(log_of(project)) == {}


def test_a_draft_after_a_withdrawal_says_nothing_new(project: Project, backend: MemoryBackend) -> None:
    sheet = sheet_of(project, TASKS[0])
    submit(backend, project, TASKS[0], "ann", (1, 2))
    pull(project, backend, None)
    for ranks in ((2, 1), (1, 1)):
        backend.respond(sheet, TASKS[0].id, "ann", "draft", ranks)
        pull(project, backend, None)
    assert kinds(project) == ["submitted", "withdrawn"]


# Guidelines

def test_a_verdict_names_the_guidelines_that_were_shown_when_it_was_given(project: Project, backend: MemoryBackend) -> None:
    submit(backend, project, TASKS[0], "ann", (1, 2))
    time.sleep(0.001)
    changed = project.with_guidelines("Rank by truth.", since=now())
    save_project(changed)
    submit(backend, changed, TASKS[1], "ann", (1, 2))
    pull(changed, backend, None)
    assert [verdict.guideline for verdict in log_of(changed).read()] == [guideline.version for guideline in changed.guidelines]


# Interruptions

def test_a_connection_that_breaks_keeps_what_was_read_and_the_next_pull_completes(project: Project, backend: MemoryBackend,
                                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "BATCH", 1)
    for annotator in ("a", "b", "c"):
        submit(backend, project, TASKS[0], annotator, (1, 2))
    with pytest.raises(BackendError):
        pull(project, BreaksOff(backend, 2), None)
    assert len(log_of(project).read()) == 2
    assert load_mark(project) is None
    assert pull(project, backend, None).counts()["new"] == 1
    assert votes_in(log_of(project)) == votes_on(backend, project, TASKS)


def test_a_lost_mark_or_log_is_made_good_by_reading_everything(project: Project, backend: MemoryBackend) -> None:
    for annotator in ("a", "b", "c"):
        submit(backend, project, TASKS[0], annotator, (1, 2))
    pull(project, backend, None)
    lines = project.verdicts_file.read_bytes().splitlines(keepends=True)
    project.verdicts_file.write_bytes(b"".join(lines[1:]))
    report = pull(project, backend, None)
    assert (report.counts()["new"], report.sheets[0].whole) == (1, True)
    (project.folder / "pulled.json").unlink()
    assert pull(project, backend, None).verdicts == ()
    assert votes_in(log_of(project)) == votes_on(backend, project, TASKS)


def test_one_pull_at_a_time(project: Project, backend: MemoryBackend) -> None:
    with log_of(project).alone(), pytest.raises(StorageError, match="annotation pull"):
        pull(project, backend, None)
