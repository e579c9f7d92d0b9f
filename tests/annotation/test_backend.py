"""What a backend promises, kept by the one in memory and by a real Argilla server alike; answers are given over the REST API, as a page
would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import httpx
import pytest
from server_under_test import ServerUnderTest

from annotation.argilla import ArgillaBackend, record_of, response_field
from annotation.backend import Answer, Backend, Sheet, Status
from annotation.memory import MemoryBackend
from annotation.tasks import Candidates, ShownTask, make_task
from rlhf.errors import BackendError, ConfigError
from rlhf.records import Message, Prompt

NAMES = count(1)
REFUSED = ShownTask(id="f" * 16, prompt=Prompt(messages=(Message(role="user", content="x"),) * 501), responses=("a", "b"))


def task(number: int, places: int = 2) -> ShownTask:
    responses = tuple(f"{letter} <b>&amp; to {number}" for letter in "abcdefgh"[:places])
    return make_task(Candidates(prompt=Prompt.of_text(f"question <i>{number}</i>"), responses=responses), seed=0).shown()


class Site(Protocol):
    """A backend, and annotators who use it."""

    backend: Backend

    def sheet(self, places: int = 2, *, min_submitted: int = 2) -> Sheet: ...

    def respond(self, sheet: Sheet, task_id: str, annotator: str, status: Status = "submitted", ranks: Sequence[int] = (),
                **more: Any) -> None: ...

    def delete(self, sheet: Sheet, task_id: str, annotator: str) -> None: ...


def a_sheet(name: str, workspace: str, places: int, min_submitted: int) -> Sheet:
    return Sheet(name=name, places=places, workspace=workspace, guidelines="Be fair.", min_submitted=min_submitted, confidence=True,
                 reasons=("helpful", "honest"), comment=True)


@dataclass
class InMemory:
    backend: MemoryBackend

    def sheet(self, places: int = 2, *, min_submitted: int = 2) -> Sheet:
        return a_sheet(f"sheet-{next(NAMES)}", "preferences", places, min_submitted)

    def respond(self, sheet: Sheet, task_id: str, annotator: str, status: Status = "submitted", ranks: Sequence[int] = (),
                **more: Any) -> None:
        self.backend.respond(sheet, task_id, annotator, status, ranks, **more)

    def delete(self, sheet: Sheet, task_id: str, annotator: str) -> None:
        self.backend.delete_response(sheet, task_id, annotator)


@dataclass
class OnServer:
    """Annotators ann1, ann2, ann3 with keys of their own."""

    backend: ArgillaBackend
    server: ServerUnderTest
    keys: dict[str, str]

    def sheet(self, places: int = 2, *, min_submitted: int = 2) -> Sheet:
        return a_sheet(f"sheet-{next(NAMES)}", self.server.connection.workspace, places, min_submitted)

    @contextmanager
    def as_user(self, key: str) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=f"{self.server.connection.url}/api/v1", headers={"X-Argilla-Api-Key": key}, timeout=30,
                          trust_env=False) as client:
            yield client

    def dataset_id(self, sheet: Sheet) -> str:
        with self.as_user(self.server.connection.api_key) as owner:
            return next(found["id"] for found in owner.get("/me/datasets").json()["items"] if found["name"] == sheet.name)

    def record_ids(self, sheet: Sheet) -> dict[str, str]:
        """Task id -> the server's."""
        with self.as_user(self.server.connection.api_key) as owner:
            page = owner.get(f"/datasets/{self.dataset_id(sheet)}/records", params={"limit": 1000}).json()
            return {record["external_id"]: record["id"] for record in page["items"]}

    def respond(self, sheet: Sheet, task_id: str, annotator: str, status: Status = "submitted", ranks: Sequence[int] = (),
                **more: Any) -> None:
        values: dict[str, Any] = {name: {"value": value} for name, value in more.items()}
        if ranks:
            values["ranking"] = {"value": [{"value": response_field(place), "rank": rank} for place, rank in enumerate(ranks)]}
        item = {"record_id": self.record_ids(sheet)[task_id], "status": status, "values": values or None}
        with self.as_user(self.keys[annotator]) as client:
            answer = client.post("/me/responses/bulk", json={"items": [item]})
            assert answer.is_success, answer.text
            assert answer.json()["items"][0]["error"] is None, answer.text

    def delete(self, sheet: Sheet, task_id: str, annotator: str) -> None:
        response = next(answer.response_id for answer in self.backend.answers(sheet)
                        if (answer.task_id, answer.annotator) == (task_id, annotator))
        with self.as_user(self.keys[annotator]) as client:
            assert client.delete(f"/responses/{response}").is_success


