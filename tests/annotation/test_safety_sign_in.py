"""Signing in, sessions, and what every answer carries, on a real server behind a proxy that the tests play."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from annotation.home import Home
from annotation.server.embedded import RunningServer, ServerOptions, running
from annotation.server.users import Credentials, administration


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("safety-home"))


@pytest.fixture(scope="module")
def server(home: Home, server_python: Path) -> Iterator[RunningServer]:
    with running(home, server_python, ServerOptions(behind_proxy=True), None) as server:
        yield server


def add(server: RunningServer, name: str) -> Credentials:
    with administration(server.connection) as users:
        return users.add([name])[0]


def from_address(server: RunningServer, address: str, **headers: str) -> httpx.Client:
    """A client whose requests come through the proxy from this address."""
    return httpx.Client(base_url=server.connection.url, timeout=30,
                        headers={"X-Forwarded-For": f"1.2.3.4, {address}", "X-Forwarded-Proto": "https", **headers})


def sign_in(client: httpx.Client, name: str, password: str) -> httpx.Response:
    return client.post("/api/v1/token", data={"username": name, "password": password})


def bearer(answer: httpx.Response) -> dict[str, str]:
    return {"Authorization": f"Bearer {answer.json()['access_token']}"}


def test_five_wrong_passwords_and_even_the_right_one_has_to_wait(server: RunningServer) -> None:
    password = add(server, "forgetful").password
    with from_address(server, "198.51.100.1") as client:
        assert [sign_in(client, "forgetful", "wrong").status_code for _ in range(5)] == [401] * 5
        refused = sign_in(client, "forgetful", password)
    assert refused.status_code == 429
    assert 50 <= int(refused.headers["Retry-After"]) <= 60
    with from_address(server, "198.51.100.2") as elsewhere:    # who guesses from afar keeps nobody out
        assert sign_in(elsewhere, "forgetful", password).status_code == 201


def test_signing_in_wipes_the_slate(server: RunningServer) -> None:
    password = add(server, "clumsy").password
    with from_address(server, "198.51.100.3") as client:
        for _ in range(2):
            assert [sign_in(client, "clumsy", "wrong").status_code for _ in range(4)] == [401] * 4
            assert sign_in(client, "clumsy", password).status_code == 201


@pytest.mark.slow
def test_an_address_that_tries_many_names_is_stopped_and_sessions_there_go_on(server: RunningServer) -> None:
    password = add(server, "neighbour").password
    with from_address(server, "198.51.100.4") as client:
        session = bearer(sign_in(client, "neighbour", password))
        statuses = [sign_in(client, f"name{number}", "wrong").status_code for number in range(55)]
        assert statuses == [401] * 50 + [429] * 5
        assert client.get("/api/v1/me", headers=session).status_code == 200


def test_guessing_at_keys_is_stopped(server: RunningServer) -> None:
    with from_address(server, "198.51.100.5") as client:
        statuses = [client.get("/api/v1/me", headers={"X-Argilla-Api-Key": f"guess{number}"}).status_code for number in range(55)]
        assert statuses == [401] * 50 + [429] * 5
        assert client.get("/api/v1/me", headers={"X-Argilla-Api-Key": server.connection.api_key}).status_code == 429
    with from_address(server, "198.51.100.6", **{"X-Argilla-Api-Key": server.connection.api_key}) as elsewhere:
        assert elsewhere.get("/api/v1/me").status_code == 200


def test_an_ipv6_network_counts_as_one_address(server: RunningServer) -> None:
    add(server, "target")
    statuses = []
    for host in range(6):
        with from_address(server, f"2001:db8:1:2::{host:x}") as client:
            statuses.append(sign_in(client, "target", "wrong").status_code)
    assert statuses == [401] * 5 + [429]


def test_an_unknown_name_is_answered_like_a_wrong_password(server: RunningServer) -> None:
    add(server, "known")
    with from_address(server, "198.51.100.7") as client:
        known, unknown = sign_in(client, "known", "wrong"), sign_in(client, "unknown", "wrong")
    assert (known.status_code, known.text) == (unknown.status_code, unknown.text) == (401, known.text)


@pytest.mark.parametrize("change", ["rotate", "remove"])
def test_a_session_ends_with_the_credentials_it_was_given_for(server: RunningServer, change: str) -> None:
    old = add(server, f"changing-{change}")
    with from_address(server, "198.51.100.8") as client:
        session = bearer(sign_in(client, old.name, old.password))
        assert client.get("/api/v1/me", headers=session).status_code == 200
        with administration(server.connection) as users:
            new = users.rotate(old.name) if change == "rotate" else users.remove(old.name)
        assert client.get("/api/v1/me", headers=session).status_code == 401
        assert client.get("/api/v1/me", headers={"X-Argilla-Api-Key": old.api_key}).status_code == 401
        assert sign_in(client, old.name, old.password).status_code == 401
        assert client.get("/api/v1/me", headers=bearer(sign_in(client, new.name, new.password))).status_code == 200


@pytest.mark.parametrize("token", ["x", "a.b.c", "eyJhbGciOiJub25lIn0.eyJ1c2VybmFtZSI6Im93bmVyIn0."])    # the last: alg none, owner
def test_what_is_no_session_is_refused(server: RunningServer, token: str) -> None:
    with from_address(server, "198.51.100.9") as client:
        assert client.get("/api/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 401


def test_every_answer_carries_the_headers(server: RunningServer) -> None:
    with from_address(server, "198.51.100.10") as client:
        for path in ("/", "/sign-in", "/_nuxt/nothing.js", "/api/v1/version", "/api/v1/me", "/api/v1/nothing"):
            headers = client.get(path).headers
            policy = headers["Content-Security-Policy"]
            assert "'unsafe-eval'" not in policy
            assert "'unsafe-inline'" not in re.search("script-src [^;]*", policy).group()    # type: ignore[union-attr]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Strict-Transport-Security"]
            assert {"Server", "Server-Timing", "Set-Cookie"} & set(headers) == set()
            assert (headers.get("Cache-Control") == "no-store") == path.startswith("/api/")


def test_no_other_site_may_read(server: RunningServer) -> None:
    with from_address(server, "198.51.100.11", Origin="https://evil.example") as client:
        allowed = client.options("/api/v1/me", headers={"Access-Control-Request-Method": "GET"})
        assert "Access-Control-Allow-Origin" not in allowed.headers
        assert "Access-Control-Allow-Origin" not in client.get("/api/v1/version").headers


def test_a_forged_hop_is_not_believed_without_a_proxy(argilla_server) -> None:    # type: ignore[no-untyped-def]
    """Else each guess would come from another address."""
    with httpx.Client(base_url=argilla_server.connection.url) as client:
        statuses = [client.post("/api/v1/token", data={"username": "nobody-of-that-name", "password": "x"},
                                headers={"X-Forwarded-For": f"198.51.100.{number}"}).status_code for number in range(6)]
        assert statuses == [401] * 5 + [429]
        assert "Strict-Transport-Security" not in client.get("/", headers={"X-Forwarded-Proto": "https"}).headers


def test_tls_and_sessions_that_survive_a_restart(server_python: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
                    "-subj", "/CN=annotation", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
                   check=True, capture_output=True)
    home, options = Home(tmp_path / "home"), ServerOptions(host="0.0.0.0", tls_certificate=certificate, tls_key=key)
    trust = ssl.create_default_context(cafile=str(certificate))
    with running(home, server_python, options, None) as server:
        ann = add(server, "ann")
        with httpx.Client(base_url=server.connection.url, verify=trust) as client:
            assert server.connection.url.startswith("https://")
            session = bearer(sign_in(client, "ann", ann.password))
            assert "Strict-Transport-Security" in client.get("/").headers
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.connection.url}/".replace("https:", "http:"))
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(server.connection.url)
    assert (home.server / "settings.json").stat().st_mode & 0o077 == 0
    with (running(home, server_python, options, None) as again, httpx.Client(base_url=again.connection.url, verify=trust) as client):
        assert client.get("/api/v1/me", headers=session).json()["username"] == "ann"


def test_secrets_are_not_in_the_log(server: RunningServer, home: Home) -> None:
    secrets = json.loads((home.server / "secrets.json").read_text(encoding="utf-8"))
    log = (home.server / "server.log").read_text(encoding="utf-8")
    assert [name for name, value in secrets.items() if value in log] == []
