"""What the embedded server must not lose or tell: made once, random, in one file that only its owner can read."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

PASSWORD_BYTES, API_KEY_BYTES = 12, 48
"""Of randomness: 96 bits that a person may have to type, and as many as upstream's own keys have."""


def new_password() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)


def new_api_key() -> str:
    return secrets.token_urlsafe(API_KEY_BYTES)


@dataclass(frozen=True, kw_only=True)
class ServerSecrets:
    secret_key: str
    """Signs sessions."""
    owner_password: str
    owner_api_key: str

    def __repr__(self) -> str:
        return "ServerSecrets(...)"    # they do not get into logs


def load_or_make(path: Path) -> ServerSecrets:
    """The secrets of a server folder; on its first start they are made, written whole and brought to the disk before they are used."""
    if path.is_file():
        return ServerSecrets(**json.loads(path.read_text(encoding="utf-8")))
    made = ServerSecrets(secret_key=secrets.token_hex(32), owner_password=new_password(), owner_api_key=new_api_key())
    partial = path.with_name(path.name + ".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(made), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return made
