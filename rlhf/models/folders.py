"""Folders that appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.errors import StorageError
from rlhf.whole_files import sync_to_disk


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside `folder` to write into; leaving the block without an error puts it in `folder`'s place.

    Whatever goes wrong, `folder` stays as it was and nothing is left beside it. A failed write is a StorageError. The files are
    flushed to the disk before the swap. A kill between its two renames leaves the old content as `.NAME.old`; the next call puts it back.
    """
    partial, old = (folder.with_name(f".{folder.name}.{ending}") for ending in ("partial", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        _remove(partial)
        partial.mkdir()
        yield partial
        _flush(partial)
        _remove(old)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        _remove(old)
    except Exception as error:
        _remove(partial)
        if old.exists() and not folder.exists():
            old.rename(folder)
        if not _is_failed_write(error):
            raise
        kept = "What was there before is intact" if folder.exists() else "Nothing was left behind"
        raise StorageError(f"{folder} could not be written ({error}). {kept}. Free some space or name another folder, then run again."
                           ) from error


def _is_failed_write(error: Exception) -> bool:
    """safetensors and tokenizers write through Rust and raise plain exceptions whose text ends in `(os error 28)`."""
    return isinstance(error, OSError) or "(os error " in str(error)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _flush(folder: Path) -> None:
    """Force every file of the folder to the disk: a rename may otherwise survive a power cut that its content does not."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync_to_disk(path)
