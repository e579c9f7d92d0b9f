"""Backups of a running server, and restores: whole or not at all, checked first, nothing overwritten."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import stat
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kill_server import answer, make_sheet, rows, stored
from server_under_test import ServerUnderTest

from annotation.cli import main
from annotation.home import Connection, Home
from annotation.server.backup import FORMAT, MANIFEST, backup, restore
from annotation.server.embedded import ServerOptions, running
from annotation.server.reachable import ask, client_of
from rlhf.errors import BackendError, ConfigError, DataError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home that no server runs on: a small database, secrets, a project with a log."""
    home = Home(tmp_path / "home")
    home.connect_to(Connection(url="http://127.0.0.1:1", api_key="key", workspace="preferences", embedded=True))
    home.server.mkdir()
    with closing(sqlite3.connect(home.server / "argilla.db")) as tables:
        tables.execute("PRAGMA journal_mode=WAL")
        tables.execute("CREATE TABLE clicks (id INTEGER PRIMARY KEY, text TEXT)")
        tables.executemany("INSERT INTO clicks (text) VALUES (?)", [(f"click {index}",) for index in range(500)])
        tables.commit()
    (home.server / "secrets.json").write_text("{}", encoding="utf-8")
    project = home.project("week-48")
    project.mkdir(parents=True)
    (project / "project.json").write_text('{"name": "week-48"}', encoding="utf-8")
    (project / "verdicts.jsonl").write_text('{"rank": 1}\n{"rank": 2}\n', encoding="utf-8")
    return home


def everything(folder: Path) -> dict[str, str]:
    """Hash of every file by its name."""
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


def clicks(home: Home) -> int:
    with closing(sqlite3.connect(home.server / "argilla.db")) as tables:
        return int(tables.execute("SELECT count(*) FROM clicks").fetchone()[0])


def test_what_was_acknowledged_before_a_backup_of_a_busy_server_is_in_it(argilla_server: ServerUnderTest, server_python: Path,
                                                                         tmp_path: Path) -> None:
    connection, person = argilla_server.connection, argilla_server.add_annotator("backup-anna")
    with client_of(connection) as client:
        sheet = make_sheet(client, connection.workspace, "backup-busy")
        records = [record["id"] for record in ask(client, "POST", f"/datasets/{sheet}/records/bulk", json={"items": rows(0, 40)})["items"]]
    acknowledged: list[str] = []

    def annotate() -> None:
        with client_of(replace(connection, api_key=person.api_key)) as client:
            for record in records:
                client.post(f"/records/{record}/responses", json=answer((2, 1))).raise_for_status()
                acknowledged.append(record)

    annotator = threading.Thread(target=annotate)
    annotator.start()
    while len(acknowledged) < 10:
        annotator.join(timeout=0.01)
    before = set(acknowledged)
    assert main(["backup", str(tmp_path / "busy.zip"), "--home", str(argilla_server.home.folder)]) == 0
    annotator.join()
    assert len(acknowledged) == len(records)    # nobody was held up

    copy = Home(tmp_path / "copy")
    assert main(["restore", str(tmp_path / "busy.zip"), "--home", str(copy.folder)]) == 0
    with running(copy, server_python, ServerOptions(), None) as server, client_of(server.connection) as client:
        assert server.connection.api_key == connection.api_key
        there = {record for record, _person in stored(client, sheet)[0]}
        assert before <= there
        found = ask(client, "POST", f"/datasets/{sheet}/records/search?limit=1", json={"query": {"text": {"q": "zebra"}}})["total"]
        assert found == len(records)


