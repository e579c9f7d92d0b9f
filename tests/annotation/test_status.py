"""Status: figures by hand, and honest where there is nothing yet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pulled_projects import made_task, project_with

from annotation.backend import SheetProgress, utc
from annotation.cli_verdicts import agreement_text, cells_of, duration, pace_text
from annotation.project import Project
from annotation.status import ProjectStatus, agreement_so_far, first_answers, seconds_per_task, status_of
from annotation.tasks import Task
from annotation.verdicts import Kind, Verdict

START = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
TASKS = [made_task(number, 2) for number in range(4)]


def at(**after_start: float) -> str:
    return utc(START + timedelta(**after_start))


def said(task: Task, annotator: str, ranks: Sequence[int], moment: str, *, kind: Kind = "submitted") -> Verdict:
    return Verdict(task_id=task.id, annotator=annotator, kind=kind, ranks=tuple(ranks), order=task.order, at=moment)


def found(folder: Path, log: Sequence[Verdict], *, now: str, progress: dict[str, SheetProgress] | None = None,
          tasks: Sequence[Task] = TASKS) -> ProjectStatus:
    project: Project = project_with(folder / "week-48", tasks, overlap=2)
    return status_of(project, {task.id: task for task in tasks}, log, progress, None, now=now)


def test_a_project_without_answers_promises_nothing(tmp_path: Path) -> None:
    status = found(tmp_path, [], now=at())
    assert (status.total().tasks, status.total().completed, status.votes_missing) == (4, 0, 8)
    assert (status.days_left, status.agreement.same_choice, status.agreement.alpha, status.annotators) == (None, None, None, ())
    assert "nothing can be said" in pace_text(status)
    assert "nothing yet" in agreement_text(status)


def test_tasks_and_pace_by_hand(tmp_path: Path) -> None:
    """Two votes on the first task, one on the second; a discard is an answer, but no vote. 4 answers in 2 days are 2 a day."""
    log = [said(TASKS[0], "a", (1, 2), at()), said(TASKS[0], "b", (1, 2), at(hours=1)), said(TASKS[1], "a", (2, 1), at(hours=30)),
           said(TASKS[2], "a", (), at(hours=31), kind="discarded")]
    status = found(tmp_path, log, now=at(hours=48))
    whole = status.total()
    assert (whole.tasks, whole.completed, whole.begun) == (4, 1, 1)
    assert (status.votes_missing, status.per_day, status.last_day, status.days_left) == (5, 2.0, 2, 2.5)
    assert {person.name: (person.submitted, person.discarded, person.last_day, person.per_day) for person in status.annotators} == {
        "a": (2, 1, 2, 1.5), "b": (1, 0, 0, 0.5)}


def test_a_pace_counts_the_last_seven_days_only(tmp_path: Path) -> None:
    log = [said(TASKS[number], "a", (1, 2), at(days=day)) for number, day in enumerate((0, 1, 10, 12))]
    status = found(tmp_path, log, now=at(days=14))
    assert status.per_day == pytest.approx(2 / 7)


def test_more_votes_than_the_overlap_on_one_task_are_not_missing_on_another(tmp_path: Path) -> None:
    log = [said(TASKS[0], name, (1, 2), at()) for name in "abcde"]
    assert found(tmp_path, log, now=at(hours=1)).votes_missing == 6


def test_a_change_is_no_new_task_and_what_was_withdrawn_is_no_vote(tmp_path: Path) -> None:
    log = [said(TASKS[0], "a", (1, 2), at()), said(TASKS[0], "a", (2, 1), at(minutes=1)), said(TASKS[1], "a", (1, 2), at(minutes=2)),
           said(TASKS[1], "a", (), at(minutes=3), kind="withdrawn")]
    status = found(tmp_path, log, now=at(hours=1))
    assert first_answers(log) == {"a": [at(), at(minutes=2)]}
    assert [(person.submitted, person.last_day) for person in status.annotators] == [(1, 2)]


def test_breaks_are_no_work() -> None:
    """Gaps of 10, 30 and 20 s, a night, and 40 s: the median is 25 s."""
    times = [at(seconds=second) for second in (0, 10, 40, 60, 40_000, 40_040)]
    assert seconds_per_task(times) == 25.0
    assert seconds_per_task([at(), at(hours=1)]) is None
    assert seconds_per_task([at(), at(seconds=600)]) == 600.0


def test_whoever_was_silent_for_three_days_has_stopped(tmp_path: Path) -> None:
    log = [said(TASKS[0], "gone", (1, 2), at()), said(TASKS[0], "there", (1, 2), at(days=1))]
    status = found(tmp_path, log, now=at(days=3, hours=1))
    assert [(person.name, person.stopped) for person in status.annotators] == [("gone", True), ("there", False)]


def test_agreement_by_hand() -> None:
    """Pairs with votes AA, AB and B (alone): of the four votes on shared pairs, two of four agree with their partner.

    Coincidences: AA 2, AB 1, BA 1; n_A = 3, n_B = 1, n = 4. D_o = 2/4; D_e = 2 * 3 * 1 / (4 * 3) = 1/2; alpha = 0.
    """
    log = [said(TASKS[0], "a", (1, 2), at()), said(TASKS[0], "b", (1, 2), at()), said(TASKS[1], "a", (1, 2), at()),
           said(TASKS[1], "b", (2, 1), at()), said(TASKS[2], "a", (2, 1), at())]
    agreement = agreement_so_far(log)
    assert (agreement.shared_pairs, agreement.same_choice) == (2, 0.5)
    assert agreement.alpha == pytest.approx(0.0)


def test_all_votes_the_same_leave_alpha_undefined() -> None:
    agreement = agreement_so_far([said(TASKS[0], name, (1, 2), at()) for name in "ab"])
    assert (agreement.same_choice, agreement.alpha) == (1.0, None)


def test_the_server_knows_drafts_newcomers_and_what_is_not_pulled(tmp_path: Path) -> None:
    progress = {"week-48-k2": SheetProgress(tasks=4, completed=0, by_annotator={
        "a": {"submitted": 3, "draft": 2, "discarded": 0}, "new": {"submitted": 0, "draft": 1, "discarded": 0},
        "idle": {"submitted": 0, "draft": 0, "discarded": 0}})}
    status = found(tmp_path, [said(TASKS[0], "a", (1, 2), at())], now=at(hours=1), progress=progress)
    assert status.not_pulled == 2
    assert [(person.name, person.drafts, person.last_at) for person in status.annotators] == [("a", 2, at()), ("new", 1, None)]


def test_verdicts_on_tasks_that_were_taken_back_do_not_count(tmp_path: Path) -> None:
    status = found(tmp_path, [said(made_task(99, 2), "a", (1, 2), at())], now=at(hours=1))
    assert (status.votes_missing, status.agreement.shared_pairs, status.annotators) == (8, 0, ())


@pytest.mark.parametrize(("counts", "cells"), [((0, 0, 0), [0, 0, 0]), ((1, 1, 2), [10, 10, 20]), ((10_000, 1, 0), [39, 1, 0]),
                                               ((0, 0, 7), [0, 0, 40])])
def test_a_bar_is_full_and_shows_whatever_is_not_nothing(counts: tuple[int, ...], cells: list[int]) -> None:
    assert cells_of(counts) == cells


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (-1, 90, 150, 3 * 3600, 5 * 86400)] == ["0 s", "90 s", "2 min", "3 h", "5 days"]
