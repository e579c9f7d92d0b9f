"""Runs inside the server's environment: what the browser is told with every answer, and who asks when a proxy stands in front."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from .safety_intake import API, Application

POLICY = (
    "default-src 'none'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; manifest-src 'self'; object-src 'none'; base-uri 'self'; frame-src 'none'; frame-ancestors 'none'; "
    "form-action 'none'")
"""Scripts: the shipped files, and the inline ones of the shipped pages by hash. The page renders a text field with HTML in it inside a
frame of its own origin, which inherits this policy: no script of a record runs there, and nothing is fetched from or sent to anybody else.
Inline styles are what the page's components need; without a way to fetch they can disfigure, but not tell.
"""
INLINE_SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)[^>]*>(.+?)</script>", re.DOTALL)
ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)
TRANSPORT = (b"strict-transport-security", b"max-age=31536000")
NOT_STORED = (b"cache-control", b"no-store")
TELLING = {b"server", b"server-timing"}
"""What upstream says about itself to everybody: versions, and how long a sign-in took."""


def policy_of(static_folder: str) -> bytes:
    """The content security policy for the pages of a folder, which allows exactly the inline scripts that they have."""
    scripts = {script for page in Path(static_folder).rglob("*.html") for script in INLINE_SCRIPT.findall(page.read_text(encoding="utf-8"))}
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return POLICY.format(hashes=" ".join(sorted(f"'sha256-{digest}'" for digest in digests))).encode()


def with_headers(app: Application, policy: bytes) -> Application:
    async def answering(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        added = [*ALWAYS, (b"content-security-policy", policy)]
        if scope["scheme"] == "https":
            added.append(TRANSPORT)
        if scope["path"].startswith(API):
            added.append(NOT_STORED)
        replaced = TELLING | {name for name, _ in added}

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message.get("headers", []) if name.lower() not in replaced]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        await app(scope, receive, send_with_headers)

    return answering


def forwarded(app: Application) -> Application:
    """Believe the proxy about whom it speaks for. Of X-Forwarded-For only the last entry is the proxy's own word; those before it are the
    client's, who can write there what they like.
    """
    async def speaking_for(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            hops = [hop.strip() for hop in header(scope, b"x-forwarded-for").split(",") if hop.strip()]
            if hops:
                scope = {**scope, "client": (hops[-1], 0)}
            if header(scope, b"x-forwarded-proto").split(",")[-1].strip() == "https":
                scope = {**scope, "scheme": "https"}
        await app(scope, receive, send)

    return speaking_for


def header(scope: Any, name: bytes) -> str:
    """Its value; of several headers of one name the values with commas between them, which means the same."""
    return ",".join(value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name)