@pytest.fixture(scope="session")
def on_server(argilla_server: ServerUnderTest) -> Iterator[OnServer]:
    keys = {name: argilla_server.add_annotator(name).api_key for name in ("ann1", "ann2", "ann3")}
    backend = ArgillaBackend(argilla_server.connection)
    yield OnServer(backend, argilla_server, keys)
    backend.close()


@pytest.fixture(params=["memory", "argilla"])
def site(request: pytest.FixtureRequest) -> Site:
    return InMemory(MemoryBackend()) if request.param == "memory" else request.getfixturevalue("on_server")


def filled(site: Site, tasks: Sequence[ShownTask], *, min_submitted: int = 2) -> Sheet:
    sheet = site.sheet(len(tasks[0].responses), min_submitted=min_submitted)
    site.backend.ensure_sheet(sheet)
    site.backend.add(sheet, tasks)
    return sheet


# The contract

def test_the_same_id_twice_is_one_task_and_keeps_its_responses(site: Site) -> None:
    tasks = [task(number) for number in range(5)]
    sheet = filled(site, tasks[:3])
    site.respond(sheet, tasks[0].id, "ann1", ranks=(2, 1))
    again = site.backend.add(sheet, tasks)
    assert (set(again.new), again.present, again.refused) == ({tasks[3].id, tasks[4].id}, 3, ())
    assert site.backend.progress(sheet).tasks == 5
    assert [answer.ranks for answer in site.backend.answers(sheet)] == [(2, 1)]


def test_what_is_refused_is_named_and_the_rest_is_added(site: Site) -> None:
    tasks = [task(number) for number in range(9)]
    sheet = site.sheet()
    site.backend.ensure_sheet(sheet)
    added = site.backend.add(sheet, [*tasks[:4], REFUSED, *tasks[4:]])
    assert set(added.new) == {each.id for each in tasks}
    assert [refused.task_id for refused in added.refused] == [REFUSED.id]
    assert "500" in added.refused[0].why


RANKINGS = [(2, 1), (1, 1), (2, 2, 3), (3, 2, 1, 4), (1, 2, 2, 4)]
"""B > A; A = B; A = B > C; C > B > A > D; A > B = C > D."""


@pytest.mark.parametrize("ranks", RANKINGS)
def test_rankings_come_back_as_they_were_given(site: Site, ranks: tuple[int, ...]) -> None:
    one = task(1, len(ranks))
    sheet = filled(site, [one])
    site.respond(sheet, one.id, "ann1", ranks=ranks, confidence=4, reason="honest", comment="close")
    (answer,) = site.backend.answers(sheet)
    assert (answer.task_id, answer.annotator, answer.status, answer.ranks) == (one.id, "ann1", "submitted", ranks)
    assert (answer.confidence, answer.reason, answer.comment) == (4, "honest", "close")
    assert answer.inserted_at == answer.updated_at
    assert len(answer.updated_at) == len("2026-12-01T09:30:00.000000Z")


def test_three_people_three_answers(site: Site) -> None:
    one = task(1)
    sheet = filled(site, [one])
    for name, ranks in (("ann1", (1, 2)), ("ann2", (2, 1)), ("ann3", (1, 1))):
        site.respond(sheet, one.id, name, ranks=ranks)
    assert {answer.annotator: answer.ranks for answer in site.backend.answers(sheet)} == {"ann1": (1, 2), "ann2": (2, 1), "ann3": (1, 1)}


