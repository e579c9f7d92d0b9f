"""The server's events as hints: a listener on this machine that is registered as a webhook as long as it runs.

A hint says that something happened, and nothing more: what happened is read from the server. An event that gets lost loses nothing, one
that somebody makes up costs one look. Signatures are those of https://www.standardwebhooks.com, as Argilla makes them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from annotation.home import Connection
from annotation.server.ports import holder, is_loopback
from annotation.server.reachable import ask, client_of
from rlhf.errors import BackendError, ConfigError

EVENTS = ("response.created", "response.updated", "response.deleted")
ADDRESS = "127.0.0.1"
NAME = "annotation pull --watch"
"""The webhook's description, by which those are found that a killed process left behind."""
LARGEST_EVENT = 64 * 2**20
"""Bytes. An event repeats the whole record."""
PATIENCE = 10.0
"""Seconds for one request."""


class Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((ADDRESS, port), Receiver)
        self.rung = threading.Event()
        self.secret: str | None = None
        """None until the server has told it."""

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class Receiver(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: Listener

    def do_POST(self) -> None:
        length = self.headers["Content-Length"]
        if length is None or not length.isdecimal() or int(length) > LARGEST_EVENT:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        event = self.rfile.read(int(length))
        if self.server.secret is None:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            Webhook(self.server.secret).verify(event, dict(self.headers.items()), json_parse=False)
        except (WebhookVerificationError, ValueError):    # ValueError: a signature or a body that cannot be decoded
            self._answer(HTTPStatus.UNAUTHORIZED)
            return
        self.server.rung.set()
        self._answer(HTTPStatus.NO_CONTENT)

    def _answer(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Events are no news; what they lead to is said elsewhere."""


@contextmanager
def hints(connection: Connection, port: int, say: Callable[[str], None]) -> Iterator[threading.Event]:
    """An event that is set whenever a response was stored, changed or deleted. 0: any free port.

    Raises ConfigError where the server could not reach this machine or the port is taken, BackendError where it refuses the webhook.
    """
    host = urlsplit(connection.url).hostname
    if host is None or not is_loopback(host):
        raise ConfigError(f"--webhook listens on {ADDRESS} alone, which the server at {connection.url} cannot reach. Leave it out: "
                          "--watch then asks every few seconds.")
    try:
        listener = Listener(port)
    except OSError as error:
        raise ConfigError(f"--webhook {port}: cannot listen there ({error.strerror}; it belongs to {holder(port)}). 0 takes any port that "
                          "is free.") from error
    thread = threading.Thread(target=listener.serve_forever, name="webhook", daemon=True)
    thread.start()
    try:
        with registered(connection, listener, say):
            yield listener.rung
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@contextmanager
def registered(connection: Connection, listener: Listener, say: Callable[[str], None]) -> Iterator[None]:
    """The server sends its events to the listener. Removed at the end; what killed processes left behind is removed at the start."""
    with client_of(connection) as client:
        for webhook in ask(client, "GET", "/webhooks")["items"]:
            if webhook["description"] == NAME and (webhook["url"] == listener.url or not answers(webhook["url"])):
                ask(client, "DELETE", f"/webhooks/{webhook['id']}")
        made = ask(client, "POST", "/webhooks", json={"url": listener.url, "events": EVENTS, "description": NAME})
    listener.secret = made["secret"]
    try:
        yield
    finally:
        try:
            with client_of(connection) as client:
                ask(client, "DELETE", f"/webhooks/{made['id']}")
        except BackendError as error:
            say(f"the webhook {listener.url} stays registered until the next --webhook: {error}")


def answers(url: str) -> bool:
    """Whether anybody listens there."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port or 80), timeout=1.0).close()
    except OSError:
        return False
    return True
