"""Files that only grow: one JSON object a line, on the disk before anything else happens. Standard library only.

A process that is killed while it appends leaves a last line without its end. Whoever reads leaves that line out: nothing was done on the
strength of it yet. Whoever appends next cuts it off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import DataError, StorageError
from rlhf.whole_files import sync_to_disk


class Entry(NamedTuple):
    number: int
    """Of the line, from 1."""
    values: dict[str, Any]


def read_entries(path: Path) -> Iterator[Entry]:
    """Every whole line, in the order in which they were written; none where there is no file. Lines end at b"\\n" and nowhere else.

    Raises DataError for a whole line that is not a JSON object: no process of ours leaves one behind.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number} is not JSON ({error}). The file was changed by hand or the disk is faulty: restore it "
                                "from a backup (`annotation restore`), or delete that line if it can be spared.") from error
            if not isinstance(values, dict):
                raise DataError(f"{path}:{number} is not a JSON object but a {type(values).__name__}")
            yield Entry(number, values)


def append_entries(path: Path, entries: Iterable[Mapping[str, Any]]) -> int:
    """Add lines and return once they survive a power cut; returns the bytes of a torn last line that were cut off before.

    Raises StorageError where the disk is full, and leaves the file as it was then.
    """
    text = "".join(json.dumps(entry, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n" for entry in entries)
    try:
        with path.open("ab") as file:
            size = file.tell()
            whole = _end_of_whole_lines(path, size)
            file.truncate(whole)
            try:
                file.write(text.encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(whole)
                raise
        if not whole:       # the first lines: whoever locks the file has perhaps made it just now, and its name is not on the disk yet
            sync_to_disk(path.parent)
    except OSError as error:
        raise StorageError(f"{path} could not be added to ({error.strerror}); what it held before is intact. Free some space or make the "
                           "folder writable, then run the same command again.") from error
    return size - whole


def _end_of_whole_lines(path: Path, size: int) -> int:
    """Where the last whole line ends, looking back from the end of the file."""
    end = size
    with path.open("rb") as file:
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a folder for one process that writes; the system lets go of it when the process ends, however it ends.

    Raises StorageError where another process holds it.
    """
    with (folder / ".lock").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"another process is writing into {folder}. Wait for it, then run the same command again; nothing was "
                               "changed.") from None
        yield
