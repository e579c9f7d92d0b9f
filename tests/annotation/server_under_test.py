"""What a test knows of the real server that it talks to."""

from __future__ import annotations

from dataclasses import dataclass

from annotation.home import Connection, Home
from annotation.server.users import Credentials, administration


@dataclass(frozen=True)
class ServerUnderTest:
    """The server is shared by many tests: each uses names (users, data sets, projects) of its own."""

    connection: Connection
    home: Home
    pid: int

    def add_annotator(self, name: str) -> Credentials:
        """An annotator of the workspace: `.name`, `.password`, `.api_key`."""
        with administration(self.connection) as users:
            return users.add([name])[0]
