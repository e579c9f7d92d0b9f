"""Runs inside the server's environment: API requests take turns, and none holds a turn while its client sends or reads.

A turn is a database's worth of work. If a request kept it while its body trickles in, eight slow clients would be enough to stop everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Application = Callable[[Any, Any, Any], Awaitable[None]]
API = "/api/"
LARGEST_BODY = 64 * 2**20
"""Bytes: a batch of tasks with long responses stays far below."""
PATIENCE = 30.0
"""Seconds of silence in the middle of a body."""


class Refusal(Exception):
    """The body is not taken."""

    def __init__(self, status: int) -> None:
        self.status = status


class Gone(Exception):
    """The client has left; nobody waits for an answer."""


def in_turn(app: Application, at_once: int) -> Application:
    """So many API requests are worked on at once; the others wait. Everything else (the page's files) goes straight through."""
    turns = asyncio.Semaphore(at_once)

    async def taking_turns(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(API):
            await app(scope, receive, send)
            return
        try:
            body = await whole_body(receive)
        except Gone:
            return
        except Refusal as refusal:
            await send({"type": "http.response.start", "status": refusal.status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b""})
            return
        answer: list[Any] = []

        async def keep(message: Any) -> None:
            answer.append(message)

        async with turns:
            await app(scope, replay(body, receive), keep)
        for message in answer:
            await send(message)

    return taking_turns


async def whole_body(receive: Any) -> bytes:
    """Raises Refusal where it is too large or does not come, Gone where the client goes first."""
    parts, size, more = [], 0, True
    while more:
        try:
            message = await asyncio.wait_for(receive(), PATIENCE)
        except TimeoutError:
            raise Refusal(408) from None
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            raise Refusal(413)
        more = message.get("more_body", False)
    return b"".join(parts)


def replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """The body at once, and then whatever the connection says, which is that the client has left."""
    given = False

    async def next_message() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