def test_a_changed_answer_keeps_its_id_and_gets_a_later_time(site: Site) -> None:
    one = task(1)
    sheet = filled(site, [one])
    site.respond(sheet, one.id, "ann1", ranks=(1, 2))
    (before,) = site.backend.answers(sheet)
    site.respond(sheet, one.id, "ann1", ranks=(2, 1))
    (after,) = site.backend.answers(sheet)
    assert (after.response_id, after.inserted_at, after.ranks) == (before.response_id, before.inserted_at, (2, 1))
    assert after.updated_at > before.updated_at


def test_drafts_discards_and_what_was_deleted(site: Site) -> None:
    one, two = task(1), task(2)
    sheet = filled(site, [one, two])
    site.respond(sheet, one.id, "ann1", "draft", ranks=(1,))
    site.respond(sheet, one.id, "ann2", "discarded")
    site.respond(sheet, two.id, "ann1", ranks=(1, 2))
    found = {(answer.task_id, answer.annotator): (answer.status, answer.ranks) for answer in site.backend.answers(sheet)}
    assert found == {(one.id, "ann1"): ("draft", ()), (one.id, "ann2"): ("discarded", ()), (two.id, "ann1"): ("submitted", (1, 2))}
    site.delete(sheet, two.id, "ann1")
    assert {answer.task_id for answer in site.backend.answers(sheet)} == {one.id}


def test_discards_and_drafts_do_not_complete_a_task(site: Site) -> None:
    one = task(1)
    sheet = filled(site, [one], min_submitted=2)
    site.respond(sheet, one.id, "ann1", ranks=(1, 2))
    site.respond(sheet, one.id, "ann2", "discarded")
    site.respond(sheet, one.id, "ann3", "draft", ranks=(1, 2))
    assert site.backend.progress(sheet).completed == 0
    site.respond(sheet, one.id, "ann3", ranks=(2, 1))
    progress = site.backend.progress(sheet)
    assert (progress.tasks, progress.completed) == (1, 1)
    counts = {name: (by["submitted"], by["draft"], by["discarded"]) for name, by in progress.by_annotator.items()}
    assert counts == {"ann1": (1, 0, 0), "ann2": (0, 0, 1), "ann3": (1, 0, 0)}


def test_after_a_time_everything_later_is_given(site: Site) -> None:
    one, two = task(1), task(2)
    sheet = filled(site, [one, two])
    site.respond(sheet, one.id, "ann1", ranks=(1, 2))
    (first,) = site.backend.answers(sheet)
    site.respond(sheet, two.id, "ann1", ranks=(1, 2))
    assert two.id in {answer.task_id for answer in site.backend.answers(sheet, after=first.updated_at)}
    assert list(site.backend.answers(sheet, after="2999-01-01T00:00:00.000000Z")) == []


def test_removed_tasks_are_gone_with_their_answers(site: Site) -> None:
    tasks = [task(number) for number in range(3)]
    sheet = filled(site, tasks)
    site.respond(sheet, tasks[0].id, "ann1", ranks=(1, 2))
    assert site.backend.remove(sheet, [tasks[0].id, tasks[2].id, "0" * 16]) == 2
    assert site.backend.progress(sheet).tasks == 1
    assert list(site.backend.answers(sheet)) == []
    assert site.backend.add(sheet, tasks).new == (tasks[0].id, tasks[2].id)


def test_a_sheet_is_brought_up_to_date_but_never_turned_into_another(site: Site) -> None:
    one = task(1)
    sheet = filled(site, [one], min_submitted=3)
    site.backend.ensure_sheet(sheet)
    site.backend.ensure_sheet(replace(sheet, guidelines="Be kind.", min_submitted=1))
    site.respond(sheet, one.id, "ann1", ranks=(1, 2))
    assert site.backend.progress(sheet).completed == 1
    for other in (replace(sheet, comment=False), replace(sheet, places=3), replace(sheet, reasons=("helpful", "other"))):
        with pytest.raises(ConfigError, match=sheet.name):
            site.backend.ensure_sheet(other)


