"""A disk that fills up under the server: it says so with 5xx, damages nothing, and goes on once there is room again."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from kill_server import answer, make_sheet, rows, stored

from annotation.home import Home
from annotation.server.embedded import ServerOptions, running
from annotation.server.reachable import ask, client_of


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system in memory of that size. Skips the test where this user may not mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, text=True,
                             check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> Path:
    """Take every byte that is left."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing_that_was_acknowledged(server_python: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 40) as disk, running(Home(disk / "home"), server_python, ServerOptions(), None) as server:
        with client_of(server.connection) as client:
            sheet = make_sheet(client, server.connection.workspace, "full")
            pushed = ask(client, "POST", f"/datasets/{sheet}/records/bulk", json={"items": rows(0, 60)})["items"]
            records = [record["id"] for record in pushed]
            acknowledged = {record for record in records[:10] if submit(client, record).is_success}
            assert len(acknowledged) == 10

            filler = fill(disk)
            full = [submit(client, record) for record in records[10:40]]
            acknowledged |= {record for record, got in zip(records[10:40], full, strict=True) if got.is_success}
            assert {got.status_code // 100 for got in full} <= {2, 5}
            assert full[-1].status_code >= 500
            assert client.get("/me").status_code == 200    # reading goes on

            filler.unlink()
            after = [submit(client, record) for record in records[40:]]
            assert {got.status_code for got in after} == {201}
            acknowledged |= set(records[40:])
            assert acknowledged <= {record for record, _person in stored(client, sheet)[0]}
        with closing(sqlite3.connect(disk / "home/server/argilla.db")) as tables:
            assert tables.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def submit(client: httpx.Client, record: str) -> httpx.Response:
    return client.post(f"/records/{record}/responses", json=answer((1, 2)))
