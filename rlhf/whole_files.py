"""Text files that a reader finds with the old content or the new one, whole, whatever happens in between. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf.errors import StorageError


def sync_to_disk(path: Path) -> None:
    """Return once the content of a file, or the entries of a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Write a file under another name, bring it to the disk, rename it into place. Raises StorageError and leaves nothing half written."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync_to_disk(partial)
        partial.replace(path)
        sync_to_disk(path.parent)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        kept = "what was there before is intact" if path.exists() else "nothing was left behind"
        raise StorageError(f"{path} could not be written ({error.strerror}); {kept}. Free some space or make the folder writable, then run "
                           "the same command again.") from error