def test_a_sheet_that_is_not_there_is_said(site: Site) -> None:
    sheet = site.sheet()
    uses: list[Callable[[], object]] = [lambda: site.backend.add(sheet, [task(1)]), lambda: list(site.backend.answers(sheet)),
                                        lambda: site.backend.progress(sheet)]
    for use in uses:
        with pytest.raises(BackendError, match=sheet.name):
            use()


# Argilla alone

def test_the_packages_own_responses_lose_the_ranks(on_server: OnServer) -> None:
    """Why responses are read here over HTTP: B > A and A > B are the same to the package."""
    import argilla as rg

    one = task(1)
    sheet = filled(on_server, [one])
    on_server.respond(sheet, one.id, "ann1", ranks=(2, 1))
    on_server.respond(sheet, one.id, "ann2", ranks=(1, 2))
    connection = on_server.server.connection
    package = rg.Argilla(api_url=connection.url, api_key=connection.api_key, headers={})
    dataset = package.datasets(sheet.name, workspace=connection.workspace)
    assert dataset is not None
    (record,) = list(dataset.records(with_responses=True))
    assert [response.value for response in record.responses["ranking"]] == [["response_1", "response_2"]] * 2
    package.http_client.close()
    assert {answer.ranks for answer in on_server.backend.answers(sheet)} == {(2, 1), (1, 2)}


def test_a_suggestion_is_never_a_vote(on_server: OnServer) -> None:
    """Somebody may put suggestions beside the tasks; they come from no annotator."""
    one = task(1)
    sheet = filled(on_server, [one])
    with on_server.as_user(on_server.server.connection.api_key) as owner:
        questions = owner.get(f"/datasets/{on_server.dataset_id(sheet)}/questions").json()["items"]
        ranking = next(question["id"] for question in questions if question["name"] == "ranking")
        value = [{"value": "response_1", "rank": 2}, {"value": "response_2", "rank": 1}]
        put = owner.put(f"/records/{on_server.record_ids(sheet)[one.id]}/suggestions",
                        json={"question_id": ranking, "value": value, "agent": "a model", "type": "model"})
        assert put.is_success, put.text
    assert list(on_server.backend.answers(sheet)) == []
    on_server.respond(sheet, one.id, "ann1", ranks=(1, 2))
    assert on_server.backend.add(sheet, [one]).present == 1
    assert [answer.ranks for answer in on_server.backend.answers(sheet)] == [(1, 2)]


def test_an_annotator_learns_nothing_but_what_is_shown(on_server: OnServer) -> None:
    """Every answer that the API has for an annotator: no model, no source, no gold mark, no id but hashes."""
    made = [make_task(Candidates(prompt=Prompt.of_text(f"question {number}"), responses=(f"a{number}", f"b{number}"),
                                 models=("secret-model-a", "secret-model-b"), gold=(1, 2) if number % 2 else (),
                                 source=f"secret.jsonl:{number}"), seed=0) for number in range(20)]
    sheet = filled(on_server, [each.shown() for each in made])
    dataset, record = on_server.dataset_id(sheet), next(iter(on_server.record_ids(sheet).values()))
    on_server.respond(sheet, made[0].id, "ann2", ranks=(1, 2))
    with on_server.as_user(on_server.keys["ann1"]) as annotator:
        search = annotator.post(f"/me/datasets/{dataset}/records/search", json={}, params={"include": ["responses", "suggestions"]})
        answers = [search, annotator.get(f"/records/{record}"), annotator.get("/me/datasets")]
        answers += [annotator.get(f"/datasets/{dataset}{part}")
                    for part in ("", "/fields", "/questions", "/progress", "/records", "/users/progress")]
        answers += [annotator.get(f"/me/datasets/{dataset}{part}") for part in ("/metadata-properties", "/metrics")]
    shown = "\n".join(answer.text for answer in answers)
    assert search.is_success
    assert len(search.json()["items"]) == 20
    assert not any(word in shown.casefold() for word in ("secret", "gold", "jsonl", "model-a"))
    for item in search.json()["items"]:
        found = item["record"]
        assert not found.get("metadata")
        assert not found["suggestions"]
        assert set(found["fields"]) == {"prompt", "response_1", "response_2"}
        assert len(found["external_id"]) == 16


