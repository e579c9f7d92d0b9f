"""A record is completed when it has the submitted responses it needs, also when they come at once, and also after a crash in between."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import server_api
from server_api import ask, search

from annotation.home import Home
from annotation.server.embedded import serving

PEOPLE = ("statuses-a", "statuses-b", "statuses-c")
PLACES = {"fields": {"text": server_api.TEXT}, "questions": {"ranking": server_api.RANKING}}


@dataclass(frozen=True)
class Team:
    owner: httpx.Client
    workspace: str
    annotators: list[httpx.Client]

    def dataset(self, name: str, count: int, min_submitted: int) -> tuple[str, list[str]]:
        dataset = server_api.make_dataset(self.owner, self.workspace, name, min_submitted=min_submitted, **PLACES)
        return dataset, server_api.push(self.owner, dataset, [{"fields": {"text": f"text {number}"}} for number in range(count)])

    def status(self, record: str) -> str:
        return str(ask(self.owner, "GET", f"/records/{record}")["status"])


@pytest.fixture(scope="module", params=["argilla_server", "argilla_on_postgresql"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    server = request.getfixturevalue(request.param)
    with ExitStack() as stack:
        clients = [stack.enter_context(server_api.client(server.connection.url, key))
                   for key in [server.connection.api_key, *(server.add_annotator(name).api_key for name in PEOPLE)]]
        yield Team(clients[0], server.connection.workspace, clients[1:])


def respond(client: httpx.Client, record: str, status: str) -> str:
    values = {"values": server_api.ranking(1, 1)} if status != "discarded" else {"values": None}
    return str(ask(client, "POST", f"/records/{record}/responses", json={"status": status, **values})["id"])


def test_only_submitted_responses_count_and_a_record_can_be_reopened(team: Team) -> None:
    _, (record,) = team.dataset("statuses-count", 1, min_submitted=2)
    first, second, third = team.annotators
    respond(first, record, "submitted")
    respond(second, record, "discarded")
    draft = respond(third, record, "draft")
    assert team.status(record) == "pending"
    ask(third, "PUT", f"/responses/{draft}", json={"status": "submitted", "values": server_api.ranking(2, 1)})
    assert team.status(record) == "completed"
    ask(third, "DELETE", f"/responses/{draft}")
    assert team.status(record) == "pending"
    again = {"record_id": record, "status": "submitted", "values": server_api.ranking(1, 2)}
    ask(third, "POST", "/me/responses/bulk", json={"items": [again]})
    assert team.status(record) == "completed"


def test_responses_that_come_at_once_complete_their_record(team: Team) -> None:
    dataset, records = team.dataset("statuses-at-once", 12, min_submitted=3)
    with ThreadPoolExecutor(len(team.annotators) * 4) as pool:
        for record in records:    # everybody at the same record: an update that saw a stale count would leave it pending
            list(pool.map(lambda client, record=record: respond(client, record, "submitted"), team.annotators))
    progress = ask(team.owner, "GET", f"/datasets/{dataset}/progress")
    assert (progress["completed"], progress["pending"]) == (len(records), 0)


def test_a_status_that_changed_is_a_change_of_the_record(team: Team) -> None:
    _, (record,) = team.dataset("statuses-updated", 1, min_submitted=2)
    told = [ask(team.owner, "GET", f"/records/{record}")["updated_at"]]
    for client in team.annotators[:2]:
        respond(client, record, "submitted")
        told.append(ask(team.owner, "GET", f"/records/{record}")["updated_at"])
    assert told[0] == told[1] < told[2]


def test_what_a_crash_left_undone_is_done_at_the_next_start(server_python: Path, tmp_path: Path) -> None:
    """Upstream commits the record, and we then its words; it commits the response, and then the record's status."""
    home = Home(tmp_path / "home")
    with serving(home, server_python) as connection, server_api.client(connection.url, connection.api_key) as owner:
        team = Team(owner, connection.workspace, [])
        dataset, records = team.dataset("crashed", 3, min_submitted=1)
        respond(owner, records[0], "submitted")
        unpublished = ask(owner, "GET", f"/datasets/{dataset}")["id"].replace("-", "")
        empty, _ = team.dataset("crashed-before-its-index", 0, min_submitted=1)
    with sqlite3.connect(home.server / "argilla.db") as database:
        database.execute("DELETE FROM prefloop_documents WHERE record_id = ?", [records[2].replace("-", "")])
        database.execute("UPDATE records SET status = CASE status WHEN 'completed' THEN 'pending' ELSE 'completed' END")
        database.execute(f"DROP TABLE prefloop_words_{empty.replace('-', '')}")
        database.execute(f"CREATE VIRTUAL TABLE prefloop_words_{'0' * 32} USING fts5(f0, content='')")    # of a data set that is gone
    database.close()
    with serving(home, server_python) as connection, server_api.client(connection.url, connection.api_key) as owner:
        assert search(owner, dataset, text="text")[1] == 3
        assert search(owner, dataset, text='"text 2"')[0] == [records[2]]
        assert search(owner, empty, text="text")[1] == 0
        progress = ask(owner, "GET", f"/datasets/{dataset}/progress")
        assert (progress["completed"], progress["pending"]) == (1, 2)
        assert Team(owner, "", []).status(records[0]) == "completed"
    with sqlite3.connect(home.server / "argilla.db") as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name GLOB 'prefloop_words_*'")]
    database.close()
    assert not any("0" * 32 in name for name in tables)
    assert f"prefloop_words_{unpublished}" in tables


def test_who_leaves_the_workspace_is_refused_at_once(team: Team) -> None:
    """Memberships are remembered within a request, not longer."""
    dataset, (record,) = team.dataset("statuses-left", 1, min_submitted=2)
    leaver = team.annotators[2]
    me = ask(leaver, "GET", "/me")["id"]
    workspace = ask(leaver, "GET", "/me/workspaces")["items"][0]["id"]
    assert search(leaver, dataset, mine=True)[1] == 1
    ask(team.owner, "DELETE", f"/workspaces/{workspace}/users/{me}")
    try:
        answers = [leaver.post(f"/records/{record}/responses", json={"status": "submitted", "values": server_api.ranking(1, 2)}),
                   leaver.post(f"/me/datasets/{dataset}/records/search", json={})]
    finally:
        ask(team.owner, "POST", f"/workspaces/{workspace}/users", json={"user_id": me})
    assert [answer.status_code for answer in answers] == [403, 403]
    respond(leaver, record, "submitted")
