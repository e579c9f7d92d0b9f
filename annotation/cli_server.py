"""Commands of `annotation`: serve, users, backup and restore."""

from __future__ import annotations

import typer


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
