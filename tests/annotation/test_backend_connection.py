"""Servers that are busy, restart, refuse, or are none: what is tried again, and what is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from server_under_test import ServerUnderTest

from annotation.argilla import ArgillaBackend
from annotation.backend import Sheet
from annotation.home import Connection
from annotation.rest import PAUSES, RestApi
from rlhf.errors import BackendError


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[str]:
    """A server that gives these answers (status, body) in turn, and the last one for ever; status 0 hangs up without an answer."""
    waiting = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())
            else:
                self.close_connection = True

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Not into the tests' output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(url: str) -> tuple[object, list[float]]:
    """What the API answers, and how long it was waited for."""
    waits: list[float] = []
    with httpx.Client(base_url=url, trust_env=False) as client:
        return RestApi(client, sleep=waits.append).ask("POST", "/things", json={}), waits


def test_a_busy_server_and_a_lost_connection_are_tried_again() -> None:
    with answering((503, ""), (0, ""), (429, ""), (200, '{"done": true}')) as url:
        assert asked(url) == ({"done": True}, list(PAUSES[:3]))


@pytest.mark.parametrize(("status", "body", "said"), [
    (401, '{"detail": "no"}', "the API key is not known there"),
    (403, '{"detail": "no"}', "an owner's key is needed"),
    (404, '{"detail": "no"}', "there is no such thing there"),
    (422, '{"detail": "name is too short"}', "422: name is too short"),
    (422, '{"detail": {"code": "x", "params": {"errors": [{"loc": ["body", "items", 0], "msg": "is bad", "input": "SECRET"}]}}}',
     "422: body.items.0: is bad"),
])
def test_a_refusal_is_said_at_once_and_with_its_reason(status: int, body: str, said: str) -> None:
    with answering((status, body)) as url, pytest.raises(BackendError, match=said) as caught:
        asked(url)
    assert "SECRET" not in str(caught.value)


def test_a_server_that_stays_broken_is_given_up_with_its_words() -> None:
    with answering((500, '{"detail": "the disk is full"}')) as url, pytest.raises(BackendError, match="again and again: the disk is full"):
        asked(url)


def test_nobody_there() -> None:
    with pytest.raises(BackendError, match=r"does not answer \(ConnectError.*Is `annotation serve` running"):
        asked("http://127.0.0.1:9")


@pytest.mark.parametrize(("status", "body"), [(200, "<html>hello</html>"), (200, '{"version": "1.29"}'), (200, "[]"),
                                              (404, '{"detail": "x"}')])
def test_another_server_is_recognised(status: int, body: str) -> None:
    with answering((status, body)) as url, pytest.raises(BackendError, match="Argilla"):
        ArgillaBackend(Connection(url=url, api_key="k", workspace="w", embedded=True))


def test_a_wrong_key_and_a_missing_workspace(argilla_server: ServerUnderTest) -> None:
    right = argilla_server.connection
    with pytest.raises(BackendError, match="the API key is not known there"):
        ArgillaBackend(Connection(url=right.url, api_key="wrong", workspace=right.workspace, embedded=True))
    backend = ArgillaBackend(right)
    with pytest.raises(BackendError, match=f"no workspace 'nowhere-at-all' .it has {right.workspace}"):
        backend.ensure_sheet(Sheet(name="any-k2", places=2, workspace="nowhere-at-all", guidelines="g", min_submitted=1))
    backend.close()


def test_keys_are_in_no_message(argilla_server: ServerUnderTest) -> None:
    assert argilla_server.connection.api_key not in repr(argilla_server.connection)
