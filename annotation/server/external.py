"""An Argilla that somebody else runs, used in place of the embedded one."""

from __future__ import annotations

from urllib.parse import urlsplit

from annotation.home import Connection, Home
from annotation.server.reachable import ask, client_of
from rlhf.errors import BackendError, ConfigError

MAJOR = "2"
"""Version of Argilla whose REST API is spoken."""


def use(home: Home, url: str, api_key: str, workspace: str) -> Connection:
    """Check the server, make the workspace where it is missing, and remember both in the home.

    Raises ConfigError for what is not a URL, BackendError for a server that does not answer, is another version, or does not take the
    key for an owner's.
    """
    connection = Connection(url=base_of(url), api_key=api_key, workspace=workspace, embedded=False)
    with client_of(connection) as client:
        about = ask(client, "GET", "/version")
        version = str(about["version"]) if isinstance(about, dict) and "version" in about else "unknown"
        if version.split(".")[0] != MAJOR:
            raise BackendError(f"{connection.url} is no Argilla {MAJOR} (its version: {version}). Check the address.")
        me = ask(client, "GET", "/me")
        if me["role"] != "owner":
            raise BackendError(f"the API key belongs to {me['username']}, {me['role']} of {connection.url}; an owner's is needed: data "
                               "sets are made and everybody's responses are read with it")
        if workspace not in {known["name"] for known in ask(client, "GET", "/me/workspaces")["items"]}:
            ask(client, "POST", "/workspaces", json={"name": workspace})
    home.connect_to(connection)
    return connection


def base_of(url: str) -> str:
    """Without the slash at its end. Raises ConfigError where it is no address of a web server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--backend-url is an address like https://argilla.example.org, got {url!r}")
    return url.rstrip("/")
