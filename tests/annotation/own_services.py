"""A PostgreSQL and a Redis of the test's own: Debian's binaries, in a temporary folder, on a free port, stopped afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of an empty database. PostgreSQL refuses to run as root: it then runs as the user that the Debian package makes."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not versions:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    bin = versions[-1].parent
    user = "postgres" if os.geteuid() == 0 else None
    with folder_of(user) as folder:
        data = folder / "data"
        subprocess.run([bin / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--locale=C.UTF-8", "--encoding=UTF8", "--no-sync"],
                       user=user, group=user, cwd=folder, check=True, capture_output=True)
        port = free_port()
        command = [bin / "postgres", "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", folder, "-c", "fsync=off"]
        with process(command, user, folder, port):
            end = time.monotonic() + PATIENCE
            while subprocess.run([bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)], check=False).returncode:    # it recovers
                assert time.monotonic() < end, (folder / "log").read_text(errors="replace")
                time.sleep(0.05)
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"


@contextmanager
def redis() -> Iterator[str]:
    """The URL of an empty Redis, which forgets everything when it stops."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("Redis is not installed: apt-get install redis-server")
    with folder_of(None) as folder:
        port = free_port()
        with process([binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder], None, folder, port):
            yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def folder_of(user: str | None) -> Iterator[Path]:
    """Not below pytest's own folder, which another user cannot enter."""
    with tempfile.TemporaryDirectory(prefix="prefloop-", ignore_cleanup_errors=True) as name:
        if user:
            account = pwd.getpwnam(user)
            os.chown(name, account.pw_uid, account.pw_gid)
        yield Path(name)


@contextmanager
def process(command: Sequence[str | Path], user: str | None, folder: Path, port: int) -> Iterator[None]:
    """Runs until the end of the block; inside it, the port is listened on."""
    log = folder / "log"
    with (log.open("wb") as file,
          subprocess.Popen(command, user=user, group=user, cwd=folder, stdout=file, stderr=subprocess.STDOUT) as running):
        try:
            end = time.monotonic() + PATIENCE
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert running.poll() is None and time.monotonic() < end, log.read_text(errors="replace")
                time.sleep(0.05)
            yield
        finally:
            running.terminate()
            running.wait(PATIENCE)