def test_a_restored_home_is_the_home(home: Home, tmp_path: Path) -> None:
    made = backup(home, tmp_path / "b.zip", without_database=False, console=None)
    assert stat.S_IMODE((tmp_path / "b.zip").stat().st_mode) == 0o600
    back = Home(tmp_path / "back")
    restored, aside = restore(back, tmp_path / "b.zip", force=False, console=None)
    assert restored.files == made.files == 5
    assert aside is None
    assert clicks(back) == 500
    kept = {name: digest for name, digest in everything(home.folder).items() if "argilla.db" not in name}
    assert {name: digest for name, digest in everything(back.folder).items() if "argilla.db" not in name} == kept
    assert {stat.S_IMODE(path.stat().st_mode) for path in back.folder.rglob("*")} == {0o600, 0o700}


def test_no_line_is_torn_of_a_log_that_is_being_written(home: Home, tmp_path: Path) -> None:
    log = home.project("week-48") / "verdicts.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"rank": ')
    backup(home, tmp_path / "b.zip", without_database=False, console=None)
    restore(Home(tmp_path / "back"), tmp_path / "b.zip", force=False, console=None)
    assert (tmp_path / "back/projects/week-48/verdicts.jsonl").read_bytes() == whole


def test_nothing_is_overwritten(home: Home, tmp_path: Path) -> None:
    backup(home, tmp_path / "b.zip", without_database=False, console=None)
    first = (tmp_path / "b.zip").read_bytes()
    with pytest.raises(ConfigError, match="never overwrites"):
        backup(home, tmp_path / "b.zip", without_database=False, console=None)
    assert (tmp_path / "b.zip").read_bytes() == first

    (home.server / "new").write_text("since then", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty"):
        restore(home, tmp_path / "b.zip", force=False, console=None)
    before = everything(home.folder)
    _restored, aside = restore(home, tmp_path / "b.zip", force=True, console=None)
    assert aside is not None
    assert {name: digest for name, digest in everything(aside).items() if name != "server/.lock"} == before
    assert not (home.server / "new").exists()


def test_a_home_that_is_served_is_not_replaced(argilla_server: ServerUnderTest, home: Home, tmp_path: Path) -> None:
    backup(home, tmp_path / "b.zip", without_database=False, console=None)
    before = set(everything(argilla_server.home.folder / "server"))
    with pytest.raises(BackendError, match="is being served already"):
        restore(argilla_server.home, tmp_path / "b.zip", force=True, console=None)
    assert set(everything(argilla_server.home.folder / "server")) == before


@pytest.fixture(scope="module")
def small_backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    folder = tmp_path_factory.mktemp("backup")
    home = Home(folder / "home")
    home.connect_to(Connection(url="http://127.0.0.1:1", api_key="key", workspace="preferences", embedded=True))
    home.server.mkdir()
    with closing(sqlite3.connect(home.server / "argilla.db")) as tables:
        tables.execute("CREATE TABLE clicks (id INTEGER PRIMARY KEY)")
    backup(home, folder / "b.zip", without_database=False, console=None)
    yield (folder / "b.zip").read_bytes()


@settings(deadline=None, max_examples=150)
@given(damage=st.one_of(st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(1)),
                        st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(1, 255))))
def test_a_damaged_backup_is_refused(small_backup: bytes, tmp_path_factory: pytest.TempPathFactory,
                                     damage: tuple[str, float, int]) -> None:
    """Cut anywhere, or with any one byte changed; and nothing is left behind."""
    folder = tmp_path_factory.mktemp("damaged")
    kind, place, change = damage
    at = int(place * len(small_backup))
    bad = small_backup[:at] if kind == "cut" else small_backup[:at] + bytes([small_backup[at] ^ change]) + small_backup[at + 1:]
    (folder / "bad.zip").write_bytes(bad)
    with pytest.raises(DataError, match="is not a whole backup"):
        restore(Home(folder / "bad"), folder / "bad.zip", force=False, console=None)
    assert {path.name for path in folder.iterdir()} == {"bad.zip"}
    shutil.rmtree(folder)


X = hashlib.sha256(b"x").hexdigest()


