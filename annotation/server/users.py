"""Who may annotate: accounts of an Argilla server, through its REST API.

Upstream deletes a user's responses together with the user. Nobody is deleted here, therefore: whoever is removed keeps a name and every
response, loses the workspaces, and gets a password and a key that nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from annotation.home import Connection
from annotation.server.reachable import ask, client_of
from annotation.server.secret_file import new_password
from rlhf.errors import BackendError, ConfigError

Role = Literal["annotator", "admin"]
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What is shown once and kept nowhere on this side. Upstream keeps the password hashed and the key as it is."""

    name: str
    password: str
    api_key: str
    key_is_new: bool = True
    """False where the server cannot replace keys: only the password is new."""

    def __repr__(self) -> str:
        return f"Credentials(name={self.name!r})"    # they do not get into logs


@dataclass(frozen=True, kw_only=True)
class Account:
    """`role` is upstream's: owner, admin or annotator."""

    name: str
    role: str
    active: bool
    """In the workspace; an account that was removed is in none."""
    since: str


@dataclass(frozen=True)
class UserAdministration:
    """The accounts of one workspace."""

    client: httpx.Client
    workspace: str

    def accounts(self) -> list[Account]:
        """Everybody the server knows, in order of their making."""
        inside = {member["id"] for member in ask(self.client, "GET", f"/workspaces/{self._workspace_id()}/users")["items"]}
        return [Account(name=user["username"], role=user["role"], since=user["inserted_at"],
                        active=user["role"] == "owner" or user["id"] in inside)
                for user in ask(self.client, "GET", "/users")["items"]]

    def add(self, names: Sequence[str], *, role: Role = "annotator") -> list[Credentials]:
        """Make accounts in the workspace; one that was removed comes back with new credentials. Checked before any is made."""
        present = {account.name: account for account in self.accounts()}
        for name in names:
            if not NAME.fullmatch(name):
                raise ConfigError(f"a user is named with letters, digits and . _ @ -, got {name!r}")
            if name in present and present[name].active:
                raise ConfigError(f"{name} is there already, as {present[name].role}. New credentials: annotation users rotate {name}")
        if len(set(names)) != len(names):
            raise ConfigError(f"a name is given twice: {', '.join(names)}")
        return [self._bring_back(name, role) if name in present else self._make(name, role) for name in names]

    def rotate(self, name: str) -> Credentials:
        """A new password and a new key in place of the old ones. Sessions that were signed in before end."""
        user = self._user(name)
        password = new_password()
        ask(self.client, "PATCH", f"/users/{user['id']}", json={"password": password})
        renewed = self.client.post(f"/users/{user['id']}/api-key")
        if renewed.status_code in (404, 405):    # upstream itself has no such call
            return Credentials(name=name, password=password, api_key=user["api_key"], key_is_new=False)
        if not renewed.is_success:
            raise BackendError(f"{name} has a new password, but no new key: {renewed.status_code} {renewed.text[:500]}. Run it again.")
        return Credentials(name=name, password=password, api_key=renewed.json()["api_key"])

    def remove(self, name: str) -> Credentials:
        """Bar the way in, and keep the responses. What is returned is to be thrown away; `key_is_new` says whether the old key is dead."""
        user = self._user(name)
        for workspace in ask(self.client, "GET", f"/users/{user['id']}/workspaces")["items"]:
            ask(self.client, "DELETE", f"/workspaces/{workspace['id']}/users/{user['id']}")
        return self.rotate(name)

    def _make(self, name: str, role: Role) -> Credentials:
        password = new_password()
        user = ask(self.client, "POST", "/users", json={"username": name, "first_name": name, "role": role, "password": password})
        ask(self.client, "POST", f"/workspaces/{self._workspace_id()}/users", json={"user_id": user["id"]})
        return Credentials(name=name, password=password, api_key=user["api_key"])

    def _bring_back(self, name: str, role: Role) -> Credentials:
        user = self._user(name)
        ask(self.client, "PATCH", f"/users/{user['id']}", json={"role": role})
        credentials = self.rotate(name)
        ask(self.client, "POST", f"/workspaces/{self._workspace_id()}/users", json={"user_id": user["id"]})
        return credentials

    def _user(self, name: str) -> dict[str, Any]:
        users: list[dict[str, Any]] = ask(self.client, "GET", "/users")["items"]
        for user in users:
            if user["username"] == name:
                if user["role"] == "owner":
                    raise ConfigError(f"{name} is an owner; these commands change annotators and admins only")
                return user
        raise ConfigError(f"there is no user {name}. Those there are: {', '.join(user['username'] for user in users)}")

    def _workspace_id(self) -> str:
        for workspace in ask(self.client, "GET", "/me/workspaces")["items"]:
            if workspace["name"] == self.workspace:
                return str(workspace["id"])
        raise BackendError(f"the server has no workspace {self.workspace}. `annotation serve` makes it.")


@contextmanager
def administration(connection: Connection) -> Iterator[UserAdministration]:
    """The accounts behind a connection, for a `with` block."""
    with client_of(connection) as client:
        yield UserAdministration(client, connection.workspace)
