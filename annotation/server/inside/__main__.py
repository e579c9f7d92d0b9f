"""Runs inside the server's environment: `python -m inside serve|worker SETTINGS`."""

from __future__ import annotations

import sys
from pathlib import Path

from .settings import ServerSettings


def main(role: str, settings_file: str) -> None:
    settings = ServerSettings.read(Path(settings_file))
    if role == "serve":
        from .serve import serve
        serve(settings)
    elif role == "worker":
        from .worker import work
        work(settings)
    else:
        sys.exit(f"python -m inside serve|worker SETTINGS, got {role!r}")


main(*sys.argv[1:])
