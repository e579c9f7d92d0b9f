"""The REST API of an Argilla server, ours or somebody else's, for requests that are made once: accounts, and whether it answers at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from annotation.home import Connection
from annotation.rest import MEANING, decoded, said
from rlhf.errors import BackendError

TIMEOUT = 30.0


@contextmanager
def client_of(connection: Connection) -> Iterator[httpx.Client]:
    """An HTTP client of the API, signed in by key; paths are like `/me`. Proxies of the environment are left out for this machine."""
    with httpx.Client(base_url=f"{connection.url}/api/v1", headers={"X-Argilla-Api-Key": connection.api_key}, timeout=TIMEOUT,
                      verify=connection.verify(), trust_env=not connection.embedded) as client:
        yield client


def ask(client: httpx.Client, method: str, path: str, *, json: Mapping[str, Any] | None = None) -> Any:
    """The decoded answer. Raises BackendError, with what the server said, where it cannot be reached or answers anything but success."""
    try:
        answer = client.request(method, path, json=json)
    except httpx.TransportError as error:
        raise BackendError(f"{client.base_url} does not answer: {error}. Is `annotation serve` running?") from error
    if not answer.is_success:
        raise BackendError(f"{method} {answer.url} was answered with {answer.status_code}: {MEANING.get(answer.status_code, said(answer))}")
    return decoded(answer)
