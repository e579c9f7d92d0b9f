"""Starts the real Argilla server as a child process, and stops it."""

from __future__ import annotations

import fcntl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from rich.console import Console

from annotation.home import Connection, Home
from annotation.server.inside.settings import ServerSettings
from annotation.server.ports import claim, is_loopback
from annotation.server.secret_file import load_or_make
from annotation.server.server_log import ServerLog
from rlhf.errors import BackendError, ConfigError

OWNER = "owner"
PATIENCE = 120.0
"""Seconds until a server that does not answer is given up. It takes 4 to 20; a first start on a slow disk more."""
SECONDS_TO_STOP = 15.0
WATCH_SECONDS = 0.5
Role = Literal["serve", "worker"]
LOGS: dict[Role, str] = {"serve": "server.log", "worker": "worker.log"}


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What can be chosen about the server; a URL replaces the embedded part of that name."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    workspace: str = "preferences"
    database_url: str | None = None
    redis_url: str | None = None
    elasticsearch_url: str | None = None
    opensearch_url: str | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("--tls-certificate and --tls-key belong together; one is missing")
        for option, file in (("--tls-certificate", self.tls_certificate), ("--tls-key", self.tls_key)):
            if file is not None and not file.is_file():
                raise ConfigError(f"{option}: {file} is not a file")
        if self.elasticsearch_url and self.opensearch_url:
            raise ConfigError("--elasticsearch-url and --opensearch-url: one search engine at a time")
        if not is_loopback(self.host) and self.tls_certificate is None and not self.behind_proxy:
            raise ConfigError(f"--host {self.host} would send passwords over the network as they are. Give --tls-certificate and "
                              "--tls-key, or --behind-proxy where a proxy in front of it speaks HTTPS.")


class Child(NamedTuple):
    role: Role
    process: subprocess.Popen[bytes]
    log: ServerLog


@dataclass(frozen=True)
class RunningServer:
    connection: Connection
    children: tuple[Child, ...]

    @property
    def pid(self) -> int:
        return self.children[0].process.pid

    def require_alive(self) -> None:
        """Raises BackendError with the last lines of a process that has ended by itself."""
        for child in self.children:
            if (code := child.process.poll()) is not None:
                raise BackendError(f"the annotation server ended by itself (process `{child.role}`, exit code {code}). Its last lines, "
                                   f"from {child.log.path}:\n{child.log.tail()}")

    def wait(self) -> None:
        """Until a process ends; raises BackendError, because nobody asked it to."""
        while True:
            self.require_alive()
            time.sleep(WATCH_SECONDS)


@contextmanager
def running(home: Home, python: Path, options: ServerOptions, console: Console | None) -> Iterator[RunningServer]:
    """Start the server of a home with the Python of its environment; inside the block it answers, afterwards it has stopped.

    Raises BackendError where it does not start, where the port is taken, or where this home is being served already.
    """
    home.ensure()
    home.server.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        lock = stack.enter_context(only_server_of(home))
        settings_file = home.server / "settings.json"
        settings = settings_of(home, options)
        settings.write(settings_file)
        if console is not None:
            console.print("starting the annotation server", highlight=False)
        children = [stack.enter_context(child(role, python, settings_file, home.server / LOGS[role], lock)) for role in roles(options)]
        server = RunningServer(connection_to(settings), tuple(children))
        wait_until_it_answers(server)
        home.connect_to(server.connection)
        yield server


@contextmanager
def serving(home: Home, python: Path, options: ServerOptions | None = None, console: Console | None = None) -> Iterator[Connection]:
    """`running`, for those who only want to talk to the server."""
    with running(home, python, options or ServerOptions(), console) as server:
        yield server.connection


def roles(options: ServerOptions) -> list[Role]:
    """Processes: the server, and with a Redis the worker that takes its jobs from there."""
    return ["serve", "worker"] if options.redis_url else ["serve"]


def settings_of(home: Home, options: ServerOptions) -> ServerSettings:
    secrets = load_or_make(home.server / "secrets.json")
    return ServerSettings(
        folder=str(home.server.resolve()), host=options.host, port=claim(options.host, options.port), secret_key=secrets.secret_key,
        owner_name=OWNER, owner_password=secrets.owner_password, owner_api_key=secrets.owner_api_key, workspace=options.workspace,
        database_url=options.database_url, redis_url=options.redis_url, elasticsearch_url=options.elasticsearch_url,
        opensearch_url=options.opensearch_url, behind_proxy=options.behind_proxy,
        tls_certificate=str(options.tls_certificate.resolve()) if options.tls_certificate else None,
        tls_key=str(options.tls_key.resolve()) if options.tls_key else None)


def connection_to(settings: ServerSettings) -> Connection:
    """From this machine: a server that listens everywhere listens on the loopback address, too."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, f"[{settings.host}]" if ":" in settings.host else settings.host)
    scheme = "https" if settings.tls_certificate else "http"
    return Connection(url=f"{scheme}://{host}:{settings.port}", api_key=settings.owner_api_key, workspace=settings.workspace,
                      embedded=True, certificate=settings.tls_certificate)


@contextmanager
def only_server_of(home: Home) -> Iterator[IO[str]]:
    """Hold the home. The child inherits the lock, so that it is held until the last process that uses the database has ended."""
    with (home.server / ".lock").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackendError(f"{home.folder} is being served already. Stop that `annotation serve` first, or serve another "
                               "home.") from None
        yield file


@contextmanager
def child(role: Role, python: Path, settings_file: Path, log_file: Path, lock: IO[str]) -> Iterator[Child]:
    """A process of the server's environment. It sees our folder `server/` and nothing else of ours, in a session of its own so that Ctrl-C
    reaches the starter alone, which then stops it in order.
    """
    with subprocess.Popen([python, "-E", "-s", "-m", "inside", role, str(settings_file.resolve())], cwd=Path(__file__).parent,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),),
                          start_new_session=True) as process:
        assert process.stdout is not None
        log = ServerLog(log_file, process.stdout)
        try:
            yield Child(role, process, log)
        finally:
            stop(process)
            log.thread.join()


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL where that is not heard: an acknowledged response is on the disk either way."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_it_answers(server: RunningServer) -> None:
    """Only this home's server knows the owner's key: whoever answers to it is the one that was started."""
    import httpx

    from annotation.server.reachable import client_of

    with client_of(server.connection) as client:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            server.require_alive()
            try:
                if client.get("/me").status_code == 200:
                    return
            except httpx.TransportError:    # it does not listen yet
                time.sleep(0.1)
    log = server.children[0].log
    raise BackendError(f"the annotation server did not answer within {PATIENCE:.0f} s. Its last lines, from {log.path}:\n{log.tail()}")
