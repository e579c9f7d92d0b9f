"""Runs inside the server's environment: upstream's application with the embedded parts in it, served until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from .settings import ServerSettings
from .surroundings import SEARCH_ENGINE, migrate, prepare_process, prepare_sqlite

LOG = logging.getLogger("uvicorn.error")
Application = Callable[[Any, Any, Any], Awaitable[None]]
SECONDS_TO_FINISH = 10
"""Requests in progress get so long when the server is told to stop."""


def serve(settings: ServerSettings) -> None:
    """Returns when the server has stopped: after SIGTERM or SIGINT, or when the process that started it is gone."""
    prepare_process(settings, "serve")
    prepare_sqlite(settings.pool)
    from . import upstream
    upstream.check()
    migrate()
    application = assemble(settings)
    server = uvicorn.Server(uvicorn.Config(
        application, host=settings.host, port=settings.port, log_level="warning", access_log=False, server_header=False,
        proxy_headers=False,    # the guard reads them, and only behind a proxy
        ssl_certfile=settings.tls_certificate, ssl_keyfile=settings.tls_key, timeout_graceful_shutdown=SECONDS_TO_FINISH))
    stop_with_the_starter(server)
    server.run()


def assemble(settings: ServerSettings) -> Application:
    """The ASGI application: upstream's, its database brought up to date, wrapped by the guard."""
    from argilla_server._app import app
    from argilla_server.api.routes import api_v1

    from . import accounts, jobs, recent_responses, safety, search, speed

    speed.install()
    if settings.redis_url is None:
        jobs.install()

    async def prepare_database() -> None:
        if upstream_searches_with(SEARCH_ENGINE):
            await search.bootstrap()
        await accounts.ensure_owner_and_workspace(settings)

    asyncio.run(prepare_database())
    accounts.add_key_rotation(api_v1)
    recent_responses.add_to(api_v1)
    return safety.guard(log_failures(app), settings)


def log_failures(app: Application) -> Application:
    """Upstream answers an exception with 500 and raises it again; uvicorn then drops the connection, and with it the request that a client
    has sent on it meanwhile. Logged here, it goes no further.
    """
    async def logging_failures(scope: Any, receive: Any, send: Any) -> None:
        answered = False

        async def noting_send(message: Any) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await app(scope, receive, noting_send)
        except Exception:
            if not answered:
                raise
            LOG.exception("a request failed and was answered with 500")

    return logging_failures


def upstream_searches_with(name: str) -> bool:
    from argilla_server.settings import settings

    return bool(settings.search_engine == name)


def stop_with_the_starter(server: uvicorn.Server) -> None:
    """Standard input is a pipe that nobody writes to: it ends when the starter ends, even by kill -9, and then so does the server."""
    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
