"""Runs inside the server's environment: what upstream reads from the process it lives in. Set before argilla_server is imported."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .settings import ServerSettings

SEARCH_ENGINE = "sql"
"""Under which name our search engine is registered with upstream."""
SQLITE_PRAGMAS = (
    "journal_mode=WAL",      # readers and the writer do not wait for each other
    "synchronous=FULL",      # what was acknowledged survives a power cut, not only a kill
    "cache_size=-16384",     # KiB for each of up to 64 connections
    "temp_store=MEMORY",
)


def prepare_process(settings: ServerSettings, role: str) -> None:
    """Environment, folders and permissions of this process. Whatever ARGILLA_* the caller had set is dropped: the settings file rules."""
    os.umask(0o077)
    for name in [name for name in os.environ if name.upper().startswith("ARGILLA_")]:    # upstream reads them in any case
        del os.environ[name]
    os.environ.update(upstream_variables(settings))
    folder = Path(settings.folder)
    temporary = folder / f"tmp-{role}"    # upstream copies its page into a new temporary folder at every start and leaves it there
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    os.chdir(folder)              # upstream reads .oauth.yaml from the current folder


def upstream_variables(settings: ServerSettings) -> dict[str, str]:
    variables = {
        "HF_HUB_DISABLE_TELEMETRY": "1",                    # upstream reports every API call by default
        "ARGILLA_ENABLE_TELEMETRY": "false",
        "ARGILLA_HOME_PATH": settings.folder,
        "ARGILLA_AUTH_SECRET_KEY": settings.secret_key,     # random at each start by default: everybody is signed out
        "ARGILLA_CORS_ORIGINS": "[]",                       # "*" with credentials by default
        "ARGILLA_DATABASE_SQLITE_TIMEOUT": "30",
        "ARGILLA_SHOW_HUGGINGFACE_SPACE_PERSISTENT_STORAGE_WARNING": "false",
        "ARGILLA_MAX_MESSAGE_LENGTH": "1000000",            # 20,000 characters of a chat message by default, counted after escaping
        "ARGILLA_SEARCH_ENGINE": SEARCH_ENGINE,
    }
    if settings.database_url:
        variables["ARGILLA_DATABASE_URL"] = settings.database_url
    if settings.elasticsearch_url:
        variables |= {"ARGILLA_SEARCH_ENGINE": "elasticsearch", "ARGILLA_ELASTICSEARCH": settings.elasticsearch_url}
    elif settings.opensearch_url:
        variables |= {"ARGILLA_SEARCH_ENGINE": "opensearch", "ARGILLA_ELASTICSEARCH": settings.opensearch_url}
    if settings.redis_url:
        variables["ARGILLA_REDIS_URL"] = settings.redis_url
    return variables


def prepare_sqlite(pool: int) -> None:
    """Connections that suffice, each with our pragmas. Upstream leaves SQLite at 5 + 10: requests that want two or three wait for each
    other for ever. Its engine is made when argilla_server.database is imported, so this comes before.
    """
    from argilla_server.settings import Settings, settings
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    upstream = Settings.database_engine_args.fget
    quiet = {"hide_parameters": True}    # of a statement that fails: a key, or a password's hash, would be in the log
    sizes = {"pool_size": pool, "max_overflow": pool} if settings.database_is_sqlite else {}
    Settings.database_engine_args = property(lambda self: {**upstream(self), **quiet, **sizes})
    if not settings.database_is_sqlite:
        return

    def set_pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in SQLITE_PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(Engine, "connect", set_pragmas)


def migrate() -> None:
    """Bring the tables up to upstream's version. Its own command line would do, but fails with the click that a fresh install takes."""
    import alembic.config
    from argilla_server.database import ALEMBIC_CONFIG_FILE

    alembic.config.main(argv=["-c", ALEMBIC_CONFIG_FILE, "upgrade", "head"])