def test_texts_arrive_so_that_the_page_shows_them_literally(on_server: OnServer) -> None:
    one = task(1)
    sheet = filled(on_server, [one])
    with on_server.as_user(on_server.server.connection.api_key) as owner:
        found = owner.get(f"/records/{on_server.record_ids(sheet)[one.id]}").json()["fields"]
        fields = owner.get(f"/datasets/{on_server.dataset_id(sheet)}/fields").json()["items"]
    assert found["prompt"] == [{"role": "user", "content": "question &lt;i>1&lt;/i>"}]
    assert found["response_1"] == one.responses[0].replace("&", "&amp;").replace("<", "&lt;")
    assert [field["settings"]["use_markdown"] for field in fields] == [False] * 3


def test_a_sheet_whose_making_was_interrupted_is_made_again(on_server: OnServer) -> None:
    sheet = on_server.sheet()
    with on_server.as_user(on_server.server.connection.api_key) as owner:
        workspaces = {found["name"]: found["id"] for found in owner.get("/me/workspaces").json()["items"]}
        half = owner.post("/datasets", json={"name": sheet.name, "workspace_id": workspaces[sheet.workspace]})
        assert half.is_success
    on_server.backend.ensure_sheet(sheet)
    assert on_server.backend.add(sheet, [task(1)]).new == (task(1).id,)


def test_more_answers_than_a_page_holds_come_back_complete(on_server: OnServer) -> None:
    """Records of one request often have the same time, by which the server sorts its pages."""
    sheet = on_server.sheet()
    on_server.backend.ensure_sheet(sheet)
    with on_server.as_user(on_server.server.connection.api_key) as owner:
        user = next(found["id"] for found in owner.get("/users").json()["items"] if found["username"] == "ann1")
        expected = {}
        for start in range(0, 1_050, 350):
            items = []
            for number in range(start, start + 350):
                ranks = (1, 2) if number % 3 else (2, 1)
                value = [{"value": response_field(place), "rank": rank} for place, rank in enumerate(ranks)]
                items.append(record_of(task(number)) | {"responses": [
                    {"user_id": user, "status": "submitted", "values": {"ranking": {"value": value}}}]})
                expected[task(number).id] = ranks
            assert owner.post(f"/datasets/{on_server.dataset_id(sheet)}/records/bulk", json={"items": items}).is_success
    answers = list(on_server.backend.answers(sheet))
    assert len(answers) == 1_050
    assert {answer.task_id: answer.ranks for answer in answers} == expected


def test_a_server_without_our_extension_is_read_whole_or_not_at_all(on_server: OnServer) -> None:
    """Upstream lists no responses by time; an idle data set is not read again."""
    one, two = task(1), task(2)
    sheet = filled(on_server, [one, two])
    on_server.respond(sheet, one.id, "ann1", ranks=(1, 2))
    on_server.respond(sheet, two.id, "ann1", ranks=(2, 1))
    elsewhere = ArgillaBackend(replace(on_server.server.connection, embedded=False))
    times = sorted(answer.updated_at for answer in elsewhere.answers(sheet))
    assert len(list(elsewhere.answers(sheet, after=times[1]))) == 2
    assert list(elsewhere.answers(sheet, after="2999-01-01T00:00:00.000000Z")) == []
    elsewhere.close()


def test_an_answer_reads_the_same_from_either_backend(on_server: OnServer) -> None:
    """The two differ in ids and times and in nothing else."""
    one = task(1, 4)
    answers: list[Answer] = []
    for site in (InMemory(MemoryBackend()), on_server):
        sheet = filled(site, [one])
        site.respond(sheet, one.id, "ann1", ranks=(2, 1, 2, 4), confidence=1)
        answers += site.backend.answers(sheet)
    plain = [replace(answer, response_id="", inserted_at="", updated_at="") for answer in answers]
    assert plain[0] == plain[1]
    assert json.dumps(plain[0].ranks) == "[2, 1, 2, 4]"
