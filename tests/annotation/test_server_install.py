"""The installer of the server's environment, tried on a small lock file whose packages are made here: killed, run twice, lied to."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from annotation.server.install import (
    AT_ONCE,
    LOCK_FILE,
    NOTES,
    environment,
    environment_folder,
    install,
    name_of,
    require_python,
    require_room,
    requirements,
)
from rlhf.errors import BackendError, ConfigError

PACKAGES = 2 * AT_ONCE + 1
INSTALL = """
import sys
from pathlib import Path
from annotation.server.install import install
install(Path(sys.argv[1]), None, Path(sys.argv[2]))
"""


def make_wheel(folder: Path, name: str) -> Path:
    """A package with one module, NAME.py, in which NAME is its own name."""
    files = {f"{name}.py": f"NAME = {name!r}\n", f"{name}-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
             f"{name}-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join(f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}\n"
                     for path, text in files.items())
    wheel = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{name}-1.dist-info/RECORD": f"{record}{name}-1.dist-info/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    """Locks packages that lie beside it, so that no network is asked."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    entries = []
    for index in range(PACKAGES):
        wheel = make_wheel(wheels, f"tiny{index}")
        entries.append(f"tiny{index} @ {wheel.as_uri()} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    (tmp_path / "requirements.lock").write_text("# made by the test\n" + "".join(entries), encoding="utf-8")
    return tmp_path / "requirements.lock"


def importable(python: Path) -> int:
    """How many of the packages can be imported there."""
    code = f"import importlib; print(sum(importlib.import_module(f'tiny{{i}}').NAME == f'tiny{{i}}' for i in range({PACKAGES})))"
    return int(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_killed_and_called_again_it_continues(lock_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "server"

    def makes_the_environment() -> bool:
        return (folder / "pyvenv.cfg").is_file()

    def has_the_first_packages() -> bool:
        return (folder / NOTES).is_file() and f"tiny{AT_ONCE - 1} @" in (folder / NOTES).read_text(encoding="utf-8")

    for reached in (makes_the_environment, has_the_first_packages):
        with subprocess.Popen([sys.executable, "-c", INSTALL, folder, lock_file]) as process:
            while not reached():
                assert process.poll() is None, "it ended before it could be killed"
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        assert environment(folder, lock_file) is None    # a part does not count as the whole
    python = install(folder, None, lock_file)
    assert environment(folder, lock_file) == python
    assert importable(python) == PACKAGES


@pytest.mark.slow
def test_two_at_once_make_one_environment(lock_file: Path, tmp_path: Path) -> None:
    both = [multiprocessing.get_context("spawn").Process(target=install, args=(tmp_path / "server", None, lock_file)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert importable(tmp_path / "server/bin/python") == PACKAGES


@pytest.mark.slow
def test_a_package_that_is_not_the_locked_one_is_refused(lock_file: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path, "tiny0").replace(tmp_path / "wheels/tiny0-1-py3-none-any.whl")
    with zipfile.ZipFile(tmp_path / "wheels/tiny0-1-py3-none-any.whl", "a") as archive:
        archive.writestr("evil.py", "")
    with pytest.raises(BackendError, match=r"could not install tiny0 .*(?s:.*)HASH"):
        install(tmp_path / "server", None, lock_file)
    assert environment(tmp_path / "server", lock_file) is None


@pytest.mark.parametrize("name", ["thesis.txt", "pyvenv.cfg", ".lock"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty and holds no server environment"):
        install(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_every_locked_package_is_pinned_and_hashed() -> None:
    text = LOCK_FILE.read_text(encoding="utf-8")
    entries = requirements(text)
    assert sum(entry.count("--hash=sha256:") for entry in entries) == len(re.findall(r"sha256:[0-9a-f]{64}", text))
    assert [entry for entry in entries if "==" not in name_of(entry) or "--hash=" not in entry] == []
    assert len({name_of(entry) for entry in entries}) == len(entries)
    assert any(name_of(entry).startswith("argilla-server==2.8.0") for entry in entries)


def test_the_place_is_the_users_cache_unless_one_is_named(tmp_path: Path) -> None:
    assert environment_folder({"PREFLOOP_SERVER_ENV": str(tmp_path / "here"), "XDG_CACHE_HOME": "/elsewhere"}) == tmp_path / "here"
    assert environment_folder({"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "prefloop"
    assert environment_folder({}).is_relative_to(Path.home() / ".cache/prefloop")


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_without_wheels_is_named(version: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"3\.11 to 3\.13, this is 3\.{version[1]}"):
        require_python(version)


def test_too_little_room_is_said_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"needs 1000000000 MB, .* MB free"):
        require_room(tmp_path, 10**15)
    require_room(tmp_path, 1)
