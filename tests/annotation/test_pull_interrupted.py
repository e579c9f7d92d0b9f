"""Whatever annotators do, and wherever pull is stopped: in the end the log holds what the server holds, and every state that was seen."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pulled_projects import BreaksOff, filled, made_task, project_with, sheet_of, votes_in, votes_on

from annotation import pull as pull_module
from annotation.memory import MemoryBackend
from annotation.project import Project
from annotation.pull import Puller, pull
from annotation.verdicts import VerdictLog
from rlhf.errors import BackendError

TASKS = [made_task(number, places) for number, places in enumerate((2, 3, 2))]
ROUNDS = 8

annotator, task_number = st.sampled_from(["a", "b"]), st.integers(0, 2)
deed = st.one_of(
    st.tuples(st.just("submitted"), annotator, task_number, st.randoms(use_true_random=False)),
    st.tuples(st.just("submitted"), annotator, task_number, st.randoms(use_true_random=False)),
    st.tuples(st.sampled_from(["discarded", "draft", "delete"]), annotator, task_number),
    st.tuples(st.sampled_from(["pull", "pull as before", "pull everything"])),
    st.tuples(st.just("break off"), st.integers(0, 5)),
    st.tuples(st.just("kill"), st.floats(0, 1)))


class Round:
    """A project, what annotators do, and pulls of it that go wrong or well."""

    def __init__(self, folder: Path) -> None:
        self.project = project_with(folder, TASKS)
        self.backend = filled(self.project, TASKS)
        self.puller = Puller(VerdictLog(self.project.verdicts_file))
        self.seen: set[tuple[str, str]] = set()
        """(response, time) of the submitted states that a pull which came to its end must have seen."""

    def respond(self, status: str, annotator: str, number: int, ranks: tuple[int, ...] = ()) -> None:
        self.backend.respond(sheet_of(self.project, TASKS[number]), TASKS[number].id, annotator, status, ranks)    # type: ignore[arg-type]

    def delete(self, annotator: str, number: int) -> None:
        if any(answer.annotator == annotator and answer.task_id == TASKS[number].id for answer in self.answers()):
            self.backend.delete_response(sheet_of(self.project, TASKS[number]), TASKS[number].id, annotator)

    def pull(self, *, fresh: bool = True, whole: bool = False) -> None:
        puller = Puller(VerdictLog(self.project.verdicts_file)) if fresh else self.puller
        assert puller.pull(self.project, self.backend, None, whole=whole).problems == ()
        self.seen |= {(answer.response_id, answer.updated_at) for answer in self.answers() if answer.status == "submitted"}

    def break_off(self, after_answers: int) -> None:
        try:
            pull(self.project, BreaksOff(self.backend, after_answers), None, whole=True)
        except BackendError:
            return

    def kill(self, share: float) -> None:
        """Leave what a pull leaves that is killed while it writes: any part of what it added, and no new mark."""
        log, mark = self.project.verdicts_file, self.project.folder / "pulled.json"
        before = log.stat().st_size if log.exists() else 0
        marked = mark.read_bytes() if mark.exists() else None
        pull(self.project, self.backend, None)
        written = log.read_bytes()
        log.write_bytes(written[:before + round(share * (len(written) - before))])
        if marked is None:
            mark.unlink()
        else:
            mark.write_bytes(marked)

    def answers(self) -> list:    # type: ignore[type-arg]
        return [answer for sheet in self.project.sheets() for answer in self.backend.answers(sheet)]

    def do(self, deed: tuple) -> None:    # type: ignore[type-arg]
        match deed:
            case ("submitted", annotator, number, luck):
                places = len(TASKS[number].order)
                self.respond("submitted", annotator, number, tuple(luck.randint(1, places) for _ in range(places)))
            case ("discarded" | "draft" as status, annotator, number):
                self.respond(status, annotator, number)
            case ("delete", annotator, number):
                self.delete(annotator, number)
            case ("break off", after_answers):
                self.break_off(after_answers)
            case ("kill", share):
                self.kill(share)
            case (how,):
                self.pull(fresh=how != "pull as before", whole=how == "pull everything")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deeds=st.lists(deed, max_size=20))
def test_whatever_happens_the_log_ends_with_what_the_server_has(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
                                                                deeds: list[tuple[object, ...]]) -> None:
    monkeypatch.setattr(pull_module, "OVERLAP_SECONDS", 0.0)    # else every reading of so short a story would be a whole one
    story = Round(tmp_path_factory.mktemp("home") / "week-48")
    for deed in deeds:
        story.do(deed)
    story.pull()
    log = VerdictLog(story.project.verdicts_file)
    assert votes_in(log) == votes_on(story.backend, story.project, TASKS)
    assert {verdict.about for verdict in log.current() if verdict.kind == "discarded"} == {
        (answer.task_id, answer.annotator) for answer in story.answers() if answer.status == "discarded"}
    history = log.read()
    assert {(verdict.response_id, verdict.at) for verdict in history if verdict.kind == "submitted"} >= story.seen
    assert len({verdict.content_id for verdict in history}) == len(history)


# kill -9

PULLS = """
import json, sys
from pathlib import Path
from annotation import pull as pull_module
from annotation.backend import Answer
from annotation.home import Home
from annotation.memory import MemoryBackend
from annotation.project import load_project, load_tasks
home, answers = map(Path, sys.argv[1:])
project = load_project(Home(home), "week-48")
backend = MemoryBackend()
for sheet in project.sheets():
    backend.ensure_sheet(sheet)
    backend.add(sheet, [task.shown() for task in load_tasks(project).values()])
    for values in json.loads(answers.read_text()):
        answer = Answer(**(values | {"ranks": tuple(values["ranks"])}))
        backend._stored[sheet.name].answers[answer.task_id, answer.annotator] = answer
pull_module.BATCH = 25
print("pulling", flush=True)
pull_module.pull(project, backend, None)
"""


def submitted(project: Project, backend: MemoryBackend, numbers: range) -> None:
    """2 annotators a task."""
    for number in numbers:
        task = made_task(number, 2)
        for name in ("a", "b"):
            backend.respond(sheet_of(project, task), task.id, name, "submitted", (1, 2) if number % 3 else (2, 1))


def test_kill_minus_nine_at_any_moment_loses_and_doubles_nothing(tmp_path: Path) -> None:
    tasks = [made_task(number, 2) for number in range(1000)]
    project = project_with(tmp_path / "home/projects/week-48", tasks)
    backend, answers = filled(project, tasks), tmp_path / "answers.json"
    luck, lengths = random.Random(0), []
    for number in range(ROUNDS):
        submitted(project, backend, range(number * 80, (number + 1) * 80))
        answers.write_text(json.dumps([asdict(answer) for answer in backend.answers(project.sheet(2))]), encoding="utf-8")
        with subprocess.Popen([sys.executable, "-c", PULLS, str(tmp_path / "home"), str(answers)], stdout=subprocess.PIPE) as puller:
            assert puller.stdout is not None
            assert puller.stdout.readline() == b"pulling\n"
            time.sleep(luck.uniform(0, 0.06))
            puller.send_signal(signal.SIGKILL)
        history = VerdictLog(project.verdicts_file).read()
        assert len({verdict.content_id for verdict in history}) == len(history)
        lengths.append(len(history))
    assert lengths == sorted(lengths)       # nothing that was written went away again
    assert any(length < 160 * number for number, length in enumerate(lengths, 1))      # some were killed before their end
    pull(project, backend, None)
    log = VerdictLog(project.verdicts_file)
    assert votes_in(log) == votes_on(backend, project, tasks)
    assert len(log.read()) == ROUNDS * 160
