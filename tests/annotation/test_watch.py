"""Watching: what changes is said, an outage is said once, and only signed events are believed."""

from __future__ import annotations

import http.client
import io
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pulled_projects import filled, made_task, project_with, sheet_of
from rich.console import Console
from standardwebhooks.webhooks import Webhook

from annotation import watch as watch_module
from annotation.backend import Backend
from annotation.home import Connection, Home
from annotation.verdicts import Verdict
from annotation.watch import Watch, follow, line_of
from annotation.webhook import Listener, hints
from rlhf.errors import BackendError, ConfigError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_a_line_shows_responses_by_the_numbers_on_the_screen() -> None:
    verdict = Verdict(task_id="t1", annotator="ann", kind="submitted", ranks=(2, 1, 2), order=(2, 0, 1), at="2026-12-01T09:30:00.000001Z")
    # Shown first is response 2 (rank 2), then 0 (rank 2), then 1 (rank 1).
    assert line_of(verdict) == "2026-12-01 09:30:00  ann  ranked t1: 3 > 1 = 2"


def test_a_watch_says_each_change_and_survives_an_outage(tmp_path: Path) -> None:
    tasks = [made_task(number, 2) for number in range(3)]
    project = project_with(tmp_path / "projects/week-48", tasks)
    backend, connections = filled(project, tasks), 0

    def connect() -> Backend:
        nonlocal connections
        connections += 1
        if connections == 2:
            raise BackendError("nobody answers")
        return backend

    out = io.StringIO()
    watch = Watch(Home(tmp_path), None, connect, Console(file=out, width=200))
    sheet = sheet_of(project, tasks[0])
    backend.respond(sheet, tasks[0].id, "ann", "submitted", (1, 2))
    watch.look()
    backend.respond(sheet, tasks[1].id, "ben", "submitted", (2, 1))
    watch.look()
    watch.close()
    with pytest.raises(BackendError):
        watch.look()
    backend.respond(sheet, tasks[1].id, "ben", "discarded")
    watch.look()
    lines = out.getvalue().splitlines()
    assert lines[0] == "week-48: caught up (1 new, 0 changed, 0 discarded, 0 withdrawn, 0 drafts)"
    assert [line.split("  ", 2)[2] for line in lines[1:]] == [f"ben  ranked {tasks[1].id}: 2 > 1", f"ben  discarded {tasks[1].id}"]
    assert watch.counts["week-48"]["new"] == 2


def test_an_outage_is_said_once_and_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, pauses, said = iter([True, False, True, True, True, False]), [], []
    monkeypatch.setattr(watch_module.time, "sleep", pauses.append)

    def look() -> None:
        if (failing := next(failures, None)) is None:
            raise KeyboardInterrupt
        if failing:
            raise BackendError("nobody answers")

    with pytest.raises(KeyboardInterrupt):
        follow(look, threading.Event(), every=0.0, say=said.append)
    assert [text.split("\n")[0] for text in said] == ["nobody answers", "it works again"] * 2
    assert pauses == [2.0, watch_module.SHORTEST_PAUSE, 2.0, 4.0, 8.0, watch_module.SHORTEST_PAUSE]


# Events

@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(0)
    listener.secret = SECRET
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
    thread.start()
    yield listener
    listener.shutdown()
    listener.server_close()
    thread.join()


def signed(body: str, *, secret: str = SECRET, at: datetime | None = None) -> dict[str, str]:
    """As Argilla signs, with the library that it uses."""
    moment = at or datetime.now(UTC)
    return {"webhook-id": "msg_1", "webhook-timestamp": str(int(moment.timestamp())),
            "webhook-signature": Webhook(secret).sign("msg_1", moment, body)}


def posted(listener: Listener, body: str, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", listener.server_address[1], timeout=10)
    try:
        connection.request("POST", "/", body=body.encode(), headers=dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_signed_event_rings(listener: Listener) -> None:
    body = '{"type": "response.created", "text": "\u00e9"}'
    assert posted(listener, body, signed(body)) == 204
    assert listener.rung.is_set()


@pytest.mark.parametrize("headers", [
    {},
    signed('{"other": 1}'),
    signed("{}", secret="whsec_" + "A" * 32),
    signed("{}", at=datetime.now(UTC) - timedelta(minutes=20)),
    signed("{}") | {"webhook-signature": "v1,not base64"},
    signed("{}") | {"webhook-signature": "nonsense"},
    signed("{}") | {"webhook-timestamp": "yesterday"},
], ids=["unsigned", "of another body", "with another secret", "an old one", "no base64", "no signature", "no time"])
def test_an_event_that_is_not_the_servers_is_refused(listener: Listener, headers: dict[str, str]) -> None:
    assert posted(listener, "{}", headers) == 401
    assert not listener.rung.is_set()


def test_nothing_is_believed_before_the_secret_is_known(listener: Listener) -> None:
    listener.secret = None
    assert posted(listener, "{}", signed("{}")) == 503
    assert not listener.rung.is_set()


def test_an_event_of_absurd_length_is_not_read(listener: Listener) -> None:
    assert posted(listener, "", {"Content-Length": str(2**40)}) == 413


def test_a_server_elsewhere_cannot_ring_here() -> None:
    connection = Connection(url="https://argilla.example.org", api_key="key", workspace="preferences", embedded=False)
    with pytest.raises(ConfigError, match="cannot reach"), hints(connection, 0, print):
        pass


def test_a_port_that_is_taken_is_named_with_its_owner(listener: Listener) -> None:
    connection = Connection(url="http://127.0.0.1:1", api_key="key", workspace="preferences", embedded=True)
    with pytest.raises(ConfigError, match=r"process \d+"), hints(connection, listener.server_address[1], print):
        pass
