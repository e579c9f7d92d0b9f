"""Secrets where somebody could look for them: answers to admins, the log, files, the process's surroundings."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import httpx
import pytest
from server_under_test import ServerUnderTest

from annotation.home import Connection, Home
from annotation.server.backup import backup
from annotation.server.reachable import ask, client_of
from annotation.server.users import administration

INSIDE = Path(__file__).resolve().parents[2] / "annotation/server"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.connect_to(Connection(url="http://127.0.0.1:1", api_key="key", workspace="preferences", embedded=False))
    return home


def test_an_admin_sees_nobody_elses_key(argilla_server: ServerUnderTest) -> None:
    with administration(argilla_server.connection) as users:
        (admin,) = users.add(["keys-admin"], role="admin")
        (colleague,) = users.add(["keys-colleague"])
    headers = {"X-Argilla-Api-Key": admin.api_key}
    with httpx.Client(base_url=f"{argilla_server.connection.url}/api/v1", headers=headers, timeout=30) as client:
        workspace = ask(client, "GET", "/me/workspaces")["items"][0]["id"]
        shown = {user["username"]: user for user in ask(client, "GET", f"/workspaces/{workspace}/users")["items"]}
        assert shown["keys-admin"]["api_key"] == admin.api_key
        assert shown["keys-colleague"]["api_key"] == ""
        path = f"/workspaces/{workspace}/users/{shown['keys-colleague']['id']}"
        assert ask(client, "DELETE", path)["api_key"] == ""
    with client_of(argilla_server.connection) as owner:    # the key itself is as it was
        listed = {user["username"]: user["api_key"] for user in ask(owner, "GET", "/users")["items"]}
    assert listed["keys-colleague"] == colleague.api_key


def test_a_password_that_is_refused_is_not_in_the_log(argilla_server: ServerUnderTest) -> None:
    user = {"username": "log-user", "first_name": "log", "role": "annotator", "password": "sh0rt!"}
    with client_of(argilla_server.connection) as owner:
        assert owner.post("/users", json=user).status_code == 422
        assert owner.post("/token", data={"username": "n" * 300, "password": "sh0rt!" + "x" * 1000}).status_code == 422
    log = (argilla_server.home.server / "server.log").read_text(encoding="utf-8")
    assert "refused a request: body.password (string_too_short)" in log
    assert "sh0rt!" not in log


def test_a_time_beyond_the_calendar_is_refused(argilla_server: ServerUnderTest) -> None:
    with client_of(argilla_server.connection) as owner:
        workspace = next(known["id"] for known in ask(owner, "GET", "/me/workspaces")["items"])
        dataset = ask(owner, "POST", "/datasets", json={"name": "calendar", "workspace_id": workspace})["id"]
        answer = owner.get(f"/datasets/{dataset}/responses", params={"after": "0001-01-01T00:00:00+14:00"})
    assert answer.status_code == 422
    assert "no equal in UTC" in answer.text


def test_every_file_of_a_served_home_is_its_owners_alone(argilla_server: ServerUnderTest) -> None:
    folder = argilla_server.home.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    telling = [folder / "connection.json", *(path for path in (folder / "server").iterdir() if path.name not in (".lock", "tmp-serve"))]
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in telling if path.stat().st_mode & 0o077} == {}


def test_a_file_that_waits_for_a_backup_does_not_receive_it(home: Home, tmp_path: Path) -> None:
    """Somebody who may write to the folder has put it there, to read the secrets through it."""
    waiting = tmp_path / "b.zip.partial"
    waiting.touch()
    with waiting.open("rb") as reader:
        backup(home, tmp_path / "b.zip", without_database=True, console=None)
        assert reader.read() == b""
    assert stat.S_IMODE((tmp_path / "b.zip").stat().st_mode) == 0o600


def test_a_link_that_waits_for_a_backup_is_not_followed(home: Home, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept", encoding="utf-8")
    (tmp_path / "b.zip.partial").symlink_to(tmp_path / "victim")
    backup(home, tmp_path / "b.zip", without_database=True, console=None)
    assert (tmp_path / "victim").read_text(encoding="utf-8") == "kept"


def test_variables_of_the_caller_do_not_reach_the_server_in_any_case(server_python: Path, tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "host": "127.0.0.1", "port": 1, "secret_key": "k", "owner_name": "owner", "owner_password": "p",
                "owner_api_key": "a", "workspace": "w"}
    script = ("import json, sys; sys.path.insert(0, sys.argv[1]); from inside.settings import ServerSettings; "
              "from inside.surroundings import prepare_process; prepare_process(ServerSettings(**json.loads(sys.argv[2])), 'serve'); "
              "from argilla_server.settings import settings; print(json.dumps([settings.cors_origins, settings.home_path]))")
    told = subprocess.run([server_python, "-E", "-s", "-c", script, INSIDE, json.dumps(settings)], capture_output=True, text=True,
                          check=True, env={**os.environ, "argilla_cors_origins": '["*"]', "Argilla_Home_Path": "/nowhere"})
    assert json.loads(told.stdout) == [[], str(tmp_path)]
