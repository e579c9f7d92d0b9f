"""The real server for those tests that need it: one for each process of the test runner, on a free port, with an empty home."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import own_services
import pytest
from server_under_test import ServerUnderTest

from annotation.home import Home
from annotation.server.embedded import ServerOptions, running
from annotation.server.install import environment, environment_folder


@pytest.fixture(scope="session")
def server_python() -> Path:
    """The Python of the server's environment; where that is missing, the test is skipped and says what makes it."""
    python = environment(environment_folder(os.environ))
    if python is None:
        pytest.skip("the annotation server is not installed: run `annotation install`")
    return python


@pytest.fixture(scope="session")
def argilla_server(server_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    home = Home(tmp_path_factory.mktemp("annotation-home"))
    with running(home, server_python, ServerOptions(), None) as server:
        yield ServerUnderTest(server.connection, home, server.pid)


@pytest.fixture(scope="session")
def argilla_on_postgresql(server_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """The same with nothing embedded but the search: PostgreSQL, and a worker that gets its jobs through Redis."""
    home = Home(tmp_path_factory.mktemp("annotation-home-postgresql"))
    with (own_services.postgresql() as database_url, own_services.redis() as redis_url,
          running(home, server_python, ServerOptions(database_url=database_url, redis_url=redis_url), None) as server):
        yield ServerUnderTest(server.connection, home, server.pid)
