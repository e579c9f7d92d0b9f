"""Runs inside the server's environment: what stands between the network and upstream's application.

    request -> forwarded (who asks, when a proxy stands in front) -> with_headers -> in_turn -> upstream: sign_in, roles

What it protects against, and what it does not, is told in docs/security.md.
"""

from __future__ import annotations

from typing import Any

from . import page, roles, safety_log, safety_sign_in
from .safety_headers import forwarded, policy_of, with_headers
from .safety_intake import Application, in_turn
from .settings import ServerSettings

SHUT = {    # routes of upstream that nobody here needs, and why they would do harm
    "/share-your-progress": "puts what the link says into a page, unescaped",
    "/docs": "loads its scripts from a third party",
    "/api": "leads to the documentation",
    "/docs/oauth2-redirect": "belongs to the documentation",
    "/redoc": "loads its scripts from a third party",
    "/openapi.json": "lists every route to everybody",
    "/status": "tells everybody about the machine",
    "/datasets/{dataset_id}/import": "makes the server fetch from a hub",
    "/datasets/{dataset_id}/export": "makes the server publish to a hub",
}


def guard(application: Application, settings: ServerSettings) -> Application:
    """Upstream's application, made safe: its API is changed in place, the way to it is wrapped."""
    from argilla_server._app import app
    from argilla_server.api.routes import api_v1

    for fastapi in (app, api_v1):
        fastapi.router.routes[:] = [route for route in fastapi.router.routes if path_of(route) not in SHUT]
    safety_log.install()
    safety_sign_in.install(api_v1, settings)
    roles.install(api_v1)
    static = static_folder(app)
    page.edit(static)
    guarded = with_headers(in_turn(application, settings.requests_at_once), policy_of(static))
    return forwarded(guarded) if settings.behind_proxy else guarded


def path_of(route: Any) -> str:
    return str(route.path)


def static_folder(app: Any) -> str:
    """Where upstream serves its page from: the copy that it made at this start."""
    return str(next(route.app.directory for route in app.router.routes if route.name == "static"))
