"""Pull, watch and status against the real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from answered_sheets import AtWork, records_of
from pulled_projects import made_task, project_with, unblinded, votes_in
from server_api import ask, client
from server_under_test import ServerUnderTest

from annotation import argilla as argilla_module
from annotation.argilla import ArgillaBackend
from annotation.cli import main
from annotation.home import Home
from annotation.project import Project
from annotation.server.embedded import ServerOptions, running
from annotation.tasks import Task
from annotation.verdicts import VerdictLog

WAIT = 30.0
GIVEN = [(2, (2, 1)), (2, (1, 1)), (3, (2, 1, 2)), (4, (2, 3, 1, 4)), (4, (1, 1, 3, 3)), (4, (1, 1, 1, 1))]
"""Places of a task, and how it is ranked by place: B > A, A = B, B > A = C, C > A > B > D, and more ties."""


def pushed(backend: ArgillaBackend, home: Home, name: str, tasks: list[Task]) -> Project:
    project = project_with(home.project(name), tasks)
    for sheet in project.sheets():
        backend.ensure_sheet(sheet)
        added = backend.add(sheet, [task.shown() for task in tasks if len(task.order) == sheet.places])
        assert added.refused == ()
    return project


@pytest.fixture(scope="module")
def backend(argilla_server: ServerUnderTest) -> Iterator[ArgillaBackend]:
    backend = ArgillaBackend(argilla_server.connection)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def people(argilla_server: ServerUnderTest) -> Iterator[list[AtWork]]:
    with ExitStack() as stack:
        keys = [argilla_server.add_annotator(f"pulled-{number}").api_key for number in range(3)]
        yield [AtWork(stack.enter_context(client(argilla_server.connection.url, key))) for key in keys]


def record_ids(server: ServerUnderTest, project: Project) -> dict[str, str]:
    with client(server.connection.url, server.connection.api_key) as owner:
        return {task: record for sheet in project.sheets() for task, record in records_of(owner, sheet.workspace, sheet.name).items()}


def answer_of(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_what_people_rank_is_what_the_log_says(argilla_server: ServerUnderTest, backend: ArgillaBackend, people: list[AtWork],
                                               capfd: pytest.CaptureFixture[str]) -> None:
    home = argilla_server.home
    tasks = [made_task(number, places) for number, (places, _) in enumerate(GIVEN)]
    project = pushed(backend, home, "ranked", tasks)
    records, log = record_ids(argilla_server, project), VerdictLog(project.verdicts_file)
    responses = {(person, task.id): people[person].answer(records[task.id], ranks) for person in range(3)
                 for task, (_, ranks) in zip(tasks, GIVEN, strict=True)}
    code, answer = answer_of(capfd, "pull", "ranked", "--home", str(home.folder))
    assert (code, answer["projects"][0]["new"], answer["projects"][0]["problems"]) == (0, 18, [])
    given = {(task.id, f"pulled-{person}"): unblinded(task, ranks) for person in range(3)
             for task, (_, ranks) in zip(tasks, GIVEN, strict=True)}
    assert votes_in(log) == given

    people[0].change(responses[0, tasks[0].id], (1, 2))
    people[0].change(responses[0, tasks[1].id], (1, 1), "draft")
    people[1].change(responses[1, tasks[0].id], (), "discarded")
    people[2].delete(responses[2, tasks[3].id])
    code, answer = answer_of(capfd, "pull", "--all", "--home", str(home.folder))
    counts = next(project for project in answer["projects"] if project["project"] == "ranked")
    assert (counts["new"], counts["changed"], counts["discarded"], counts["withdrawn"]) == (0, 1, 1, 2)
    for gone in ((tasks[1].id, "pulled-0"), (tasks[0].id, "pulled-1"), (tasks[3].id, "pulled-2")):
        del given[gone]
    assert votes_in(log) == given | {(tasks[0].id, "pulled-0"): unblinded(tasks[0], (1, 2))}
    assert len(log.read()) == 22
    assert answer_of(capfd, "pull", "ranked", "--home", str(home.folder))[1]["projects"][0]["new"] == 0

    code, answer = answer_of(capfd, "status", "ranked", "--home", str(home.folder))
    status = answer["projects"][0]
    assert (code, answer["server_answers"], status["not_pulled"]) == (0, True, 0)
    assert {person["name"]: (person["submitted"], person["discarded"], person["drafts"]) for person in status["annotators"]} == {
        "pulled-0": (5, 0, 1), "pulled-1": (5, 1, 0), "pulled-2": (5, 0, 0)}


def test_what_is_new_since_a_time_is_all_that_was_stored_since(argilla_server: ServerUnderTest, backend: ArgillaBackend,
                                                               people: list[AtWork], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the whole list, which upstream itself gives; in pages of three."""
    tasks = [made_task(number, 2) for number in range(200, 206)]
    project = pushed(backend, argilla_server.home, "recent", tasks)
    records = record_ids(argilla_server, project)
    responses = [person.answer(records[task.id], (1, 2)) for task in tasks for person in people[:2]]
    people[0].change(responses[0], (2, 1))
    everything = sorted(backend.answers(project.sheet(2)), key=lambda answer: answer.updated_at)
    assert len(everything) == 12
    monkeypatch.setattr(argilla_module, "PAGE", 3)
    for start in (0, 1, 5, 11):
        assert list(backend.answers(project.sheet(2), after=everything[start].updated_at)) == everything[start:]
    assert list(backend.answers(project.sheet(2), after="2100-01-01T00:00:00.000000Z")) == []


