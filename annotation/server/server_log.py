"""The log of the embedded server: what it prints, kept in a file of limited size, with the last lines at hand for messages."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import IO

LARGEST = 8_000_000
"""Bytes of a log file; one older file is kept beside it."""
LAST_LINES = 25


class ServerLog:
    """Copies a stream into PATH line by line, on a thread of its own.

    A full disk costs lines, which are counted; the server never has to wait for somebody to read what it prints.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.stream = path, stream
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self.lost = 0
        self.thread = threading.Thread(target=self._copy, daemon=True)
        self.thread.start()

    def tail(self) -> str:
        """The last lines; all that were printed once the stream has ended."""
        self.thread.join(timeout=2)
        return "\n".join(self.last)

    def _copy(self) -> None:
        for line in self.stream:
            self.last.append(line.decode("utf-8", "replace").rstrip())
            try:
                self._append(f"({self.lost} lines were lost: the disk was full)\n".encode() + line if self.lost else line)
                self.lost = 0
            except OSError:
                self.lost += 1

    def _append(self, line: bytes) -> None:
        if self.path.exists() and self.path.stat().st_size > LARGEST:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(line)
