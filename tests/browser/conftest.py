"""A server and Debian's Chromium. One browser for each file: Playwright's event loop must have ended before tests that start their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from annotation.home import Home
from annotation.server.embedded import RunningServer, ServerOptions, running
from annotation.server.install import environment, environment_folder

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A new one for each file, and wherever the runner sets a file up again: names in it are never taken, nobody is locked out."""
    python = environment(environment_folder(os.environ))
    if python is None:
        pytest.skip("the annotation server is not installed: run `annotation install`")
    with running(Home(tmp_path_factory.mktemp("browser-home")), python, ServerOptions(), None) as server:
        yield server


@pytest.fixture(scope="session")
def chromium_path() -> Path:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no browser: install the Debian package chromium")
    return Path(found)


@pytest.fixture(scope="module")
def chromium(chromium_path: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=FLAGS)
        yield browser
        browser.close()
