"""Accounts on the real server: who gets in, who no longer does, and what stays of those who are gone."""

from __future__ import annotations

import json

import httpx
import pytest
from kill_server import answer, make_sheet, rows, stored
from server_under_test import ServerUnderTest

from annotation.cli import main
from annotation.server.reachable import ask, client_of
from annotation.server.users import Credentials, administration
from rlhf.errors import ConfigError


def who(server: ServerUnderTest, key: str) -> str | int:
    """The name that a key belongs to, or how it is refused."""
    got = httpx.get(f"{server.connection.url}/api/v1/me", headers={"X-Argilla-Api-Key": key}, trust_env=False)
    return str(got.json()["username"]) if got.is_success else got.status_code


def sign_in(server: ServerUnderTest, name: str, password: str) -> httpx.Response:
    return httpx.post(f"{server.connection.url}/api/v1/token", data={"username": name, "password": password}, trust_env=False)


def who_is_signed_in(server: ServerUnderTest, token: str) -> int:
    return httpx.get(f"{server.connection.url}/api/v1/me", headers={"Authorization": f"Bearer {token}"}, trust_env=False).status_code


def test_what_is_given_out_opens_the_door_and_after_rotation_only_the_new_does(argilla_server: ServerUnderTest) -> None:
    old = argilla_server.add_annotator("users-rotated")
    assert who(argilla_server, old.api_key) == "users-rotated"
    session = sign_in(argilla_server, old.name, old.password).json()["access_token"]
    assert who_is_signed_in(argilla_server, session) == 200

    with administration(argilla_server.connection) as people:
        new = people.rotate("users-rotated")

    assert new.key_is_new
    assert who(argilla_server, old.api_key) == 401
    assert who(argilla_server, new.api_key) == "users-rotated"
    assert sign_in(argilla_server, old.name, old.password).status_code == 401
    assert sign_in(argilla_server, new.name, new.password).status_code == 201
    assert who_is_signed_in(argilla_server, session) == 401


def test_who_is_removed_is_out_but_the_responses_stay(argilla_server: ServerUnderTest) -> None:
    person, connection = argilla_server.add_annotator("users-removed"), argilla_server.connection
    with client_of(connection) as client, administration(connection) as people:
        sheet = make_sheet(client, connection.workspace, "users-removed")
        record = ask(client, "POST", f"/datasets/{sheet}/records/bulk", json={"items": rows(0, 1)})["items"][0]["id"]
        httpx.post(f"{connection.url}/api/v1/records/{record}/responses", json=answer((2, 1)),
                   headers={"X-Argilla-Api-Key": person.api_key}, trust_env=False).raise_for_status()
        session = sign_in(argilla_server, person.name, person.password).json()["access_token"]

        people.remove("users-removed")

        assert who(argilla_server, person.api_key) == 401
        assert sign_in(argilla_server, person.name, person.password).status_code == 401
        assert who_is_signed_in(argilla_server, session) == 401
        assert stored(client, sheet)[0][record, "users-removed"].ranks == (2, 1)
        assert [account.active for account in people.accounts() if account.name == "users-removed"] == [False]

        back = people.add(["users-removed"])[0]    # whoever comes back has the same responses
        assert who(argilla_server, back.api_key) == "users-removed"
        assert [account.active for account in people.accounts() if account.name == "users-removed"] == [True]


def test_upstream_itself_would_delete_the_responses_with_the_person(argilla_server: ServerUnderTest) -> None:
    """Why `remove` does not delete. When this fails, it may."""
    person, connection = argilla_server.add_annotator("users-deleted"), argilla_server.connection
    with client_of(connection) as client:
        sheet = make_sheet(client, connection.workspace, "users-deleted")
        record = ask(client, "POST", f"/datasets/{sheet}/records/bulk", json={"items": rows(0, 1)})["items"][0]["id"]
        httpx.post(f"{connection.url}/api/v1/records/{record}/responses", json=answer((2, 1)),
                   headers={"X-Argilla-Api-Key": person.api_key}, trust_env=False).raise_for_status()
        identifier = next(user["id"] for user in ask(client, "GET", "/users")["items"] if user["username"] == "users-deleted")
        ask(client, "DELETE", f"/users/{identifier}")
        assert stored(client, sheet)[0] == {}


@pytest.mark.parametrize(("names", "said"), [
    (["users-new", "users new"], "letters, digits"), (["users-new", "users-new"], "given twice"),
    (["users-new", "owner"], "is there already")])
def test_one_bad_name_and_nobody_is_made(argilla_server: ServerUnderTest, names: list[str], said: str) -> None:
    with administration(argilla_server.connection) as people:
        with pytest.raises(ConfigError, match=said):
            people.add(names)
        assert "users-new" not in {account.name for account in people.accounts()}


@pytest.mark.parametrize(("name", "said"), [("owner", "is an owner"), ("users-nobody", "there is no user users-nobody")])
def test_who_cannot_be_removed(argilla_server: ServerUnderTest, name: str, said: str) -> None:
    with administration(argilla_server.connection) as people, pytest.raises(ConfigError, match=said):
        people.remove(name)


def test_the_commands_answer_with_one_object(argilla_server: ServerUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(argilla_server.home.folder), "--json"]

    def answered(*words: str) -> dict[str, object]:
        assert main([*words, *home]) == 0
        got: dict[str, object] = json.loads(capfd.readouterr().out)
        return got

    given = answered("users", "add", "users-cli-1", "users-cli-2", "--role", "admin")["users"]
    assert isinstance(given, list)
    assert [person["name"] for person in given] == ["users-cli-1", "users-cli-2"]
    assert who(argilla_server, given[1]["api_key"]) == "users-cli-2"
    listed = answered("users", "list")["users"]
    assert isinstance(listed, list)
    assert ("users-cli-2", "admin", True) in {(row["name"], row["role"], row["active"]) for row in listed}
    renewed = answered("users", "rotate", "users-cli-1")["users"]
    assert isinstance(renewed, list)
    assert sign_in(argilla_server, "users-cli-1", renewed[0]["password"]).status_code == 201
    assert answered("users", "remove", "users-cli-1") == {"ok": True, "removed": "users-cli-1", "responses_kept": True, "key_is_dead": True}


def test_passwords_and_keys_do_not_get_into_logs() -> None:
    assert "hidden" not in repr(Credentials(name="anna", password="hidden-1", api_key="hidden-2"))
