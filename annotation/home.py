"""The folder of an annotation team: the server's data and secrets, and for each project its tasks and verdicts.

    HOME/ (0700)
      connection.json     where the server is and the key of its owner (0600); written by `annotation serve`
      server/             what the embedded server keeps: database, secrets, log
      projects/NAME/
        project.json      settings, and every version of the guidelines
        tasks.jsonl       the tasks, with what annotators must not see
        verdicts.jsonl    what they said, append-only
        pulled.json       how far `annotation pull` has come
        agreement.html    the last `annotation agreement`
"""

from __future__ import annotations

import json
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from rlhf.errors import BackendError, ConfigError
from rlhf.whole_files import replace_file

PROJECT_FILE, TASKS_FILE, VERDICTS_FILE, PULLED_FILE = "project.json", "tasks.jsonl", "verdicts.jsonl", "pulled.json"


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A running Argilla server."""

    url: str
    """http://127.0.0.1:6900, without a path."""
    api_key: str
    """Of an owner: data sets are made and everybody's responses are read with it."""
    workspace: str
    embedded: bool
    """Started by `annotation serve` from this home; False: somebody else runs it."""
    certificate: str | None = None
    """PEM file with the one TLS certificate that is accepted; None: what the system's authorities vouch for."""

    def verify(self) -> ssl.SSLContext | bool:
        """What an HTTP client takes as `verify`. A certificate that is pinned need not name the address that is connected to."""
        if self.certificate is None:
            return True
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN    # the certificate itself is enough, without its issuers
        return context

    def __repr__(self) -> str:
        return f"Connection(url={self.url!r}, workspace={self.workspace!r}, embedded={self.embedded})"    # keys do not get into logs


@dataclass(frozen=True)
class Home:
    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "server"

    def ensure(self) -> None:
        """Make the folder, readable by its owner alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def project(self, name: str) -> Path:
        """Folder of a project, whether it exists or not."""
        if not name or not all(character.isalnum() or character in "-_." for character in name) or name.startswith("."):
            raise ConfigError(f"a project is named with letters, digits, - and _, got {name!r}")
        return self.folder / "projects" / name

    def projects(self) -> list[str]:
        return sorted(path.parent.name for path in (self.folder / "projects").glob(f"*/{PROJECT_FILE}"))

    def connect_to(self, connection: Connection) -> None:
        """Remember where the server is."""
        self.ensure()
        path = self.folder / "connection.json"
        replace_file(path, json.dumps(asdict(connection), indent=2))
        path.chmod(0o600)

    def connection(self) -> Connection:
        """Raises BackendError where none was ever made."""
        path, serve = self.folder / "connection.json", f"annotation serve --home {quote(str(self.folder))}"
        if not path.is_file():
            raise BackendError(f"{self.folder} knows no annotation server. Start one with `{serve}`, or name one that runs with "
                               "`annotation serve --backend-url URL`.")
        try:
            connection = Connection(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise BackendError(f"{path} does not say where the server is: {error}. `{serve}` writes it anew.") from error
        if not all(isinstance(value, str) for value in (connection.url, connection.api_key, connection.workspace)):
            raise BackendError(f"{path} does not say where the server is: url, api_key and workspace must be texts. "
                               f"`{serve}` writes it anew.")
        return connection
