"""Turns of API requests, with connections that the tests play."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from annotation.server.inside import safety_intake
from annotation.server.inside.safety_headers import forwarded, with_headers
from annotation.server.inside.safety_intake import in_turn

Receive = Callable[[], Awaitable[dict[str, Any]]]


def scope(path: str = "/api/v1/me", headers: tuple[tuple[bytes, bytes], ...] = (), scheme: str = "http") -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": list(headers), "client": ("10.0.0.1", 5), "scheme": scheme}


async def echo(_scope: Any, receive: Receive, send: Any) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"server", b"echo 1.0")]})
    await send({"type": "http.response.body", "body": body})


def sending(*parts: bytes) -> Receive:
    """A client that sends these parts and then stays on the line."""
    messages = [{"type": "http.request", "body": part, "more_body": index < len(parts) - 1} for index, part in enumerate(parts)]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        return await asyncio.get_running_loop().create_future()

    return receive


async def ask(app: Any, receive: Receive, asked: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    await app(asked or scope(), receive, send)
    return told


def test_a_body_in_parts_arrives_whole() -> None:
    told = asyncio.run(ask(in_turn(echo, 1), sending(b"ab", b"", b"cd")))
    assert told[1]["body"] == b"abcd"


def test_clients_that_send_slowly_stop_nobody() -> None:
    async def play() -> bytes:
        app = in_turn(echo, 1)
        stuck = [asyncio.create_task(ask(app, unending)) for _ in range(20)]
        await asyncio.sleep(0)
        told = await asyncio.wait_for(ask(app, sending(b"quick")), 5)
        for task in stuck:
            task.cancel()
        return bytes(told[1]["body"])

    async def unending() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"", "more_body": True}

    assert asyncio.run(play()) == b"quick"


def test_large_bodies_together_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are taken meanwhile, and large ones again when there is room."""
    monkeypatch.setattr(safety_intake, "SMALL_BODY", 10)
    monkeypatch.setattr(safety_intake, "ALL_LARGE_BODIES", 100)

    async def play() -> list[int]:
        app = in_turn(echo, 1)
        stuck = [asyncio.create_task(ask(app, starting(40))) for _ in range(2)]
        await asyncio.sleep(0.01)
        before = [(await ask(app, sending(b"x" * size)))[0]["status"] for size in (10, 20, 21)]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        return [*before, (await ask(app, sending(b"x" * 100)))[0]["status"]]

    def starting(size: int) -> Receive:
        messages = [{"type": "http.request", "body": bytes(size), "more_body": True}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        return receive

    assert asyncio.run(play()) == [200, 200, 503, 200]


def test_clients_that_read_slowly_stop_nobody() -> None:
    async def play() -> bytes:
        app = in_turn(echo, 1)

        async def never_read(_message: Any) -> None:
            await asyncio.get_running_loop().create_future()

        stuck = asyncio.create_task(app(scope(), sending(b"x"), never_read))
        await asyncio.sleep(0.01)
        told = await asyncio.wait_for(ask(app, sending(b"quick")), 5)
        stuck.cancel()
        return bytes(told[1]["body"])

    assert asyncio.run(play()) == b"quick"


def test_no_more_than_so_many_are_worked_on_at_once() -> None:
    working, most = 0, 0

    async def slow(asked: Any, receive: Receive, send: Any) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await asyncio.sleep(0.001)
        working -= 1
        await echo(asked, receive, send)

    async def play() -> None:
        app = in_turn(slow, 3)
        await asyncio.gather(*(ask(app, sending(b"x")) for _ in range(30)))

    asyncio.run(play())
    assert most == 3


def test_a_turn_is_given_back_when_the_work_fails() -> None:
    async def failing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("broken")

    async def play() -> None:
        app = in_turn(failing, 1)
        for _ in range(3):
            with pytest.raises(ValueError, match="broken"):
                await asyncio.wait_for(ask(app, sending(b"x")), 5)

    asyncio.run(play())


def test_too_large_a_body_and_one_that_does_not_come_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safety_intake, "LARGEST_BODY", 10)
    monkeypatch.setattr(safety_intake, "PATIENCE", 0.01)

    async def silent() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    assert asyncio.run(ask(in_turn(echo, 1), sending(b"12345", b"678901")))[0]["status"] == 413
    assert asyncio.run(ask(in_turn(echo, 1), silent))[0]["status"] == 408
    assert asyncio.run(ask(in_turn(echo, 1), sending(b"1234567890")))[0]["status"] == 200


def test_a_client_that_left_is_not_worked_for() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def unreachable(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("asked although nobody waits")

    assert asyncio.run(ask(in_turn(unreachable, 1), gone)) == []


@pytest.mark.parametrize(("header", "client"), [
    ((), "10.0.0.1"),                                                        # straight to the server
    (((b"x-forwarded-for", b"203.0.113.9"),), "203.0.113.9"),
    (((b"x-forwarded-for", b"1.2.3.4, 203.0.113.9"),), "203.0.113.9"),       # the first is what the client made up
    (((b"x-forwarded-for", b"1.2.3.4"), (b"X-Forwarded-For", b"203.0.113.9")), "203.0.113.9"),
    (((b"x-forwarded-for", b"2001:db8::1"),), "2001:db8::1"),
    (((b"x-forwarded-for", b" , "),), "10.0.0.1"),
])
def test_only_the_last_hop_says_who_asks(header: tuple[tuple[bytes, bytes], ...], client: str) -> None:
    seen = []

    async def look(asked: Any, _receive: Any, _send: Any) -> None:
        seen.append(asked["client"][0])

    asyncio.run(ask(forwarded(look), sending(b""), scope(headers=header)))
    assert seen == [client]


def test_answers_carry_our_headers_and_not_the_servers() -> None:
    (start, _) = asyncio.run(ask(with_headers(echo, b"default-src 'none'"), sending(b"")))
    headers = dict(start["headers"])
    assert headers[b"content-security-policy"] == b"default-src 'none'"
    assert headers[b"cache-control"] == b"no-store"
    assert b"server" not in headers
    assert b"strict-transport-security" not in headers
    (start, _) = asyncio.run(ask(with_headers(echo, b""), sending(b""), scope(path="/", scheme="https")))
    assert b"strict-transport-security" in dict(start["headers"])
    assert b"cache-control" not in dict(start["headers"])
