"""Backup and restore of a home: one file, made while the server runs, checked whole before anything is put back.

The file is a zip with every file of the home and, last, `manifest.json` with their hashes; its comment is the hash of all that stands
before it. Verdict logs are taken before the database whose responses they repeat, lists of tasks after it: a restored home is one that the
running system could have been in, and the next `pull` fetches what a log lacks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from annotation.home import VERDICTS_FILE, Home
from annotation.server.embedded import only_server_of
from rlhf.errors import BackendError, ConfigError, DataError, StorageError
from rlhf.progress import Bar, progress
from rlhf.whole_files import sync_to_disk

FORMAT = "prefloop-backup/1"
MANIFEST = "manifest.json"
DATABASE = "server/argilla.db"
LEFT_OUT = ("server/tmp-*/*", "server/*.log", "server/*.log.1", "server/.lock", "server/settings.json", f"{DATABASE}*", "*.partial")
"""Made anew at each start, of no use elsewhere, or taken another way."""
CHUNK = 1 << 20
LARGEST_MANIFEST = 1 << 26
"""Bytes: some hundred thousand files. What is compressed into a few kilobytes may claim to be gigabytes."""
SEAL = 64
"""Length of the comment at the end: the SHA-256 of all bytes before it, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """What a backup holds."""

    files: int
    bytes: int
    database: str
    """`sqlite`, or where the responses are instead."""
    made_at: str


def where_responses_are(home: Home) -> str:
    """`sqlite` for the embedded database; else the kind of place that has a backup of its own."""
    if not home.connection().embedded:
        return f"the Argilla server at {home.connection().url}"
    settings = home.server / "settings.json"
    if settings.is_file() and (url := json.loads(settings.read_text(encoding="utf-8"))["database_url"]) is not None:
        return "PostgreSQL" if str(url).startswith("postgresql") else "another database"
    return "sqlite"


def backup(home: Home, target: Path, *, without_database: bool, console: Console | None) -> Archived:
    """Write the home into one file, whole or not at all, readable by its owner alone. The server may be running.

    Raises ConfigError where the target exists or the responses are elsewhere, StorageError where it cannot be written.
    """
    place = where_responses_are(home)
    if place != "sqlite" and not without_database:
        raise ConfigError(f"the responses are in {place}, which has a backup of its own (for PostgreSQL: pg_dump --format=custom). Make "
                          "that one, and this one with --without-database for the secrets, projects and verdicts in the home.")
    if target.exists():
        raise ConfigError(f"{target} exists; a backup never overwrites one. Name another file.")
    partial = target.with_name(target.name + ".partial")
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        partial.unlink(missing_ok=True)    # of a backup that was killed; what somebody else has put there must not receive the secrets
        with TemporaryDirectory(dir=target.absolute().parent, prefix=".backup-") as folder:
            with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    hashes = fill(archive, home, Path(folder), with_database=place == "sqlite", console=console)
                    manifest = {"format": FORMAT, "made_at": made_at, "database": place, "sha256": hashes}
                    archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
                    archive.comment = bytes(SEAL)
                size = file.seek(-SEAL, os.SEEK_END) + SEAL
                file.write(seal_of(partial).encode())
            sync_to_disk(partial)
            partial.replace(target)
            sync_to_disk(target.absolute().parent)
    except OSError as error:
        raise StorageError(f"{target} could not be written: {error.strerror or error}. There is no half backup; free some space, or name a "
                           "file on another disk.") from error
    finally:
        partial.unlink(missing_ok=True)
    return Archived(files=len(hashes), bytes=size, database=place, made_at=made_at)


