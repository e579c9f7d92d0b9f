"""Requests to a REST API that must not be lost to a restart or a busy moment, with errors that say what to do.

Every request made here may be repeated: reading, replacing, and adding under ids that are known beforehand.
"""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rlhf.errors import BackendError

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt."""
BUSY = frozenset({429, 500, 502, 503, 504})
"""Answers that may be others a moment later."""
MEANING = {401: "the API key is not known there. It belongs to another server or was replaced: serve the home again, or name the right key",
           403: "the account of this API key may not do that; an owner's key is needed",
           404: "there is no such thing there. Was it deleted, or does the address belong to another server?"}
LONGEST_QUOTE = 500
"""Characters of a server's answer that get into a message."""


@dataclass(frozen=True)
class RestApi:
    """Paths are relative to the API's root, /api/v1."""

    client: httpx.Client
    root: str = "/api/v1"
    sleep: Callable[[float], None] = time.sleep

    def ask(self, method: str, path: str, *, json: Any = None, params: Mapping[str, str | int] | None = None) -> Any:
        """The decoded answer; None where it is empty. Raises BackendError unless it is a success."""
        return decoded(self.answer(method, path, json=json, params=params))

    def answer(self, method: str, path: str, *, json: Any = None, params: Mapping[str, str | int] | None = None,
               expected: Collection[int] = ()) -> httpx.Response:
        """A success, or one of the expected statuses. Connection errors and busy answers are tried again."""
        trouble = ""
        for pause in (*PAUSES, None):
            try:
                answer = self.client.request(method, f"{self.root}{path}", json=json, params=params)
            except httpx.TransportError as error:
                trouble = f"{self.client.base_url} does not answer ({type(error).__name__}: {error}). Is `annotation serve` running?"
            else:
                if answer.is_success or answer.status_code in expected:
                    return answer
                if answer.status_code not in BUSY:
                    raise BackendError(f"{method} {answer.url} was answered with {answer.status_code}: "
                                       f"{MEANING.get(answer.status_code, said(answer))}")
                trouble = f"{method} {answer.url} was answered with {answer.status_code}, again and again: {said(answer)}"
            if pause is not None:
                self.sleep(pause)
        raise BackendError(f"{trouble} What was acknowledged is stored; run the same command again to continue.")


def decoded(answer: httpx.Response) -> Any:
    if not answer.content:
        return None
    try:
        return answer.json()
    except json_format.JSONDecodeError as error:
        raise BackendError(f"{answer.url} answers, but not with JSON: {answer.text[:80]!r}. Is that the address of an Argilla "
                           "server?") from error


def said(answer: httpx.Response) -> str:
    """What the server says is wrong, without the input that it repeats."""
    try:
        detail = answer.json()["detail"]
    except (json_format.JSONDecodeError, KeyError, TypeError):
        detail = answer.text
    if isinstance(detail, dict) and "params" in detail:    # Argilla's form of FastAPI's list of errors
        detail = detail["params"].get("errors", detail)
    text = "; ".join(map(_fault, detail)) if isinstance(detail, list) else str(detail)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def _fault(error: object) -> str:
    """One entry of FastAPI's list of what is wrong with a request."""
    if isinstance(error, dict) and {"loc", "msg"} <= error.keys():
        return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
    return str(error)
