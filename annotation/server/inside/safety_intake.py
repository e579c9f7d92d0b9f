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
SMALL_BODY = 2**20
"""Bytes: what annotators send stays far below, and is taken however much others send."""
ALL_LARGE_BODIES = 4 * LARGEST_BODY
"""Bytes of bodies that are not small, together: nobody has asked yet who sends them, and they must not fill the memory."""
PATIENCE = 30.0
"""Seconds of silence in the middle of a body."""


class Refusal(Exception):
    """The body is not taken."""

    def __init__(self, status: int) -> None:
        self.status = status


class Room:
    """Memory for the large bodies of all requests that are in progress."""

    def __init__(self) -> None:
        self.taken = 0


class Held:
    """What one request holds of it, inside a `with` block."""

    def __init__(self, room: Room) -> None:
        self.room, self.size, self.counted = room, 0, 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.room.taken -= self.counted

    def take(self, size: int) -> None:
        """Raises Refusal where the request, or all of them together, would hold too much."""
        self.size += size
        if self.size > LARGEST_BODY:
            raise Refusal(413)
        more = (self.size if self.size > SMALL_BODY else 0) - self.counted
        if more and self.room.taken + more > ALL_LARGE_BODIES:
            raise Refusal(503)
        self.room.taken += more
        self.counted += more


class Gone(Exception):
    """The client has left; nobody waits for an answer."""


def in_turn(app: Application, at_once: int) -> Application:
    """So many API requests are worked on at once; the others wait. Everything else (the page's files) goes straight through."""
    turns, room = asyncio.Semaphore(at_once), Room()

    async def taking_turns(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(API):
            await app(scope, receive, send)
            return
        answer: list[Any] = []

        async def keep(message: Any) -> None:
            answer.append(message)

        try:
            with Held(room) as held:
                body = await whole_body(receive, held)
                async with turns:
                    await app(scope, replay(body, receive), keep)
        except Gone:
            return
        except Refusal as refusal:
            answer = [{"type": "http.response.start", "status": refusal.status, "headers": [(b"connection", b"close")]},
                      {"type": "http.response.body", "body": b""}]
        for message in answer:
            await send(message)

    return taking_turns


async def whole_body(receive: Any, held: Held) -> bytes:
    """Raises Refusal where it is too large or does not come, Gone where the client goes first."""
    parts, more = [], True
    while more:
        try:
            message = await asyncio.wait_for(receive(), PATIENCE)
        except TimeoutError:
            raise Refusal(408) from None
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        held.take(len(parts[-1]))
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