def test_annotators_cannot_list_responses(argilla_server: ServerUnderTest, backend: ArgillaBackend, people: list[AtWork]) -> None:
    project = pushed(backend, argilla_server.home, "not-for-all", [made_task(300, 2)])
    refused = people[0].api.get(f"/datasets/{backend._id_of(project.sheet(2))}/responses", params={"after": "2026-01-01T00:00:00Z"})
    assert refused.status_code == 403


class Watching:
    """`annotation pull --watch` in a process of its own, its lines read as they come."""

    def __init__(self, home: Path, *words: str) -> None:
        self.lines = home / "watch.log"
        with self.lines.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "annotation.cli", "pull", "--watch", "--home", str(home), *words],
                                            stderr=file, stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "200"})

    def wait_for(self, text: str, seconds: float = WAIT) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if text in (said := self.lines.read_text(encoding="utf-8")):
                return said
            assert self.process.poll() is None, said
            time.sleep(0.05)
        raise AssertionError(f"{text!r} did not come within {seconds} s; there is: {self.lines.read_text(encoding='utf-8')}")

    def stop(self, how: signal.Signals) -> Mapping[str, Any]:
        self.process.send_signal(how)
        out, _ = self.process.communicate(timeout=WAIT)
        assert self.process.returncode == 0, self.lines.read_text(encoding="utf-8")
        return dict(json.loads(out))


def webhooks(server: ServerUnderTest) -> list[str]:
    """Those of pulls; other tests leave others on the server that they share."""
    with client(server.connection.url, server.connection.api_key) as owner:
        return [webhook["url"] for webhook in ask(owner, "GET", "/webhooks")["items"]
                if webhook["description"] == "annotation pull --watch"]


def test_a_webhook_brings_an_answer_into_the_log_at_once_and_is_gone_afterwards(
        argilla_server: ServerUnderTest, backend: ArgillaBackend, people: list[AtWork]) -> None:
    tasks = [made_task(number, 2) for number in range(100, 103)]
    project = pushed(backend, argilla_server.home, "watched", tasks)
    records = record_ids(argilla_server, project)
    with client(argilla_server.connection.url, argilla_server.connection.api_key) as owner:
        ask(owner, "POST", "/webhooks", json={"url": "http://127.0.0.1:9/", "events": ["response.created"],
                                              "description": "annotation pull --watch"})    # left by a process that was killed
    watching = Watching(argilla_server.home.folder, "watched", "--webhook", "0", "--every", "600", "--json")
    try:
        watching.wait_for("watched: caught up (0 new")
        assert len(webhooks(argilla_server)) == 1
        response = people[0].answer(records[tasks[0].id], (2, 1))
        watching.wait_for(f"pulled-0  ranked {tasks[0].id}: 2 > 1")
        people[0].delete(response)
        watching.wait_for(f"pulled-0  withdrew {tasks[0].id}")
        answer = watching.stop(signal.SIGTERM)
    finally:
        watching.process.kill()
        watching.process.communicate()
    assert answer["projects"][0] | {"read": 0} == {"project": "watched", "new": 1, "changed": 0, "discarded": 0, "withdrawn": 1,
                                                   "drafts": 0, "read": 0}
    assert webhooks(argilla_server) == []
    assert [verdict.kind for verdict in VerdictLog(project.verdicts_file).read()] == ["submitted", "withdrawn"]


@pytest.mark.slow
def test_watching_survives_a_server_that_is_started_again(server_python: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    tasks = [made_task(number, 2) for number in range(2)]
    with ExitStack() as stack:
        with running(home, server_python, ServerOptions(), None) as first:
            server = ServerUnderTest(first.connection, home, first.pid)
            key = server.add_annotator("ann").api_key
            argilla = ArgillaBackend(first.connection)
            project = pushed(argilla, home, "restarted", tasks)
            argilla.close()
            records = record_ids(server, project)
            watching = Watching(home.folder, "--all", "--every", "1", "--json")
            stack.callback(watching.process.wait)
            stack.callback(watching.process.kill)
            watching.wait_for("restarted: caught up")
            with client(first.connection.url, key) as api:
                AtWork(api).answer(records[tasks[0].id], (1, 2))
            watching.wait_for(f"ann  ranked {tasks[0].id}: 1 > 2")
        watching.wait_for("does not answer", 60)
        with running(home, server_python, ServerOptions(), None) as second, client(second.connection.url, key) as api:    # another port
            AtWork(api).answer(records[tasks[1].id], (1, 1))
            said = watching.wait_for(f"ann  ranked {tasks[1].id}: 1 = 2", 120)
            assert said.count("does not answer") == said.count("it works again") == 1
            assert watching.stop(signal.SIGINT)["projects"][0]["new"] == 2
