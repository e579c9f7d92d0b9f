"""`annotation serve` as its user sees it: what it refuses, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_under_test import ServerUnderTest

from annotation.cli import main
from annotation.home import Connection, Home
from annotation.server.embedded import ServerOptions, only_server_of, running
from annotation.server.ports import claim, holder, is_loopback
from annotation.server.secret_file import load_or_make
from annotation.server.server_log import LARGEST, ServerLog
from rlhf.errors import BackendError, ConfigError

SECONDS = 60.0


def wait_for(condition: object, what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():    # type: ignore[operator]
        assert time.monotonic() < end, f"{what} did not happen within {SECONDS:.0f} s"
        time.sleep(0.05)


def answers(connection: Connection) -> bool:
    try:
        return httpx.get(f"{connection.url}/api/v1/version", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def annotation_serve(home: Home) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, once its server answers."""
    with subprocess.Popen([sys.executable, "-m", "annotation.cli", "serve", "--home", home.folder, "--port", "0", "--json"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: process.poll() is not None or (home.folder / "connection.json").is_file(), "the start")
            assert process.poll() is None, process.communicate()[1]
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def is_served(home: Home) -> bool:
    try:
        with only_server_of(home):
            return False
    except BackendError:
        return True


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_order(server_python: Path, tmp_path: Path, number: int) -> None:
    home = Home(tmp_path / "home")
    with annotation_serve(home) as process:
        connection = home.connection()
        assert answers(connection)
        process.send_signal(number)
        out, _err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert json.loads(out)["stopped"] is True
    assert not answers(connection)
    assert not is_served(home)


def test_no_server_is_left_behind_when_the_starter_is_killed(server_python: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with annotation_serve(home) as process:
        connection, child = home.connection(), child_of(process.pid)
        assert answers(connection)
        process.kill()
        wait_for(lambda: not Path(f"/proc/{child}").is_dir(), "the end of the server")
    assert not is_served(home)


def test_a_server_that_dies_ends_the_command_with_its_last_lines(server_python: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with annotation_serve(home) as process:
        os.kill(child_of(process.pid), signal.SIGKILL)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert "exit code -9" in json.loads(out)["error"]
    assert "server.log" in err
    assert "Running upgrade" in err    # what it printed


def test_what_is_secret_is_for_its_owner_alone(argilla_server: ServerUnderTest) -> None:
    home = argilla_server.home
    assert stat.S_IMODE(home.folder.stat().st_mode) == stat.S_IMODE(home.server.stat().st_mode) == 0o700
    for file in (home.folder / "connection.json", *(home.server / name for name in ("secrets.json", "settings.json", "argilla.db"))):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_secrets_are_made_once_and_differ_between_homes(tmp_path: Path) -> None:
    mask = os.umask(0)    # the most careless shell
    try:
        first = load_or_make(tmp_path / "first.json")
        assert stat.S_IMODE((tmp_path / "first.json").stat().st_mode) == 0o600
    finally:
        os.umask(mask)
    assert load_or_make(tmp_path / "first.json") == first
    other = load_or_make(tmp_path / "other.json")
    texts = [first.secret_key, first.owner_password, first.owner_api_key, other.secret_key, other.owner_password, other.owner_api_key]
    assert len(set(texts)) == 6
    assert not any(text in repr(first) for text in texts)


def test_a_home_is_served_once(argilla_server: ServerUnderTest, server_python: Path) -> None:
    assert is_served(argilla_server.home)
    with pytest.raises(BackendError, match="is being served already"), \
            running(argilla_server.home, server_python, ServerOptions(), None):
        pass
    assert answers(argilla_server.connection)


def test_a_port_that_is_taken_is_named_with_its_holder(capsys: pytest.CaptureFixture[str], server_python: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--home", str(tmp_path / "home"), "--port", str(port)]) == 2
        said = capsys.readouterr().err
        assert f"port {port} is taken by process {os.getpid()} (" in said
        assert "--port" in said
    assert claim("127.0.0.1", port) == port
    assert holder(port) == "another program"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--host", "0.0.0.0"], "--tls-certificate"),
    (["--host", "::"], "--behind-proxy"),
    (["--host", "192.0.2.7"], "--behind-proxy"),
    (["--tls-key", "missing.pem"], "belong together"),
    (["--tls-key", "missing.pem", "--tls-certificate", "missing.pem"], "is not a file"),
    (["--elasticsearch-url", "http://a", "--opensearch-url", "http://b"], "one search engine"),
    (["--api-key-file", "key"], "belongs to --backend-url"),
    (["--host", "192.0.2.7", "--behind-proxy"], "cannot listen on 192.0.2.7"),    # an address for documentation, nobody's
])
def test_what_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], server_python: Path, tmp_path: Path,
                                                arguments: list[str], said: str) -> None:
    assert main(["serve", "--home", str(tmp_path / "home"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "home" / "connection.json").exists()


@pytest.mark.parametrize(("host", "alone"), [
    ("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("::1", True),
    ("0.0.0.0", False), ("::", False), ("192.0.2.5", False), ("localhost.example.org", False)])
def test_only_loopback_addresses_need_no_tls(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_the_log_is_limited_and_never_makes_the_server_wait(tmp_path: Path) -> None:
    line = b"x" * 999 + b"\n"
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb") as printing:
        log = ServerLog(tmp_path / "server.log", stream)
        for _ in range(3 * LARGEST // len(line)):
            printing.write(line)
        printing.close()
        log.thread.join()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"server.log", "server.log.1"}
    assert max(sizes.values()) <= LARGEST + len(line)
    assert log.tail().count("\n") == 24


def test_a_log_that_cannot_be_written_counts_what_it_lost(tmp_path: Path) -> None:
    (tmp_path / "server.log").mkdir()    # a place where no file can be written, as on a full disk
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb") as printing:
        log = ServerLog(tmp_path / "server.log", stream)
        printing.write(b"one\ntwo\n")
        printing.flush()
        wait_for(lambda: log.lost == 2, "the loss")
        (tmp_path / "server.log").rmdir()
        printing.write(b"three\n")
        printing.close()
        log.thread.join()
    assert (tmp_path / "server.log").read_text(encoding="utf-8") == "(2 lines were lost: the disk was full)\nthree\n"


class TestSomebodyElsesServer:
    """The server of these tests stands for one that somebody else runs."""

    def test_it_is_checked_and_remembered(self, argilla_server: ServerUnderTest, tmp_path: Path) -> None:
        key = tmp_path / "key"
        key.write_text(argilla_server.connection.api_key + "\n", encoding="utf-8")
        home = Home(tmp_path / "home")
        arguments = ["serve", "--home", str(home.folder), "--backend-url", argilla_server.connection.url + "/", "--workspace", "elsewhere"]
        assert main([*arguments, "--api-key-file", str(key)]) == 0
        assert home.connection() == Connection(url=argilla_server.connection.url, api_key=argilla_server.connection.api_key,
                                               workspace="elsewhere", embedded=False)
        assert not home.server.exists()
        assert main(["users", "list", "--home", str(home.folder)]) == 0    # the workspace is there

    def test_the_key_may_come_from_the_environment(self, argilla_server: ServerUnderTest, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ARGILLA_API_KEY", argilla_server.connection.api_key)
        assert main(["serve", "--home", str(tmp_path / "home"), "--backend-url", argilla_server.connection.url]) == 0

    @pytest.mark.parametrize(("key", "said"), [("", "ARGILLA_API_KEY"), ("wrong", "the API key is not known there")])
    def test_a_key_that_will_not_do(self, argilla_server: ServerUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str], key: str, said: str) -> None:
        monkeypatch.setenv("ARGILLA_API_KEY", key)
        assert main(["serve", "--home", str(tmp_path / "home"), "--backend-url", argilla_server.connection.url]) == 2
        assert said in capsys.readouterr().err

    def test_an_annotators_key_will_not_do(self, argilla_server: ServerUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("ARGILLA_API_KEY", argilla_server.add_annotator("start-not-an-owner").api_key)
        assert main(["serve", "--home", str(tmp_path / "home"), "--backend-url", argilla_server.connection.url]) == 2
        assert "an owner's is needed" in capsys.readouterr().err

    @pytest.mark.parametrize("url", ["argilla.example.org", "ftp://argilla.example.org", "http://", "http://host/?key=1"])
    def test_what_is_no_address(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        from annotation.server.external import use

        with pytest.raises(ConfigError, match="is an address like"):
            use(Home(tmp_path), url, "key", "preferences")

    def test_a_server_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("ARGILLA_API_KEY", "key")
        assert main(["serve", "--home", str(tmp_path / "home"), "--backend-url", f"http://127.0.0.1:{claim('127.0.0.1', 0)}"]) == 2
        assert "does not answer" in capsys.readouterr().err