def fill(archive: zipfile.ZipFile, home: Home, scratch: Path, *, with_database: bool, console: Console | None) -> dict[str, str]:
    """Add every file and return their hashes by name."""
    names = sorted(names_of(home.folder), key=lambda name: not name.endswith(VERDICTS_FILE))
    logs = sum(name.endswith(VERDICTS_FILE) for name in names)
    sizes = {name: (home.folder / name).stat().st_size for name in names}
    database = home.folder / DATABASE
    total = sum(sizes.values()) + (2 * database.stat().st_size if with_database else 0)
    hashes: dict[str, str] = {}
    with progress(console, "back up, MB", max(1, total // CHUNK)) as bar:
        for name in names[:logs]:
            hashes[name] = add(archive, name, home.folder / name, bar)
        if with_database:
            snapshot(database, scratch / "argilla.db")
            bar.advance(database.stat().st_size // CHUNK)
            hashes[DATABASE] = add(archive, DATABASE, scratch / "argilla.db", bar)
        for name in names[logs:]:
            hashes[name] = add(archive, name, home.folder / name, bar)
    return hashes


def names_of(folder: Path) -> Iterator[str]:
    """Files of a home that belong into a backup, relative, with forward slashes."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(fnmatchcase(name, pattern) for pattern in LEFT_OUT):
            yield name


def seal_of(path: Path) -> str:
    """Hash of a backup without its last bytes, where the hash stands."""
    digest, left = hashlib.sha256(), path.stat().st_size - SEAL
    for piece in pieces_of(path):
        digest.update(piece[:max(left, 0)])
        left -= len(piece)
    return digest.hexdigest()


def snapshot(database: Path, target: Path) -> None:
    """A consistent copy of a SQLite database that others write to, checked.

    Raises DataError where the database is damaged, OSError where the copy has no room.
    """
    try:
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")    # one file, without a write-ahead log beside it
            found = copy.execute("PRAGMA quick_check").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname == "SQLITE_FULL":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        found = str(error)
    if found != "ok":
        raise DataError(f"{database} is damaged: {found}. Nothing was written; restore the last good backup.")


def add(archive: zipfile.ZipFile, name: str, path: Path, bar: Bar) -> str:
    """One file into the archive; its hash. A log that grows meanwhile is taken up to its last whole line."""
    whole = path.read_bytes() if name.endswith(".jsonl") else None
    digest = hashlib.sha256()
    with archive.open(name, "w", force_zip64=True) as entry:
        pieces = [whole[:whole.rfind(b"\n") + 1]] if whole is not None else pieces_of(path)
        for piece in pieces:
            digest.update(piece)
            entry.write(piece)
            bar.advance(len(piece) // CHUNK)
    return digest.hexdigest()


def pieces_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


def restore(home: Home, source: Path, *, force: bool, console: Console | None) -> tuple[Archived, Path | None]:
    """Put a backup in the place of a home. What was there is moved aside and its new place returned.

    Raises DataError for a file that is no whole backup, ConfigError for a home that is not empty, BackendError for one that is being
    served. Until everything is unpacked and its hashes are right, nothing of the home is touched.
    """
    folder = home.folder.absolute()
    occupied = folder.is_dir() and any(folder.iterdir())
    if occupied and not force:
        raise ConfigError(f"{folder} is not empty. With --force it is moved aside, not deleted; or name another home.")
    staging = folder.with_name(folder.name + ".restoring")
    if staging.exists():
        shutil.rmtree(staging)    # of a restore that was interrupted
    with not_served(home):
        archived = unpack(source, staging, console)
        aside = None
        if occupied:
            aside = folder.with_name(f"{folder.name}.before-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
            folder.rename(aside)
        elif folder.is_dir():
            folder.rmdir()
        staging.rename(folder)
    return archived, aside


@contextmanager
def not_served(home: Home) -> Iterator[None]:
    """Hold the home's lock, so that no server starts meanwhile. Raises BackendError where one runs."""
    if home.server.is_dir():
        with only_server_of(home):
            yield
    else:
        yield


def unpack(source: Path, folder: Path, console: Console | None) -> Archived:
    """Into a new folder, every file checked against the manifest. Raises DataError, and leaves no folder behind, where one is not right."""
    if not source.is_file():
        raise ConfigError(f"{source} is not a file")
    with source.open("rb") as file:
        file.seek(max(0, source.stat().st_size - SEAL))
        if file.read() != seal_of(source).encode():
            raise DataError(f"{source} is not a whole backup: it was cut, changed, or is something else. Nothing was restored.")
    try:
        with zipfile.ZipFile(source) as archive:
            manifest = manifest_of(archive)
            require_room(folder.parent, sum(entry.file_size for entry in archive.infolist()))
            folder.mkdir(mode=0o700)
            unpack_files(archive, manifest["sha256"], folder, console)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError, OSError, DataError) as error:
        if folder.is_dir():
            shutil.rmtree(folder)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StorageError(f"{folder.parent} has no room for what is in {source}. Nothing was changed; free some space.") from error
        raise DataError(f"{source} cannot be restored: {error}. Nothing was changed.") from error
    return Archived(files=len(manifest["sha256"]), bytes=source.stat().st_size, database=manifest["database"], made_at=manifest["made_at"])


def manifest_of(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Raises DataError where it is not one of ours, KeyError or ValueError where it is none at all."""
    if (size := archive.getinfo(MANIFEST).file_size) > LARGEST_MANIFEST:
        raise DataError(f"its {MANIFEST} has {size:,} bytes, more than {LARGEST_MANIFEST:,}")
    manifest = json.loads(archive.read(MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"its {MANIFEST} does not say that the format is {FORMAT}, which this version reads")
    hashes = manifest.get("sha256")
    if not isinstance(hashes, dict) or not all(isinstance(manifest.get(key), str) for key in ("made_at", "database")):
        raise DataError(f"its {MANIFEST} lacks made_at, database or sha256")
    return manifest


def unpack_files(archive: zipfile.ZipFile, hashes: dict[str, str], folder: Path, console: Console | None) -> None:
    with progress(console, "restore, MB", max(1, sum(archive.getinfo(name).file_size for name in hashes) // CHUNK)) as bar:
        for name, expected in hashes.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise DataError(f"{name!r} would lie outside of the home")
            path = folder / name
            for parent in reversed(PurePosixPath(name).parents):    # one by one: mkdir's parents have the permissions of the shell
                (folder / parent).mkdir(mode=0o700, exist_ok=True)
            digest = hashlib.sha256()
            with archive.open(name) as entry, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                while piece := entry.read(CHUNK):
                    digest.update(piece)
                    file.write(piece)
                    bar.advance(len(piece) // CHUNK)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != expected:
                raise DataError(f"{name} has another hash than when it was backed up")


def require_room(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise BackendError(f"the restored home takes {needed / 1e6:.0f} MB, {folder} has {free / 1e6:.0f} MB free")