def sealed(path: Path, files: dict[str, str], hashes: dict[str, str] | None) -> None:
    """A file that looks like a backup from the outside; None: with the manifest that is among the files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        if hashes is not None:
            archive.writestr(MANIFEST, json.dumps({"format": FORMAT, "made_at": "", "database": "sqlite", "sha256": hashes}))
        archive.comment = bytes(64)
    whole = path.read_bytes()[:-64]
    path.write_bytes(whole + hashlib.sha256(whole).hexdigest().encode())


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_file_cannot_leave_the_home(tmp_path: Path, name: str) -> None:
    sealed(tmp_path / "b.zip", {name: "x"}, {name: hashlib.sha256(b"x").hexdigest()})
    with pytest.raises(DataError, match="outside of the home"):
        restore(Home(tmp_path / "home"), tmp_path / "b.zip", force=False, console=None)
    assert {path.name for path in tmp_path.iterdir()} == {"b.zip"}


HEAD = f'"format": "{FORMAT}", "made_at": "", "database": "sqlite"'
SENSELESS = ["", "[]", "{}", '{"format": "other/1"}', "[" * 100_000, f'{{{HEAD}, "sha256": []}}', f'{{{HEAD}, "sha256": {{".": "x"}}}}',
             f'{{{HEAD}, "sha256": {{"a": "{X}", "a/b": "{X}"}}}}']


@pytest.mark.parametrize("manifest", SENSELESS)
def test_a_manifest_that_makes_no_sense_is_refused_and_leaves_nothing(tmp_path: Path, manifest: str) -> None:
    sealed(tmp_path / "b.zip", {".": "x", "a": "x", "a/b": "x", MANIFEST: manifest}, None)
    with pytest.raises(DataError, match="cannot be restored"):
        restore(Home(tmp_path / "home"), tmp_path / "b.zip", force=False, console=None)
    assert {path.name for path in tmp_path.iterdir()} == {"b.zip"}


def test_a_manifest_that_would_fill_the_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("annotation.server.backup.LARGEST_MANIFEST", 1000)
    sealed(tmp_path / "b.zip", {MANIFEST: " " * 1001}, None)
    with pytest.raises(DataError, match=r"has 1,001 bytes, more than 1,000"):
        restore(Home(tmp_path / "home"), tmp_path / "b.zip", force=False, console=None)


def test_a_file_that_is_not_the_one_of_the_manifest_is_refused(tmp_path: Path) -> None:
    sealed(tmp_path / "b.zip", {"server/secrets.json": "{}"}, {"server/secrets.json": hashlib.sha256(b"other").hexdigest()})
    with pytest.raises(DataError, match="another hash"):
        restore(Home(tmp_path / "home"), tmp_path / "b.zip", force=False, console=None)
    assert {path.name for path in tmp_path.iterdir()} == {"b.zip"}


def test_a_full_disk_leaves_no_half_backup(home: Home, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        assert main(["backup", str(disk / "b.zip"), "--home", str(home.folder)]) == 2
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
    assert clicks(home) == 500


def test_a_damaged_database_is_not_backed_up_as_if_it_were_whole(home: Home, tmp_path: Path) -> None:
    with (home.server / "argilla.db").open("r+b") as file:
        file.seek(4096 + 8)
        file.write(b"\xff" * 64)
    assert main(["backup", str(tmp_path / "b.zip"), "--home", str(home.folder)]) == 2
    assert not (tmp_path / "b.zip").exists()


def test_responses_that_are_elsewhere_are_not_said_to_be_saved(home: Home, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home.server / "settings.json").write_text(json.dumps({"database_url": "postgresql://db/argilla"}), encoding="utf-8")
    assert main(["backup", str(tmp_path / "b.zip"), "--home", str(home.folder)]) == 2
    assert "pg_dump" in capfd.readouterr().err
    assert main(["backup", str(tmp_path / "b.zip"), "--home", str(home.folder), "--without-database", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["database"] == "PostgreSQL"
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert not any("argilla.db" in name for name in archive.namelist())
        assert "projects/week-48/verdicts.jsonl" in archive.namelist()
