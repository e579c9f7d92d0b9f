"""What the starter tells the server, as one JSON file. Standard library only: both environments read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    folder: str
    """HOME/server: database, log, temporary files."""
    host: str
    port: int
    secret_key: str
    """Signs sessions; the same at every start, so that nobody is signed out."""
    owner_name: str
    owner_password: str
    owner_api_key: str
    workspace: str
    database_url: str | None = None
    """postgresql://...; None: SQLite in the folder."""
    redis_url: str | None = None
    """None: jobs run in the server's process."""
    elasticsearch_url: str | None = None
    opensearch_url: str | None = None
    """Neither: the search runs over the server's own tables."""
    tls_certificate: str | None = None
    tls_key: str | None = None
    behind_proxy: bool = False
    """A proxy that ends TLS stands in front: its X-Forwarded-* headers are believed, cookies are secure."""
    pool: int = 32
    """SQLite connections kept, and as many more at most: a request takes two or three."""
    requests_at_once: int = 8
    """API requests in progress; the others wait their turn, so that they cannot starve each other of connections."""
    lockout_after: int = 5
    """Failed sign-ins of one name, or from one address, before it has to wait."""
    lockout_seconds: float = 60.0
    """The first wait; each further failure doubles it, up to an hour."""

    def write(self, path: Path) -> None:
        """With the permissions of a secret, from the first byte on."""
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ServerSettings:
        return cls(**json.loads(path.read_text(encoding="utf-8")))
